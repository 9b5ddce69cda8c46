package memory

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/forkd/forkd/internal/vmm"
)

// idleGuest is a guest whose writers do nothing.
func idleGuest(t *testing.T, cfg guestConfig) (*guest, *process) {
	t.Helper()
	needRoot(t)
	g := launchGuest(t, base(t, 64, 32), cfg)
	return g, pin(t, g.process)
}

func pin(t *testing.T, id vmm.Process) *process {
	t.Helper()
	p, err := openProcess(id)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(p.close)
	return p
}

// callGetpid runs one harmless call in the idle thread.
func callGetpid(ctx context.Context, p *process) error {
	return inThread(ctx, p, func(r *remote) error {
		got, err := r.call(ctx, unix.SYS_GETPID)
		if err == nil && got != uint64(p.PID) {
			err = fmt.Errorf("getpid in %d returned %d", p.PID, got)
		}
		return err
	})
}

func TestInThread(t *testing.T) {
	tests := map[string]struct {
		cfg     guestConfig
		prepare func(t *testing.T, g *guest)
		check   func(t *testing.T, g *guest)
	}{
		"waiting":        {},
		"under a filter": {cfg: guestConfig{Seccomp: true}},
		"stopped process": {
			prepare: func(t *testing.T, g *guest) { g.signal(unix.SIGSTOP); g.waitState("T") },
			check:   func(t *testing.T, g *guest) { g.waitState("T"); g.signal(unix.SIGCONT) },
		},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			g, p := idleGuest(t, tt.cfg)
			if tt.prepare != nil {
				tt.prepare(t, g)
			}
			for range 20 {
				if err := callGetpid(t.Context(), p); err != nil {
					t.Fatal(err)
				}
			}
			if tt.check != nil {
				tt.check(t, g)
			}
			g.sane()
		})
	}
}

func TestCallReturnsErrno(t *testing.T) {
	_, p := idleGuest(t, guestConfig{})
	err := inThread(t.Context(), p, func(r *remote) error {
		_, err := r.call(t.Context(), unix.SYS_CLOSE, 9999)
		return err
	})
	if !errors.Is(err, unix.EBADF) {
		t.Errorf("close of a descriptor that is not open: %v, want %v", err, unix.EBADF)
	}
}

// The thread's own waits must go on as after any stop, whenever they are hit.
func TestInThreadLeavesWaitsAlone(t *testing.T) {
	g, p := idleGuest(t, guestConfig{})
	for start := time.Now(); time.Since(start) < time.Second; {
		if err := callGetpid(t.Context(), p); err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Duration(time.Now().UnixNano() % int64(3*time.Millisecond))) // at any moment of a wait
	}
	before := g.do("stats").Waits
	g.until("the idle thread waits again", func(r guestReply) bool { return r.Waits > before+2 })
	g.sane()
}

