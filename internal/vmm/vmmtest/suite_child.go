package vmmtest

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/forkd/forkd/internal/memory"
	"github.com/forkd/forkd/internal/procstat"
	"github.com/forkd/forkd/internal/vmm"
)

// hostnameCommand prints the name that an identity gave the guest.
func hostnameCommand() []string { return []string{"cat", "/proc/sys/kernel/hostname"} }

func (s *suite) testChildren(t *testing.T) {
	var all []*vm
	for i := range s.h.Children {
		all = append(all, s.fork(t, fmt.Sprintf("child-%d", i)))
	}
	seen := map[int]bool{}
	for i, child := range all {
		s.ping(t, child)
		got, err := child.agent.exec(s.step(t), hostnameCommand())
		if want := fmt.Sprintf("child-%d", i); err != nil || got != want {
			t.Errorf("name of child %d: got %q (%v), want %q", i, got, err, want)
		}
		s.checkRead(t, child, s.template.mark)
		p := child.Process()
		if now, err := procstat.ReadStat(p.PID); err != nil || now.StartTicks != p.StartTicks || seen[p.PID] {
			t.Errorf("Process: got pid %d started at tick %d; the kernel says %d (%v); seen before: %v", p.PID, p.StartTicks, now.StartTicks, err, seen[p.PID])
		}
		seen[p.PID] = true
	}
}

func (s *suite) testMemoryIsolation(t *testing.T) {
	a, b := s.fork(t, "a"), s.fork(t, "b")
	s.write(t, a, "written-by-a")
	s.checkRead(t, b, s.template.mark)
	s.write(t, b, "written-by-b")
	s.checkRead(t, a, "written-by-a")
	later := s.fork(t, "later")
	s.checkRead(t, later, s.template.mark)
	if got := digest(t, s.template.ram); got != s.template.digest {
		t.Errorf("digest of the template's memory: got %s, want %s", got, s.template.digest)
	}
}

// testMappings checks what internal/memory relies on: the guest's memory is the memfd itself, mapped private and whole.
func (s *suite) testMappings(t *testing.T) {
	p := s.prepare(t)
	if !s.info.Features.LayersLoaded {
		checkMapping(t, p.Process().PID, s.template.ram, s.h.Shape)
	}
	m, err := p.Load(s.step(t), s.template.state)
	if err != nil {
		t.Fatalf("Load: %v", err)
	}
	s.end(t, m)
	if name := m.Process().IdleThread; name != "" && !hasThread(m.Process().PID, name) {
		t.Errorf("the monitor has no thread with the name %q, as Process().IdleThread says", name)
	}
	checkMapping(t, m.Process().PID, s.template.ram, s.h.Shape)
}

func checkMapping(t *testing.T, pid int, ram *os.File, shape vmm.Shape) {
	t.Helper()
	list, err := mappings(pid, ram)
	if err != nil {
		t.Fatalf("mappings of the monitor: %v", err)
	}
	var total uint64
	for _, m := range list {
		total += m.bytes
		if !strings.HasSuffix(m.perms, "p") {
			t.Errorf("a mapping of the guest's memory has the permissions %s, want a private one", m.perms)
		}
	}
	if want := uint64(shape.MemMiB) << 20; total != want {
		t.Errorf("the monitor maps %d bytes of the guest's memory, want %d", total, want)
	}
}

func hasThread(pid int, name string) bool {
	tasks, _ := os.ReadDir(fmt.Sprintf("/proc/%d/task", pid))
	for _, task := range tasks {
		comm, _ := os.ReadFile(fmt.Sprintf("/proc/%d/task/%s/comm", pid, task.Name()))
		if strings.TrimSuffix(string(comm), "\n") == name {
			return true
		}
	}
	return false
}

func (s *suite) testInheritedFiles(t *testing.T) {
	layer, err := memory.New("vmmtest-layer", int64(s.h.Shape.MemMiB)<<20)
	if err != nil {
		t.Fatal(err)
	}
	defer layer.Close()
	uffd, err := os.OpenFile("/dev/userfaultfd", os.O_RDWR, 0)
	if err == nil {
		defer uffd.Close()
	} else {
		t.Logf("without /dev/userfaultfd: %v", err)
		uffd = nil
	}
	cfg := s.prepareConfig(t)
	cfg.UFFD = uffd
	if s.info.Features.Layers {
		cfg.Layers = []*os.File{layer, s.template.ram}
	}
	p, err := s.h.Engine.Prepare(s.step(t), cfg)
	if err != nil {
		t.Fatalf("Prepare: %v", err)
	}
	defer p.Kill()
	proc := p.Process()
	if len(proc.LayerFDs) != len(cfg.Layers) {
		t.Fatalf("Process().LayerFDs: got %v, want %d", proc.LayerFDs, len(cfg.Layers))
	}
	for i, fd := range proc.LayerFDs {
		checkHeld(t, proc.PID, fd, cfg.Layers[i])
	}
	if s.info.Features.Live && uffd != nil {
		checkHeld(t, proc.PID, proc.UFFDDev, uffd)
	}
}

// checkHeld checks that a process holds f under a number.
func checkHeld(t *testing.T, pid, fd int, f *os.File) {
	t.Helper()
	want, err := f.Stat()
	if err != nil {
		t.Fatal(err)
	}
	if !sameFile(fmt.Sprintf("/proc/%d/fd/%d", pid, fd), want) {
		got, err := os.Readlink(fmt.Sprintf("/proc/%d/fd/%d", pid, fd))
		t.Errorf("descriptor %d of the monitor: got %s (%v), want %s", fd, got, err, f.Name())
	}
}

