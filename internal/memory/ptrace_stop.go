package memory

import (
	"context"
	"errors"
	"fmt"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/forkd/forkd/internal/procstat"
)

// A thread that we trace stops in one of three ways.
type stopKind int

const (
	stopEvent   stopKind = iota // PTRACE_INTERRUPT, or a stop of the whole process
	stopSyscall                 // at the entry or the exit of a system call
	stopSignal                  // a signal is about to be delivered
)

type stopped struct {
	kind  stopKind
	sig   int
	entry bool // of a system call
}

// deliver is the signal to let the thread go on with.
func (s stopped) deliver() int {
	if s.kind == stopSignal {
		return s.sig
	}
	return 0
}

// forced reports whether the signal is one that the kernel raises for what a thread did.
func (s stopped) forced() bool {
	switch unix.Signal(s.sig) {
	case unix.SIGSEGV, unix.SIGBUS, unix.SIGILL, unix.SIGFPE, unix.SIGTRAP, unix.SIGSYS:
		return true
	}
	return false
}

const (
	// spins is how often a stop is looked for before we sleep: the next one is nearly always a few microseconds away.
	spins = 300
	// lostSignal bounds the wait for a SIGCHLD that came before it was asked for.
	lostSignal = 10 * time.Millisecond

	syscallInfoEntry = 1 // PTRACE_SYSCALL_INFO_ENTRY
)

// await waits until the thread has stopped. It asks the thread and not wait(2): anybody in this process who waits for the monitor
// may have consumed that, and it must never reap a monitor that somebody else waits for.
func (r *remote) await(ctx context.Context) (stopped, error) {
	for spin := 0; ; spin++ {
		s, err := r.look()
		if err != unix.ESRCH { // ESRCH: it runs, or it is gone
			return s, err
		}
		if spin < spins {
			unix.Syscall(unix.SYS_SCHED_YIELD, 0, 0, 0)
			continue
		}
		if err := r.proc.gone(); err != nil {
			return stopped{}, err
		}
		if r.ended() {
			return stopped{}, errThreadEnded
		}
		timer := time.NewTimer(lostSignal)
		select {
		case <-ctx.Done():
			timer.Stop()
			return stopped{}, fmt.Errorf("it did not get there in time: %w", context.Cause(ctx))
		case <-r.stop:
		case <-timer.C:
		}
		timer.Stop()
	}
}

// errThreadEnded says that the traced thread has ended, and with it, in all likelihood, its process.
var errThreadEnded = errors.New("the thread has ended")

// ended reports whether the thread has ended. Traced, it stays a zombie until we let go of it, and its process with it.
func (r *remote) ended() bool {
	s, err := procstat.ReadThread(r.proc.PID, r.tid)
	return err != nil || s.Ended()
}

// look says how the thread is stopped, or ESRCH.
func (r *remote) look() (stopped, error) {
	var info struct {
		signo, errno, code int32
		_                  [116]byte
	}
	if err := r.ptracePtr(unix.PTRACE_GETSIGINFO, 0, unsafe.Pointer(&info)); err != nil {
		return stopped{}, err
	}
	switch {
	case info.code>>8 == unix.PTRACE_EVENT_STOP:
		return stopped{kind: stopEvent}, nil
	case info.signo == int32(unix.SIGTRAP) && info.code == int32(unix.SIGTRAP)|0x80:
		var call [88]byte // struct ptrace_syscall_info: its first byte says entry or exit
		if err := r.ptracePtr(unix.PTRACE_GET_SYSCALL_INFO, uintptr(len(call)), unsafe.Pointer(&call)); err != nil {
			return stopped{}, err
		}
		return stopped{kind: stopSyscall, entry: call[0] == syscallInfoEntry}, nil
	}
	return stopped{kind: stopSignal, sig: int(info.signo)}, nil
}

func (r *remote) sigmask(request int, mask *uint64) error {
	return r.ptracePtr(request, unsafe.Sizeof(*mask), unsafe.Pointer(mask))
}

func (r *remote) ptrace(request int, addr, data uintptr) error {
	if _, _, e := unix.Syscall6(unix.SYS_PTRACE, uintptr(request), uintptr(r.tid), addr, data, 0, 0); e != 0 {
		return e
	}
	return nil
}

func (r *remote) ptracePtr(request int, addr uintptr, data unsafe.Pointer) error {
	if _, _, e := unix.Syscall6(unix.SYS_PTRACE, uintptr(request), uintptr(r.tid), addr, uintptr(data), 0, 0); e != 0 {
		return e
	}
	return nil
}