// A signal that comes while the thread is ours must still be handled.
func TestInThreadLosesNoSignal(t *testing.T) {
	g, p := idleGuest(t, guestConfig{})
	g.do("signals")
	tid, err := p.thread(idleName)
	if err != nil {
		t.Fatal(err)
	}
	for want := range int64(50) {
		err := inThread(t.Context(), p, func(r *remote) error {
			for i := range 4 {
				if _, err := r.call(t.Context(), unix.SYS_GETPID); err != nil {
					return err
				}
				if i == 1 {
					if err := unix.Tgkill(p.PID, tid, realTimeSignal); err != nil {
						return err
					}
				}
			}
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
		g.until("the signal is handled", func(r guestReply) bool { return r.Signals == want+1 })
	}
	g.sane()
}

// A stop of the whole process while the thread is ours must not be lost, nor keep us.
func TestInThreadMeetsStop(t *testing.T) {
	g, p := idleGuest(t, guestConfig{})
	err := inThread(t.Context(), p, func(r *remote) error {
		for i := range 4 {
			if i == 2 {
				g.signal(unix.SIGSTOP)
			}
			if _, err := r.call(t.Context(), unix.SYS_GETPID); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	g.waitState("T")
	g.signal(unix.SIGCONT)
	g.sane()
}

// A thread that is busy in its own code is used at its next system call, which it makes afterwards. Go's scheduler
// interrupts the spinning thread now and then, so it makes one: the return from the signal's handler.
func TestInThreadWaitsForACall(t *testing.T) {
	g, p := idleGuest(t, guestConfig{Preempt: true})
	g.do("spin")
	p.IdleThread = spinName
	for range 5 {
		if err := callGetpid(t.Context(), p); err != nil {
			t.Fatal(err)
		}
	}
	g.spinsOn()
	g.sane()
}

func TestInThreadGivesUp(t *testing.T) {
	g, p := idleGuest(t, guestConfig{})
	g.do("spin")
	p.IdleThread = spinName
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	start := time.Now()
	err := callGetpid(ctx, p)
	if !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("calls in a thread that makes none: %v, want %v", err, context.DeadlineExceeded)
	}
	if took := time.Since(start); took > 5*time.Second {
		t.Errorf("gave up after %v, the deadline was 100 ms", took)
	}
	g.spinsOn()
	g.until("nobody traces it", func(guestReply) bool { n, _ := tracersOf(p.PID); return n == 0 })
}

func TestInThreadOfTheDead(t *testing.T) {
	g, p := idleGuest(t, guestConfig{})
	err := inThread(t.Context(), p, func(r *remote) error {
		g.signal(unix.SIGKILL)
		for {
			if _, err := r.call(t.Context(), unix.SYS_GETPID); err != nil {
				return err
			}
		}
	})
	if !errors.Is(err, vmm.ErrGone) {
		t.Errorf("killed between calls: %v, want %v", err, vmm.ErrGone)
	}
	if err := callGetpid(t.Context(), p); !errors.Is(err, vmm.ErrGone) {
		t.Errorf("dead: %v, want %v", err, vmm.ErrGone)
	}
}

func TestInThreadRefuses(t *testing.T) {
	tests := map[string]struct {
		change func(t *testing.T, p *process)
		want   string
		is     error
	}{
		"no such thread": {change: func(_ *testing.T, p *process) { p.IdleThread = "nobody" }, want: `has no thread named "nobody"`},
		"ambiguous name": {change: func(_ *testing.T, p *process) { p.IdleThread = helperComm() }, want: "several threads"},
		"traced already": {change: seizeIdle, is: ErrNotPermitted},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			g, p := idleGuest(t, guestConfig{})
			tt.change(t, p)
			err := callGetpid(t.Context(), p)
			if err == nil || !strings.Contains(err.Error(), tt.want) || tt.is != nil && !errors.Is(err, tt.is) {
				t.Errorf("got error %v, want %q (%v)", err, tt.want, tt.is)
			}
			g.do("stats")
		})
	}
}

// helperComm is the name that most threads of a guest process have.
func helperComm() string {
	const limit = 15 // of a thread's name
	name := filepath.Base(os.Args[0])
	return name[:min(len(name), limit)]
}

// seizeIdle has another thread of ours trace the idle thread until the test's end.
func seizeIdle(t *testing.T, p *process) {
	tid, err := p.thread(idleName)
	if err != nil {
		t.Fatal(err)
	}
	seized, release := make(chan error), make(chan struct{})
	go func() {
		runtime.LockOSThread() // never unlocked: the thread's end detaches
		seized <- unix.PtraceSeize(tid)
		<-release
	}()
	t.Cleanup(func() { close(release) })
	if err := <-seized; err != nil {
		t.Fatal(err)
	}
}

func TestOpenProcess(t *testing.T) {
	own, err := startTicks(os.Getpid())
	if err != nil {
		t.Fatal(err)
	}
	tests := map[string]struct {
		id   vmm.Process
		gone bool
		ok   bool
	}{
		"itself":         {id: vmm.Process{PID: os.Getpid(), StartTicks: own}, ok: true},
		"another start":  {id: vmm.Process{PID: os.Getpid(), StartTicks: own + 1}, gone: true},
		"none":           {id: vmm.Process{PID: 1 << 22, StartTicks: 1}, gone: true},
		"no process":     {id: vmm.Process{}},
		"negative group": {id: vmm.Process{PID: -1}},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			p, err := openProcess(tt.id)
			if (err == nil) != tt.ok || errors.Is(err, vmm.ErrGone) != tt.gone {
				t.Errorf("got error %v, want none: %t, gone: %t", err, tt.ok, tt.gone)
			}
			if p != nil {
				p.close()
			}
		})
	}
}
