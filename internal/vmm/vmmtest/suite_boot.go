package vmmtest

import (
	"context"
	"crypto/rand"
	"errors"
	"testing"
	"time"

	"github.com/forkd/forkd/internal/memory"
	"github.com/forkd/forkd/internal/vmm"
)

func (s *suite) testProbe(t *testing.T) {
	if s.info.Engine == "" || s.info.Version == "" || s.info.Accel == "" || s.info.Machine == "" || s.info.CPU == "" {
		t.Errorf("Probe: got %+v, want no empty field", s.info)
	}
	again, err := s.h.Engine.Probe(t.Context())
	if err != nil {
		t.Fatalf("second Probe: %v", err)
	}
	if again != s.info {
		t.Errorf("second Probe: got %+v, want what the first said: %+v", again, s.info)
	}
}

func (s *suite) testInvalidConfig(t *testing.T) {
	ram, err := memory.New("vmmtest", int64(s.h.Shape.MemMiB)<<20)
	if err != nil {
		t.Fatal(err)
	}
	defer ram.Close()
	tests := []struct {
		name   string
		change func(*vmm.Shape)
	}{
		{"no vCPU", func(shape *vmm.Shape) { shape.VCPUs = 0 }},
		{"less memory than the memfd has", func(shape *vmm.Shape) { shape.MemMiB-- }},
		{"more memory than the memfd has", func(shape *vmm.Shape) { shape.MemMiB++ }},
		{"no memory", func(shape *vmm.Shape) { shape.MemMiB = 0 }},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			before := children()
			cfg := s.bootConfig(t, ram)
			tt.change(&cfg.Shape)
			m, err := s.h.Engine.Boot(s.step(t), cfg)
			if err == nil {
				s.end(t, m)
			}
			if !errors.Is(err, vmm.ErrInvalidConfig) {
				t.Errorf("Boot: got %v, want vmm.ErrInvalidConfig", err)
			}
			checkNoProcess(t, ram, before)
		})
	}
}

// delays after which a context is cancelled: at once, and at various stages of a start.
func delays(d time.Duration) []time.Duration {
	return []time.Duration{0, d / 200, d / 40, d / 10, d / 4}
}

// cancelled calls start with contexts that end sooner or later, and checks what is left when it was too soon.
func (s *suite) cancelled(t *testing.T, longest time.Duration, start func(context.Context, *testing.T) error) {
	for _, delay := range delays(longest) {
		t.Run("after "+delay.String(), func(t *testing.T) {
			ctx, cancel := context.WithTimeout(t.Context(), delay)
			defer cancel()
			begin := time.Now()
			err := start(ctx, t)
			if took := time.Since(begin); took > delay+10*time.Second {
				t.Errorf("returned %v after its context ended", took-delay)
			}
			if err != nil && !errors.Is(err, context.DeadlineExceeded) {
				t.Errorf("got %v, want success or context.DeadlineExceeded", err)
			}
			if err == nil && delay == 0 {
				t.Error("succeeded with a context that had ended")
			}
		})
	}
}

// startScale is a time in which a monitor process surely starts, from which the suite takes moments to interrupt it.
const startScale = 400 * time.Millisecond

func (s *suite) testBootCancelled(t *testing.T) {
	ram, err := memory.New("vmmtest", int64(s.h.Shape.MemMiB)<<20)
	if err != nil {
		t.Fatal(err)
	}
	defer ram.Close()
	s.cancelled(t, startScale, func(ctx context.Context, t *testing.T) error {
		before := children()
		cfg := s.bootConfig(t, ram)
		m, err := s.h.Engine.Boot(ctx, cfg)
		if err == nil {
			if err := m.Kill(); err != nil {
				t.Errorf("Kill: %v", err)
			}
		}
		checkNoProcess(t, ram, before)
		checkEmpty(t, cfg.Dir)
		return err
	})
}

// testFreeze makes the template of all other tests.
func (s *suite) testFreeze(t *testing.T) {
	parent, ram := s.boot(t)
	mark := "made-by-the-parent-" + rand.Text()
	s.write(t, parent, mark)
	if err := parent.Pause(s.step(t)); err != nil {
		t.Fatalf("Pause: %v", err)
	}
	state, err := memory.New("vmmtest-state", pageBytes)
	if err != nil {
		t.Fatal(err)
	}
	if err := parent.SaveState(s.step(t), state); err != nil {
		t.Fatalf("SaveState: %v", err)
	}
	if err := parent.Kill(); err != nil {
		t.Fatalf("Kill: %v", err)
	}
	s.checkEnd(t, parent, vmm.ExitKilled)
	// Nobody maps it shared any more, or this fails.
	if err := memory.Seal(ram); err != nil {
		t.Fatalf("seal the memory of a killed parent: %v", err)
	}
	s.template = template{ram: dup(t, ram), state: state, digest: digest(t, ram), mark: mark}
}

func (s *suite) testTemplateUnchanged(t *testing.T) {
	if got := digest(t, s.template.ram); got != s.template.digest {
		t.Errorf("digest of the template's memory: got %s, want %s as it was when it was frozen", got, s.template.digest)
	}
}

func (s *suite) testGuestShutdown(t *testing.T) { s.endsItself(t, s.h.Shutdown, vmm.ExitShutdown) }

// testGuestPanics: a kernel that panicked is no guest that was shut down.
func (s *suite) testGuestPanics(t *testing.T) { s.endsItself(t, s.h.Panic, vmm.ExitPanicked) }

func (s *suite) endsItself(t *testing.T, command []string, want vmm.ExitReason) {
	child := s.fork(t, "goner")
	ctx, cancel := context.WithCancel(s.step(t))
	defer cancel()
	go func() {
		<-child.Done() // the guest may be gone before it has answered
		cancel()
	}()
	if out, err := child.agent.exec(ctx, command); err != nil {
		t.Logf("the command that ends the guest: %q, %v", out, err)
	}
	s.checkEnd(t, child, want)
	if err := child.Kill(); err != nil {
		t.Errorf("Kill of a machine that has ended: %v", err)
	}
	checkEmpty(t, child.Process().Dir)
}
