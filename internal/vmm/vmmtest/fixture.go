package vmmtest

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"testing"

	"github.com/forkd/forkd/internal/memory"
	"github.com/forkd/forkd/internal/vmm"
)

// template is a frozen parent.
type template struct {
	ram, state *os.File
	digest     string // of ram, when it was frozen
	mark       string // what the parent wrote, a text that is nowhere else in its memory
}

func (t *template) close() {
	t.ram.Close()
	t.state.Close()
}

// digest hashes a whole file, whatever its offset.
func digest(t *testing.T, f *os.File) string {
	t.Helper()
	info, err := f.Stat()
	if err != nil {
		t.Fatalf("digest: %v", err)
	}
	h := sha256.New()
	if _, err := io.Copy(h, io.NewSectionReader(f, 0, info.Size())); err != nil {
		t.Fatalf("digest: %v", err)
	}
	return fmt.Sprintf("%x", h.Sum(nil))
}

// newState returns an empty file for a device state.
func newState(t *testing.T) *os.File {
	t.Helper()
	f, err := os.CreateTemp(t.TempDir(), "state")
	if err != nil {
		t.Fatalf("create a device state: %v", err)
	}
	t.Cleanup(func() { f.Close() })
	return f
}

// runDir returns an empty run directory, under a short name because sockets go there. It checks in the end that it is empty.
func runDir(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "vmm")
	if err != nil {
		t.Fatalf("create a run directory: %v", err)
	}
	t.Cleanup(func() {
		checkEmpty(t, dir)
		os.RemoveAll(dir)
	})
	return dir
}

func checkEmpty(t *testing.T, dir string) {
	t.Helper()
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Errorf("read the run directory: %v", err)
	}
	for _, entry := range entries {
		t.Errorf("the run directory holds %s, want nothing left", entry.Name())
	}
}

// vm is a machine with a connection to its agent.
type vm struct {
	vmm.Machine
	agent agent
}

func (s *suite) withAgent(m vmm.Machine, resync bool) *vm {
	dial := func(ctx context.Context) (net.Conn, error) { return m.Dial(ctx, vmm.PortControl) }
	return &vm{Machine: m, agent: newAgent(dial, resync)}
}

// end kills a machine at the end of the test, and prints its console where the test failed.
func (s *suite) end(t *testing.T, m vmm.Machine) {
	t.Helper()
	t.Cleanup(func() {
		if console, ok := m.(vmm.Console); ok && t.Failed() {
			if text, err := console.Console(context.Background()); err == nil {
				t.Logf("console of machine %d:\n%s", m.Process().PID, text)
			}
		}
		if err := m.Kill(); err != nil {
			t.Errorf("Kill: %v", err)
		}
	})
}

// boot starts a parent and waits for its agent.
func (s *suite) boot(t *testing.T) (*vm, *os.File) {
	t.Helper()
	ram, err := memory.New("vmmtest", int64(s.h.Shape.MemMiB)<<20)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { ram.Close() })
	ctx := bounded(t, s.h.BootTimeout)
	m, err := s.h.Engine.Boot(ctx, s.bootConfig(t, ram))
	if err != nil {
		t.Fatalf("Boot: %v", err)
	}
	s.end(t, m)
	v := s.withAgent(m, false)
	t.Cleanup(v.agent.close)
	if err := v.agent.ping(ctx); err != nil {
		t.Fatalf("the parent's agent doesn't answer: %v", err)
	}
	return v, ram
}

func (s *suite) bootConfig(t *testing.T, ram *os.File) vmm.BootConfig {
	t.Helper()
	return vmm.BootConfig{
		Dir: runDir(t), Shape: s.h.Shape, Memory: ram, Cmdline: s.h.Cmdline,
		Kernel: open(t, s.h.Kernel), Initramfs: open(t, s.h.Initramfs), Rootfs: open(t, s.h.Rootfs),
	}
}

