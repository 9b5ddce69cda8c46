package memory

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"runtime"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// ErrNotPermitted says that this host does not let us act in another process, so neither live branches nor layers over an image
// can be had.
var ErrNotPermitted = errors.New("may not act in another process")

// restoreTime is how long giving a thread back to itself may take once its injected calls are over.
const restoreTime = 2 * time.Second

// remote is a stopped thread of another process, in which system calls can be run. Nothing else of that process is stopped:
// vCPUs go on.
//
// How it works: the thread is seized and interrupted while it waits in a system call, so it stands behind a `syscall`
// instruction. Our calls are made by stepping back onto that instruction with other registers. Signals are blocked meanwhile:
// they stay pending and meet the thread as if they had arrived a little later. In the end the thread stands in the kernel where
// it was stopped, with the registers it had, and the kernel restarts or ends its own system call as it does after any stop.
//
// A thread that is busy in its own code is let go on to its next system call, which is put off until ours have been made.
//
// If we die in the middle, the kernel releases the thread as it stands. Between the first call and the last register restored
// (tens of microseconds) that would be with our registers.
//
// Do not wait for the monitor with os/exec while its main thread is stopped here: to a parent that traces its own child the
// kernel reports a stop wherever it waits for the child's end. Poll a pidfd first, or name another thread as the idle one.
type remote struct {
	proc *process
	tid  int
	stop chan os.Signal // SIGCHLD: something happened to some child or tracee

	gate  uint64          // address of a syscall instruction
	saved unix.PtraceRegs // what the thread goes on with
	mask  uint64          // signals it blocks
	dirty bool            // registers or mask are not its own any more
}

// inThread stops the idle thread of a monitor, lets do run system calls in it, and lets it go on as if nothing had happened.
// ctx bounds how long that may take, the time until the thread can be used included.
func inThread(ctx context.Context, p *process, do func(*remote) error) error {
	tid, err := p.thread(p.IdleThread)
	if err != nil {
		return err
	}
	done := make(chan error, 1)
	go func() {
		// A tracee belongs to a thread. It is never unlocked, so that the thread ends with this function, and the kernel lets
		// go of the tracee even where we can't (it has not stopped yet).
		runtime.LockOSThread()
		done <- trace(ctx, p, tid, do)
	}()
	if err := <-done; err != nil {
		return p.blame(fmt.Errorf("thread %d of monitor %d: %w", tid, p.PID, err))
	}
	return nil
}

func trace(ctx context.Context, p *process, tid int, do func(*remote) error) (err error) {
	r := &remote{proc: p, tid: tid, stop: make(chan os.Signal, 1)}
	signal.Notify(r.stop, unix.SIGCHLD)
	defer signal.Stop(r.stop)
	if err := r.seize(); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, r.release(ctx)) }()
	if err := r.settle(ctx); err != nil {
		return err
	}
	if err := r.blockSignals(); err != nil {
		return err
	}
	return do(r)
}

// seize attaches to the thread without stopping it, and then asks it to stop.
func (r *remote) seize() error {
	options := uintptr(unix.PTRACE_O_TRACESYSGOOD)
	if filtered(r.proc.PID, r.tid) {
		options |= unix.PTRACE_O_SUSPEND_SECCOMP // its filter would kill it for our calls
	}
	if err := r.ptrace(unix.PTRACE_SEIZE, 0, options); err != nil {
		switch {
		case errors.Is(err, unix.EPERM):
			return fmt.Errorf("seize: %w: run the daemon as root, outside seccomp filters and debuggers (%w)", ErrNotPermitted, err)
		case errors.Is(err, unix.EINVAL):
			return fmt.Errorf("suspend its seccomp filter: %w: the kernel lacks CONFIG_CHECKPOINT_RESTORE (%w)", ErrNotPermitted, err)
		}
		return fmt.Errorf("seize: %w", err)
	}
	if err := unix.PtraceInterrupt(r.tid); err != nil {
		return fmt.Errorf("interrupt: %w", err)
	}
	return nil
}

// filtered reports whether a thread runs under seccomp. When in doubt it does.
func filtered(pid, tid int) bool {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/task/%d/status", pid, tid))
	return err != nil || !strings.Contains(string(b), "\nSeccomp:\t0\n")
}

// settle waits until the thread has stopped behind a system call, and remembers how it goes on from there.
func (r *remote) settle(ctx context.Context) error {
	for {
		s, err := r.await(ctx)
		if err != nil {
			return fmt.Errorf("wait for its stop: %w", err)
		}
		if s.kind == stopSyscall && s.entry {
			return r.putOff(ctx)
		}
		if s.kind != stopSignal {
			if err := unix.PtraceGetRegs(r.tid, &r.saved); err != nil {
				return fmt.Errorf("read registers: %w", err)
			}
			if inSyscall(&r.saved) && r.useGate() == nil {
				return nil
			}
		}
		// It was in its own code, is about to take a signal, or comes back from one and stands where that had found it: let it, until it
		// makes its next call.
		if err := unix.PtraceSyscall(r.tid, s.deliver()); err != nil {
			return fmt.Errorf("go on to its next system call: %w", err)
		}
	}
}