func (s *suite) testBytesBeforeResume(t *testing.T) {
	m := s.load(t, s.template.state)
	v := s.withAgent(m, false)
	defer v.agent.close()
	ctx := s.step(t)
	answered := make(chan error, 1)
	go func() { answered <- v.agent.identify(ctx, "early") }()
	select {
	case err := <-answered:
		t.Fatalf("identity before Resume: answered (%v), want silence", err)
	case <-time.After(s.h.Silence):
	}
	if err := m.Resume(s.step(t)); err != nil {
		t.Fatalf("Resume: %v", err)
	}
	if err := <-answered; err != nil {
		t.Errorf("a request that was written before Resume: %v", err)
	}
}

func (s *suite) testOneConnectionAtATime(t *testing.T) {
	first := s.fork(t, "busy")
	second := s.withAgent(first.Machine, false)
	defer second.agent.close()
	ctx := s.step(t)
	answered := make(chan error, 1)
	go func() { answered <- second.agent.ping(ctx) }()
	s.ping(t, first)
	first.agent.close()
	if err := <-answered; err != nil {
		t.Errorf("ping on a second connection, after the first was closed: %v", err)
	}
}

func (s *suite) testPauseStopsProgress(t *testing.T) {
	child := s.fork(t, "sleeper")
	for range 2 {
		for _, what := range []string{"first", "second"} {
			if err := child.Pause(s.step(t)); err != nil {
				t.Fatalf("%s Pause: %v", what, err)
			}
		}
		s.checkSilent(t, child)
		for _, what := range []string{"first", "second"} {
			if err := child.Resume(s.step(t)); err != nil {
				t.Fatalf("%s Resume: %v", what, err)
			}
		}
		s.ping(t, child)
	}
	s.checkRead(t, child, s.template.mark)
}

// checkSilent checks that a paused guest answers nothing.
func (s *suite) checkSilent(t *testing.T, v *vm) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), s.h.Silence)
	defer cancel()
	if err := v.agent.ping(ctx); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("ping of a paused guest: got %v, want no answer", err)
	}
}

func (s *suite) testSaveTwice(t *testing.T) {
	m := s.load(t, s.template.state)
	states := []*os.File{newState(t), newState(t)}
	for i, state := range states {
		if err := m.SaveState(s.step(t), state); err != nil {
			t.Fatalf("SaveState %d: %v", i, err)
		}
		if info, err := state.Stat(); err != nil || info.Size() == 0 {
			t.Errorf("SaveState %d: wrote nothing (%v)", i, err)
		}
	}
	if err := m.Kill(); err != nil {
		t.Fatalf("Kill: %v", err)
	}
	for i, state := range states {
		// The machine never ran, so its memory is still the template's.
		child := s.load(t, state)
		if err := child.Resume(s.step(t)); err != nil {
			t.Fatalf("Resume with state %d: %v", i, err)
		}
		v := s.withAgent(child, false)
		s.ping(t, v)
		s.checkRead(t, v, s.template.mark)
		v.agent.close()
	}
}

func (s *suite) testConsole(t *testing.T) {
	if !s.info.Features.Console {
		t.Skip("the engine keeps no console")
	}
	child := s.fork(t, "printer")
	console, ok := child.Machine.(vmm.Console)
	if !ok {
		t.Fatalf("%T isn't a vmm.Console, though Features say so", child.Machine)
	}
	if _, err := child.agent.exec(s.step(t), s.h.Print("hello-from-the-guest")); err != nil {
		t.Fatalf("print to the console: %v", err)
	}
	eventually(t, s.h.Timeout, func() string {
		text, err := console.Console(t.Context())
		switch {
		case err != nil:
			return fmt.Sprintf("Console: %v", err)
		case len(text) > vmm.ConsoleLimit:
			return fmt.Sprintf("Console: got %d bytes, want at most %d", len(text), vmm.ConsoleLimit)
		case !strings.Contains(string(text), "hello-from-the-guest"):
			return fmt.Sprintf("Console: got %q, want what the guest printed", text)
		}
		return ""
	})
}

func (s *suite) testSendFile(t *testing.T) {
	if !s.info.Features.Files {
		t.Skip("the engine's monitors take no files")
	}
	f := newState(t)
	send := func(t *testing.T, to any, pid int) {
		t.Helper()
		receiver, ok := to.(vmm.FileReceiver)
		if !ok {
			t.Fatalf("%T isn't a vmm.FileReceiver, though Features say so", to)
		}
		fd, err := receiver.SendFile(s.step(t), f)
		if err != nil {
			t.Fatalf("SendFile to %T: %v", to, err)
		}
		checkHeld(t, pid, fd, f)
	}
	p := s.prepare(t)
	send(t, p, p.Process().PID)
	m, err := p.Load(s.step(t), s.template.state)
	if err != nil {
		t.Fatalf("Load: %v", err)
	}
	s.end(t, m)
	send(t, m, m.Process().PID)
	if err := m.Resume(s.step(t)); err != nil {
		t.Fatalf("Resume: %v", err)
	}
	send(t, m, m.Process().PID)
}
