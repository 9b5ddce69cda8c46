package memory

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/signal"
	"runtime"
	"runtime/debug"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// This file is the stand-in for a monitor and its guest: a process that maps an image privately and has threads that write to
// it without rest. What it writes makes every instant of its memory predictable: a writer fills its area with the number of its
// round, word by word, so that it holds that number up to the writer's position and the number before from there on. Positions
// are the "device state": reported in a pause, given to a child at its start.

// Descriptors of a guest process.
const (
	guestMemoryFD  = 3
	guestControlFD = 4
	guestUFFDFD    = 5
	guestLayerFD   = 6 // and following
)

const wordsPerPage = PageSize / 8

// guestConfig is what a guest is told at its start, as a JSON argument.
type guestConfig struct {
	Writers []writerState
	Split   bool // memory is mapped in two halves, the second before the first
	Seccomp bool // the idle thread may do nothing but wait
	Preempt bool // Go's scheduler sends signals to threads that run for long
}

// writerState is where a writer is: words before Pos have the value Round, the others Round−1.
type writerState struct {
	First, Pages uint64 // its area
	Round, Pos   uint64
}

type guestReply struct {
	Writers []writerState `json:",omitempty"`
	StallNS int64         // the longest time that a writer took for a page since the last "stats"
	Written uint64        // pages since the start
	Waits   uint64        // of the idle thread
	Strange string        // results of the idle thread's waits that it did not expect
	Signals int64         // real-time signals handled
	Spins   uint64        // of the spinning thread
}

type guestProcess struct {
	cfg     guestConfig
	halves  [2][]byte
	paused  atomic.Bool
	parked  sync.WaitGroup
	resume  chan struct{}
	writers []*writer
	idle    idleThread
	spins   uint64
	end     uint64 // of spinning: never set
}

type writer struct {
	writerState
	g       *guestProcess
	stall   atomic.Int64
	written atomic.Uint64
}

// runGuest is the helper "guest".
func runGuest(args []string) error {
	debug.SetGCPercent(-1)
	g := &guestProcess{}
	if err := json.Unmarshal([]byte(args[0]), &g.cfg); err != nil {
		return err
	}
	runtime.GOMAXPROCS(len(g.cfg.Writers) + 3) // writers never wait: leave room for those who do
	if err := g.mapMemory(); err != nil {
		return err
	}
	conn, err := net.FileConn(os.NewFile(guestControlFD, "control"))
	if err != nil {
		return err
	}
	if err := g.idle.start(g.cfg.Seccomp); err != nil {
		return err
	}
	in, out := json.NewDecoder(conn), json.NewEncoder(conn)
	if err := out.Encode(guestReply{}); err != nil {
		return err
	}
	for {
		var command string
		if err := in.Decode(&command); err != nil {
			if errors.Is(err, io.EOF) {
				return nil
			}
			return err
		}
		if err := out.Encode(g.do(command)); err != nil {
			return err
		}
	}
}

func (g *guestProcess) mapMemory() error {
	var st unix.Stat_t
	if err := unix.Fstat(guestMemoryFD, &st); err != nil {
		return err
	}
	const prot = unix.PROT_READ | unix.PROT_WRITE
	if !g.cfg.Split {
		b, err := unix.Mmap(guestMemoryFD, 0, int(st.Size), prot, unix.MAP_PRIVATE)
		g.halves = [2][]byte{b[:st.Size/2], b[st.Size/2:]}
		return err
	}
	half := int(st.Size / 2)
	for _, i := range []int{0, 1} { // the kernel maps downwards
		b, err := unix.Mmap(guestMemoryFD, int64(i*half), half, prot, unix.MAP_PRIVATE)
		if err != nil {
			return err
		}
		g.halves[i] = b
		if _, err := unix.Mmap(-1, 0, 1<<20, unix.PROT_NONE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS); err != nil {
			return err
		}
	}
	return nil
}

