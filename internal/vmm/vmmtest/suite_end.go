package vmmtest

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/forkd/forkd/internal/vmm"
)

func (s *suite) testKill(t *testing.T) {
	before := children()
	child := s.fork(t, "victim")
	var wg sync.WaitGroup
	for range 2 {
		wg.Go(func() {
			if err := child.Kill(); err != nil {
				t.Errorf("one of two Kills at once: %v", err)
			}
		})
	}
	wg.Wait()
	select {
	case <-child.Done():
	default:
		t.Error("Done is open after Kill has returned")
	}
	if p := child.Process(); alive(p.PID, p.StartTicks) {
		t.Error("the monitor is alive after Kill has returned")
	}
	checkEmpty(t, child.Process().Dir)
	if err := child.Kill(); err != nil {
		t.Errorf("Kill of a killed machine: %v", err)
	}
	s.checkEnd(t, child, vmm.ExitKilled)
	checkGone(t, "Resume of a killed machine", child.Resume(s.step(t)))
	checkNoProcess(t, s.template.ram, before)
}

func (s *suite) testKillPrepared(t *testing.T) {
	before := children()
	p := s.prepare(t)
	for range 2 {
		if err := p.Kill(); err != nil {
			t.Errorf("Kill: %v", err)
		}
	}
	checkEmpty(t, p.Process().Dir)
	checkNoProcess(t, s.template.ram, before)
}

func (s *suite) testKilledFromOutside(t *testing.T) {
	before := children()
	child := s.fork(t, "victim")
	if err := unix.Kill(child.Process().PID, unix.SIGKILL); err != nil {
		t.Fatalf("kill -9: %v", err)
	}
	s.checkEnd(t, child, vmm.ExitCrashed)
	checkGone(t, "Pause", child.Pause(s.step(t)))
	checkGone(t, "SaveState", child.SaveState(s.step(t), newState(t)))
	if conn, err := child.Dial(s.step(t), vmm.PortControl); err == nil {
		conn.Close()
		t.Error("Dial of a machine that is gone: got a connection")
	} else {
		checkGone(t, "Dial", err)
	}
	if err := child.Kill(); err != nil {
		t.Errorf("Kill of a machine that is gone: %v", err)
	}
	checkEmpty(t, child.Process().Dir)
	checkNoProcess(t, s.template.ram, before)
}

func (s *suite) testPrepareCancelled(t *testing.T) {
	s.cancelled(t, startScale, func(ctx context.Context, t *testing.T) error {
		before := children()
		cfg := s.prepareConfig(t)
		p, err := s.h.Engine.Prepare(ctx, cfg)
		if err == nil {
			if err := p.Kill(); err != nil {
				t.Errorf("Kill: %v", err)
			}
		}
		checkNoProcess(t, s.template.ram, before)
		checkEmpty(t, cfg.Dir)
		return err
	})
}

func (s *suite) testLoadCancelled(t *testing.T) {
	s.cancelled(t, startScale/8, func(ctx context.Context, t *testing.T) error {
		before := children()
		p := s.prepare(t)
		m, err := p.Load(ctx, s.template.state)
		if err == nil {
			if err := m.Kill(); err != nil {
				t.Errorf("Kill: %v", err)
			}
		}
		checkNoProcess(t, s.template.ram, before)
		checkEmpty(t, p.Process().Dir)
		return err
	})
}

func (s *suite) testGarbageState(t *testing.T) {
	good := make([]byte, 1<<20)
	n, err := s.template.state.ReadAt(good, 0)
	if n == 0 {
		t.Fatalf("read the template's device state: %v", err)
	}
	good = good[:n]
	noise := slices.Clone(good)
	for i := range noise {
		noise[i] = byte(i*7 + 13)
	}
	flipped := slices.Clone(good)
	flipped[len(flipped)/2] ^= 0x40
	tests := []struct {
		name  string
		state []byte
		may   bool // an engine needn't notice
	}{
		{"empty", nil, false},
		{"zeros", make([]byte, len(good)), false},
		{"noise", noise, false},
		{"first bytes only", good[:min(64, len(good)/2)], false},
		{"one bit flipped", flipped, true},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) { s.loadGarbage(t, tt.state, tt.may) })
	}
}

func (s *suite) loadGarbage(t *testing.T, garbage []byte, may bool) {
	before := children()
	state := newState(t)
	if _, err := state.WriteAt(garbage, 0); err != nil {
		t.Fatal(err)
	}
	p := s.prepare(t)
	begin := time.Now()
	m, err := p.Load(s.step(t), state)
	if took := time.Since(begin); took > s.h.Timeout/2 {
		t.Errorf("Load returned after %v, want an error at once", took)
	}
	switch {
	case err == nil && !may:
		t.Error("Load of garbage: got no error")
	case errors.Is(err, context.DeadlineExceeded):
		t.Errorf("Load of garbage: got %v, want what is wrong with it", err)
	}
	if err == nil {
		if err := m.Kill(); err != nil {
			t.Errorf("Kill: %v", err)
		}
	}
	checkNoProcess(t, s.template.ram, before)
	checkEmpty(t, p.Process().Dir)
}

// testNoLeaks counts what is open after machines were made and ended in every way.
func (s *suite) testNoLeaks(t *testing.T) {
	before := children()
	cycle := func() {
		t.Run("cycle", func(t *testing.T) {
			child := s.fork(t, "cycle")
			child.agent.close()
			killed := s.fork(t, "killed")
			if err := unix.Kill(killed.Process().PID, unix.SIGKILL); err != nil {
				t.Fatal(err)
			}
			s.checkEnd(t, killed, vmm.ExitCrashed)
			garbage := newState(t)
			if _, err := s.prepare(t).Load(s.step(t), garbage); err == nil {
				t.Error("Load of an empty state: got no error")
			}
			if err := s.prepare(t).Kill(); err != nil {
				t.Errorf("Kill: %v", err)
			}
		})
	}
	cycle() // the runtime opens what it needs once
	open := descriptors()
	for range 3 {
		cycle()
	}
	eventually(t, 5*time.Second, func() string {
		if now := descriptors(); len(now) > len(open) {
			return fmt.Sprintf("open descriptors: got %d, want %d as before: %s", len(now), len(open), more(open, now))
		}
		return ""
	})
	checkNoProcess(t, s.template.ram, before)
}

// more lists what is in b and not in a.
func more(a, b []string) []string {
	rest := slices.Clone(a)
	var list []string
	for _, x := range b {
		if i := slices.Index(rest, x); i >= 0 {
			rest = slices.Delete(rest, i, i+1)
			continue
		}
		list = append(list, x)
	}
	return list
}

// dup returns a file of its own for the same open file.
func dup(t *testing.T, f *os.File) *os.File {
	t.Helper()
	fd, err := unix.FcntlInt(f.Fd(), unix.F_DUPFD_CLOEXEC, 3)
	if err != nil {
		t.Fatalf("duplicate %s: %v", f.Name(), err)
	}
	return os.NewFile(uintptr(fd), f.Name())
}