// useGate takes the instruction that the thread stands behind for ours; or before, if it was stopped just when the kernel had set it
// back to make its call anew.
func (r *remote) useGate() error {
	behind := r.saved.Rip - uint64(len(syscallInsn))
	for _, gate := range []uint64{behind, r.saved.Rip} {
		var insn [len(syscallInsn)]byte
		if _, err := unix.PtracePeekText(r.tid, uintptr(gate), insn[:]); err != nil {
			return fmt.Errorf("read instruction at %#x: %w", gate, err)
		}
		if insn == syscallInsn && r.saved.Cs == userCode64 {
			r.gate = gate
			return nil
		}
	}
	return fmt.Errorf("is in a system call but not at a 64-bit syscall instruction (%#x): it can't be used", behind)
}

// putOff turns the system call that the thread is about to make into none; restored, it will make it anew.
func (r *remote) putOff(ctx context.Context) error {
	if err := unix.PtraceGetRegs(r.tid, &r.saved); err != nil {
		return fmt.Errorf("read registers: %w", err)
	}
	if err := r.useGate(); err != nil { // it is the one behind
		return err
	}
	skip := r.saved
	skip.Orig_rax = noSyscall
	rewind(&r.saved, r.gate)
	r.dirty = true
	if err := unix.PtraceSetRegs(r.tid, &skip); err != nil {
		return fmt.Errorf("put off its system call: %w", err)
	}
	return r.toSyscallStop(ctx, false)
}

// blockSignals keeps signals from being taken between our calls. Those that the kernel forces on a thread for its own faults
// stay.
func (r *remote) blockSignals() error {
	if err := r.sigmask(unix.PTRACE_GETSIGMASK, &r.mask); err != nil {
		return fmt.Errorf("read signal mask: %w", err)
	}
	all := ^uint64(0)
	for _, s := range []unix.Signal{unix.SIGSEGV, unix.SIGBUS, unix.SIGILL, unix.SIGFPE, unix.SIGTRAP, unix.SIGSYS} {
		if r.mask&(1<<(s-1)) == 0 {
			all &^= 1 << (s - 1)
		}
	}
	r.dirty = true
	if err := r.sigmask(unix.PTRACE_SETSIGMASK, &all); err != nil {
		return fmt.Errorf("block signals: %w", err)
	}
	return nil
}

// call runs one system call in the thread.
func (r *remote) call(ctx context.Context, nr uint64, args ...uint64) (uint64, error) {
	regs := r.saved
	loadCall(&regs, r.gate, nr, args)
	r.dirty = true
	if err := unix.PtraceSetRegs(r.tid, &regs); err != nil {
		return 0, fmt.Errorf("set registers: %w", err)
	}
	for _, entry := range []bool{true, false} {
		if err := r.toSyscallStop(ctx, entry); err != nil {
			return 0, err
		}
	}
	if err := unix.PtraceGetRegs(r.tid, &regs); err != nil {
		return 0, fmt.Errorf("read registers: %w", err)
	}
	if e := -int64(regs.Rax); e > 0 && e < 4096 {
		return 0, unix.Errno(e)
	}
	return regs.Rax, nil
}

// toSyscallStop lets the thread go on to the entry or the exit of a system call.
func (r *remote) toSyscallStop(ctx context.Context, entry bool) error {
	sig := 0
	for {
		if err := unix.PtraceSyscall(r.tid, sig); err != nil {
			return fmt.Errorf("go on: %w", err)
		}
		s, err := r.await(ctx)
		if err != nil {
			return fmt.Errorf("wait for an injected call: %w", err)
		}
		switch {
		case s.kind == stopSyscall && s.entry == entry:
			return nil
		case s.kind == stopSyscall:
			return fmt.Errorf("stopped at the other end of a system call than expected")
		case s.kind == stopSignal && s.forced():
			return fmt.Errorf("got signal %d from an injected call", s.sig)
		}
		sig = s.deliver() // a stop of the whole process: it is stopped again when we are through
	}
}

// release gives the thread its registers and signals back, standing where the kernel restarts interrupted calls, and detaches.
// If the thread can't be brought to a stop in time it is left to the end of our thread.
func (r *remote) release(ctx context.Context) error {
	if !r.dirty {
		if err := unix.PtraceDetach(r.tid); err != nil && !errors.Is(err, unix.ESRCH) {
			return fmt.Errorf("detach: %w", err)
		}
		return nil // not stopped, or gone
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), restoreTime)
	defer cancel()
	if err := r.toEventStop(ctx); err != nil {
		return fmt.Errorf("stop it to restore it: %w", err)
	}
	if err := unix.PtraceSetRegs(r.tid, &r.saved); err != nil {
		return fmt.Errorf("restore registers: %w", err)
	}
	if err := r.sigmask(unix.PTRACE_SETSIGMASK, &r.mask); err != nil {
		return fmt.Errorf("restore signal mask: %w", err)
	}
	if err := unix.PtraceDetach(r.tid); err != nil {
		return fmt.Errorf("detach: %w", err)
	}
	return nil
}

// toEventStop brings the thread to the stop that PTRACE_INTERRUPT makes, where no instruction of its own has run since the last
// call.
func (r *remote) toEventStop(ctx context.Context) error {
	if err := unix.PtraceInterrupt(r.tid); err != nil {
		return fmt.Errorf("interrupt: %w", err)
	}
	for {
		s, err := r.await(ctx)
		if err != nil {
			return err
		}
		if s.kind == stopEvent {
			return nil
		}
		if err := unix.PtraceCont(r.tid, s.deliver()); err != nil {
			return fmt.Errorf("go on: %w", err)
		}
	}
}