func (g *guestProcess) do(command string) guestReply {
	switch command {
	case "start":
		g.resume = make(chan struct{})
		for _, s := range g.cfg.Writers {
			w := &writer{writerState: s, g: g}
			g.writers = append(g.writers, w)
			go w.run()
		}
	case "pause":
		g.parked.Add(len(g.writers))
		g.paused.Store(true)
		g.parked.Wait()
		return guestReply{Writers: g.states()}
	case "resume":
		if g.paused.Swap(false) {
			close(g.resume)
			g.resume = make(chan struct{})
		}
	case "stats":
		r := guestReply{Waits: g.idle.waits.Load(), Strange: g.idle.said(), Signals: g.idle.signals.Load(), Spins: atomic.LoadUint64(&g.spins)}
		for i, w := range g.writers {
			r.StallNS = max(r.StallNS, w.stall.Swap(0))
			if n := w.written.Load(); i == 0 || n < r.Written {
				r.Written = n
			}
		}
		return r
	case "signals":
		g.idle.handleSignals()
	case "spin":
		g.startSpinning()
	case "read": // all of memory
		var sum byte
		for page := uint64(0); page < uint64(len(g.halves[0])*2/PageSize); page++ {
			sum += byte(*g.word(page * wordsPerPage))
		}
		return guestReply{Written: uint64(sum)}
	}
	return guestReply{}
}

// startSpinning makes a thread that makes no system call.
func (g *guestProcess) startSpinning() {
	ready := make(chan struct{})
	go func() {
		runtime.LockOSThread()
		name(spinName)
		close(ready)
		spin(&g.spins, &g.end)
	}()
	<-ready
}

func (g *guestProcess) states() []writerState {
	var out []writerState
	for _, w := range g.writers {
		out = append(out, w.writerState)
	}
	return out
}

// word is the n-th word of guest memory.
func (g *guestProcess) word(n uint64) *uint64 {
	half := uint64(len(g.halves[0]) / 8)
	return (*uint64)(unsafe.Pointer(&g.halves[n/half][n%half*8]))
}

func (w *writer) run() {
	last := time.Now()
	for {
		if w.Pos == w.Pages*wordsPerPage {
			w.Round, w.Pos = w.Round+1, 0
		}
		if w.Pos%wordsPerPage == 0 {
			now := time.Now()
			w.stall.Store(max(w.stall.Load(), int64(now.Sub(last))))
			w.written.Add(1)
			last = now
		}
		p := unsafe.Slice(w.g.word(w.First*wordsPerPage+w.Pos), 32) // never cross a page
		for i := range p {
			atomic.StoreUint64(&p[i], w.Round)
		}
		w.Pos += uint64(len(p))
		if w.g.paused.Load() {
			w.park()
		}
	}
}

// park waits for the end of a pause.
func (w *writer) park() {
	resume := w.g.resume
	w.g.parked.Done()
	<-resume
}

// idleThread is a thread named "idle" that waits in ppoll, as a monitor's main loop does, and expects nothing but what ppoll
// may return.
type idleThread struct {
	waits   atomic.Uint64
	signals atomic.Int64

	expecting atomic.Bool // signals, so waits may be cut short
	mu        sync.Mutex
	strange   []string
}

// Names of threads, and the signal that the guest counts.
const (
	idleName = "idle"
	spinName = "spin"

	realTimeSignal = syscall.Signal(40)
)

// spin counts for ever, and makes no system call even where the race detector is on. That it could end keeps the compiler from
// taking the count for something that nobody can see.
//
//go:norace
func spin(count, end *uint64) {
	for *end == 0 {
		*count++
	}
}

// name gives this thread a name.
func name(s string) error {
	b := append([]byte(s), 0)
	return unix.Prctl(unix.PR_SET_NAME, uintptr(unsafe.Pointer(&b[0])), 0, 0, 0)
}

func (t *idleThread) start(seccomp bool) error {
	r, _, err := pipe()
	if err != nil {
		return err
	}
	ready := make(chan error)
	go func() {
		runtime.LockOSThread()
		err := name(idleName)
		if err == nil && seccomp {
			err = onlyWait()
		}
		ready <- err
		t.loop(r)
	}()
	return <-ready
}