func (s *suite) prepareConfig(t *testing.T) vmm.PrepareConfig {
	t.Helper()
	return vmm.PrepareConfig{Dir: runDir(t), Shape: s.h.Shape, Memory: s.template.ram, Rootfs: open(t, s.h.Rootfs)}
}

func (s *suite) prepare(t *testing.T) vmm.Prepared {
	t.Helper()
	return s.prepareWith(t, func(*vmm.PrepareConfig) {})
}

func (s *suite) prepareWith(t *testing.T, change func(*vmm.PrepareConfig)) vmm.Prepared {
	t.Helper()
	cfg := s.prepareConfig(t)
	change(&cfg)
	p, err := s.h.Engine.Prepare(s.step(t), cfg)
	if err != nil {
		t.Fatalf("Prepare: %v", err)
	}
	return p
}

// load makes a paused child of a device state.
func (s *suite) load(t *testing.T, state *os.File) vmm.Machine {
	t.Helper()
	return s.loadInto(t, s.prepare(t), state)
}

func (s *suite) loadInto(t *testing.T, p vmm.Prepared, state *os.File) vmm.Machine {
	t.Helper()
	m, err := p.Load(s.step(t), state)
	if err != nil {
		t.Fatalf("Load: %v", err)
	}
	s.end(t, m)
	return m
}

// resume starts a paused machine.
func (s *suite) resume(t *testing.T, m vmm.Machine) *vm {
	t.Helper()
	if err := m.Resume(s.step(t)); err != nil {
		t.Fatalf("Resume: %v", err)
	}
	v := s.withAgent(m, false)
	t.Cleanup(v.agent.close)
	return v
}

// fork makes a running child with an identity of its own.
func (s *suite) fork(t *testing.T, name string) *vm {
	t.Helper()
	return s.forkWith(t, name, func(*vmm.PrepareConfig) {})
}

func (s *suite) forkWith(t *testing.T, name string, change func(*vmm.PrepareConfig)) *vm {
	t.Helper()
	v := s.resume(t, s.loadInto(t, s.prepareWith(t, change), s.template.state))
	if err := v.agent.identify(s.step(t), name); err != nil {
		t.Fatalf("give child %s its identity: %v", name, err)
	}
	return v
}

func (s *suite) ping(t *testing.T, v *vm) {
	t.Helper()
	if err := v.agent.ping(s.step(t)); err != nil {
		t.Errorf("ping: %v", err)
	}
}

func (s *suite) write(t *testing.T, v *vm, text string) {
	t.Helper()
	if _, err := v.agent.exec(s.step(t), s.h.Write(text)); err != nil {
		t.Fatalf("write %q in the guest: %v", text, err)
	}
}

func (s *suite) checkRead(t *testing.T, v *vm, want string) {
	t.Helper()
	got, err := v.agent.exec(s.step(t), s.h.Read)
	if err != nil {
		t.Errorf("read in the guest: %v", err)
		return
	}
	if got != want {
		t.Errorf("read in the guest: got %q, want %q", got, want)
	}
}

// checkEnd waits for a machine's end and checks its reason.
func (s *suite) checkEnd(t *testing.T, m vmm.Machine, want vmm.ExitReason) {
	t.Helper()
	select {
	case <-m.Done():
	case <-s.step(t).Done():
		t.Fatalf("the machine's end wasn't reported, want %s", want)
	}
	exit := m.Exit()
	if exit.Reason != want {
		t.Errorf("Exit: got %s (%s), want %s", exit.Reason, exit.Detail, want)
	}
	if exit.Detail == "" && want != vmm.ExitKilled {
		t.Error("Exit: got no detail")
	}
}

func checkGone(t *testing.T, what string, err error) {
	t.Helper()
	if !errors.Is(err, vmm.ErrGone) {
		t.Errorf("%s: got %v, want vmm.ErrGone", what, err)
	}
}
