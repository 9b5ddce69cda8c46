package vmproc

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/forkd/forkd/internal/vmm"
)

func TestProcessEnds(t *testing.T) {
	dir := t.TempDir()
	p, err := Start(Command{Name: "sleep", Binary: "/bin/sh", Dir: dir, Args: []string{"-c", "echo a reason >&2; exit 3"}})
	if err != nil {
		t.Fatal(err)
	}
	<-p.done
	if p.Status != "exit status 3" || p.Said() != "a reason" {
		t.Errorf("ended with %q, said %q, want exit status 3 and the reason", p.Status, p.Said())
	}
	p.Kill() // after the end: nothing happens
}

// TestStopIsNoEnd stops a process as it is stopped for a system call of ours, and lets it go on.
func TestStopIsNoEnd(t *testing.T) {
	p, err := Start(Command{Name: "sleep", Binary: "/bin/sleep", Dir: t.TempDir(), Args: []string{"60"}})
	if err != nil {
		t.Fatal(err)
	}
	defer p.Kill()
	runtime.LockOSThread() // the tracer is a thread
	defer runtime.UnlockOSThread()
	for _, request := range []int{unix.PTRACE_SEIZE, unix.PTRACE_INTERRUPT} {
		if _, _, e := unix.Syscall6(unix.SYS_PTRACE, uintptr(request), uintptr(p.ID.PID), 0, 0, 0, 0); e != 0 {
			t.Skipf("tracing is not possible here: %v", e)
		}
	}
	select {
	case <-p.done:
		t.Errorf("a stopped process is said to have ended: %s", p.Status)
	case <-time.After(200 * time.Millisecond):
	}
	if err := unix.PtraceDetach(p.ID.PID); err != nil {
		t.Error(err)
	}
	p.Kill()
	if p.Status != "signal: killed" {
		t.Errorf("ended with %q, want it killed", p.Status)
	}
}

// TestWaitKeepsNoThread: a daemon has hundreds of monitors, and waits for the end of each.
func TestWaitKeepsNoThread(t *testing.T) {
	const n = 40
	threads := func() int {
		tasks, err := os.ReadDir("/proc/self/task")
		if err != nil {
			t.Fatal(err)
		}
		return len(tasks)
	}
	before := threads()
	for range n {
		p, err := Start(Command{Name: "sleep", Binary: "/bin/sleep", Dir: t.TempDir(), Args: []string{"60"}})
		if err != nil {
			t.Fatal(err)
		}
		defer p.Kill()
	}
	if more := threads() - before; more > n/2 {
		t.Errorf("%d processes are waited for with %d more threads", n, more)
	}
}

func TestKillWaitsAndCleans(t *testing.T) {
	dir := t.TempDir()
	p, err := Start(Command{Name: "sleep", Binary: "/bin/sleep", Dir: dir, Args: []string{"60"}})
	if err != nil {
		t.Fatal(err)
	}
	if err := p.Record(); err != nil {
		t.Fatal(err)
	}
	p.Kill()
	if _, err := startTicks(p.ID.PID); err == nil {
		t.Error("the process lives on after kill returned")
	}
	if err := p.Clean(); err != nil {
		t.Error(err)
	}
	if left, _ := os.ReadDir(dir); len(left) != 0 {
		t.Errorf("left in the directory: %v", left)
	}
}

func TestAdoptRefusesAnotherProcess(t *testing.T) {
	p, err := Start(Command{Name: "sleep", Binary: "/bin/sleep", Dir: t.TempDir(), Args: []string{"60"}})
	if err != nil {
		t.Fatal(err)
	}
	defer p.Kill()
	other := p.ID
	other.StartTicks++
	if _, err := Adopt("sleep", other, nil); !errors.Is(err, vmm.ErrGone) {
		t.Errorf("a process of another start time: %v, want ErrGone", err)
	}
	a, err := Adopt("sleep", p.ID, nil)
	if err != nil {
		t.Fatal(err)
	}
	a.Kill()
	<-p.done
	if _, err := Adopt("sleep", p.ID, nil); !errors.Is(err, vmm.ErrGone) {
		t.Errorf("a process that ended: %v, want ErrGone", err)
	}
}

func TestStartTicksOfOddNames(t *testing.T) {
	odd := filepath.Join(t.TempDir(), "a) Z 1 (b")
	sleep, err := exec.LookPath("sleep")
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(sleep, odd); err != nil {
		t.Fatal(err)
	}
	p, err := Start(Command{Name: "sleep", Binary: odd, Dir: t.TempDir(), Args: []string{"60"}})
	if err != nil {
		t.Fatal(err)
	}
	defer p.Kill()
	if p.ID.StartTicks == 0 {
		t.Error("start ticks of a process with an odd name: 0")
	}
}

func TestListenRefusesLongPaths(t *testing.T) {
	_, err := Listen("/"+strings.Repeat("x", 100), "control.sock")
	if !errors.Is(err, vmm.ErrInvalidConfig) || !strings.Contains(err.Error(), "shorter run directory") {
		t.Errorf("got %v, want ErrInvalidConfig and what to do", err)
	}
}

func TestTailKeepsTheNewest(t *testing.T) {
	var x tail
	for range 1000 {
		x.Write([]byte("0123456789"))
	}
	x.Write([]byte("end"))
	if s := x.String(); len(s) != stderrLimit || !strings.HasSuffix(s, "789end") {
		t.Errorf("kept %d bytes ending in %q", len(s), s[len(s)-6:])
	}
}
