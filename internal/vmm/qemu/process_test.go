package qemu

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
	p, err := startProcess("/bin/sh", dir, []string{"-c", "echo a reason >&2; exit 3"}, nil)
	if err != nil {
		t.Fatal(err)
	}
	<-p.done
	if p.status != "exit status 3" || p.stderr.String() != "a reason" {
		t.Errorf("ended with %q, said %q, want exit status 3 and the reason", p.status, p.stderr.String())
	}
	p.kill() // after the end: nothing happens
}

// TestStopIsNoEnd stops a process as it is stopped for a system call of ours, and lets it go on.
func TestStopIsNoEnd(t *testing.T) {
	p, err := startProcess("/bin/sleep", t.TempDir(), []string{"60"}, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer p.kill()
	runtime.LockOSThread() // the tracer is a thread
	defer runtime.UnlockOSThread()
	for _, request := range []int{unix.PTRACE_SEIZE, unix.PTRACE_INTERRUPT} {
		if _, _, e := unix.Syscall6(unix.SYS_PTRACE, uintptr(request), uintptr(p.id.PID), 0, 0, 0, 0); e != 0 {
			t.Skipf("tracing is not possible here: %v", e)
		}
	}
	select {
	case <-p.done:
		t.Errorf("a stopped process is said to have ended: %s", p.status)
	case <-time.After(200 * time.Millisecond):
	}
	if err := unix.PtraceDetach(p.id.PID); err != nil {
		t.Error(err)
	}
	p.kill()
	if p.status != "signal: killed" {
		t.Errorf("ended with %q, want it killed", p.status)
	}
}

func TestKillWaitsAndCleans(t *testing.T) {
	dir := t.TempDir()
	p, err := startProcess("/bin/sleep", dir, []string{"60"}, nil)
	if err != nil {
		t.Fatal(err)
	}
	if err := p.record(); err != nil {
		t.Fatal(err)
	}
	p.kill()
	if _, err := startTicks(p.id.PID); err == nil {
		t.Error("the process lives on after kill returned")
	}
	if err := p.clean(); err != nil {
		t.Error(err)
	}
	if left, _ := os.ReadDir(dir); len(left) != 0 {
		t.Errorf("left in the directory: %v", left)
	}
}

func TestAdoptRefusesAnotherProcess(t *testing.T) {
	p, err := startProcess("/bin/sleep", t.TempDir(), []string{"60"}, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer p.kill()
	other := p.id
	other.StartTicks++
	if _, err := adoptProcess(other); !errors.Is(err, vmm.ErrGone) {
		t.Errorf("a process of another start time: %v, want ErrGone", err)
	}
	a, err := adoptProcess(p.id)
	if err != nil {
		t.Fatal(err)
	}
	a.kill()
	<-p.done
	if _, err := adoptProcess(p.id); !errors.Is(err, vmm.ErrGone) {
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
	p, err := startProcess(odd, t.TempDir(), []string{"60"}, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer p.kill()
	if p.id.StartTicks == 0 {
		t.Error("start ticks of a process with an odd name: 0")
	}
}

func TestListenRefusesLongPaths(t *testing.T) {
	_, err := listen("/"+strings.Repeat("x", 100), controlSocket)
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