func (t *idleThread) loop(r int) {
	const wait = 20 * time.Millisecond
	for {
		for _, call := range []struct {
			name  string
			eintr bool // may end early
			do    func(*unix.Timespec) (uintptr, unix.Errno)
		}{
			{"ppoll", true, func(d *unix.Timespec) (uintptr, unix.Errno) {
				fds := [1]unix.PollFd{{Fd: int32(r), Events: unix.POLLIN}}
				n, _, errno := unix.Syscall6(unix.SYS_PPOLL, uintptr(unsafe.Pointer(&fds[0])), 1, uintptr(unsafe.Pointer(d)), 0, 0, 0)
				return n, errno
			}},
			{"nanosleep", false, func(d *unix.Timespec) (uintptr, unix.Errno) { // restarted by way of restart_syscall
				n, _, errno := unix.Syscall(unix.SYS_NANOSLEEP, uintptr(unsafe.Pointer(d)), 0, 0)
				return n, errno
			}},
		} {
			timeout := unix.Timespec{Nsec: int64(wait)}
			start := time.Now()
			n, errno := call.do(&timeout)
			switch took := time.Since(start); {
			case errno == unix.EINTR && (call.eintr || t.expecting.Load()):
			case errno != 0 || n != 0:
				t.say(fmt.Sprintf("%s: %d %v", call.name, int(n), errno))
			case took < wait:
				t.say(fmt.Sprintf("%s returned after %v", call.name, took))
			}
			t.waits.Add(1)
		}
	}
}

// handleSignals counts real-time signals from here on.
func (t *idleThread) handleSignals() {
	t.expecting.Store(true)
	received := make(chan os.Signal, 64)
	signal.Notify(received, realTimeSignal)
	go func() {
		for range received {
			t.signals.Add(1)
		}
	}()
}

func (t *idleThread) say(s string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if len(t.strange) < 8 && !slices.Contains(t.strange, s) {
		t.strange = append(t.strange, s)
	}
}

func (t *idleThread) said() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	return fmt.Sprint(t.strange)
}

func pipe() (r, w int, err error) {
	var p [2]int
	err = unix.Pipe2(p[:], unix.O_CLOEXEC)
	return p[0], p[1], err
}

// onlyWait has a seccomp filter kill this thread for any call but those it needs.
func onlyWait() error {
	allowed := []uint32{
		unix.SYS_PPOLL, unix.SYS_NANOSLEEP, unix.SYS_RESTART_SYSCALL,
		unix.SYS_RT_SIGRETURN, unix.SYS_SCHED_YIELD, unix.SYS_FUTEX, unix.SYS_TGKILL, unix.SYS_GETPID, unix.SYS_GETTID, // Go's runtime
		unix.SYS_CLOCK_GETTIME, unix.SYS_RT_SIGPROCMASK, unix.SYS_EPOLL_PWAIT, unix.SYS_WRITE, unix.SYS_READ, unix.SYS_MADVISE, unix.SYS_MUNMAP,
	}
	filter := []unix.SockFilter{{Code: unix.BPF_LD | unix.BPF_W | unix.BPF_ABS, K: 0}}
	for i, nr := range allowed {
		filter = append(filter, unix.SockFilter{Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, K: nr, Jt: uint8(len(allowed) + 3 - i)})
	}
	const mmapFlags = 16 + 3*8 // struct seccomp_data: the low half of args[3]
	filter = append(filter,
		unix.SockFilter{Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, K: unix.SYS_MMAP, Jf: 2},
		unix.SockFilter{Code: unix.BPF_LD | unix.BPF_W | unix.BPF_ABS, K: mmapFlags},
		unix.SockFilter{Code: unix.BPF_JMP | unix.BPF_JSET | unix.BPF_K, K: unix.MAP_ANONYMOUS, Jt: 1}, // Go's heap grows on whatever thread it likes
		unix.SockFilter{Code: unix.BPF_RET | unix.BPF_K, K: unix.SECCOMP_RET_KILL_PROCESS},
		unix.SockFilter{Code: unix.BPF_RET | unix.BPF_K, K: unix.SECCOMP_RET_ALLOW})
	prog := unix.SockFprog{Len: uint16(len(filter)), Filter: &filter[0]}
	if err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); err != nil {
		return err
	}
	_, _, errno := unix.Syscall(unix.SYS_SECCOMP, unix.SECCOMP_SET_MODE_FILTER, 0, uintptr(unsafe.Pointer(&prog)))
	runtime.KeepAlive(filter)
	if errno != 0 {
		return errno
	}
	return nil
}
