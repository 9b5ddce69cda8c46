package vmmtest

import (
	"context"
	"errors"
	"os"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/forkd/forkd/internal/guest/agentproto"
	"github.com/forkd/forkd/internal/memory"
	"github.com/forkd/forkd/internal/vmm"
)

// life does every step of a child once. It returns the step that failed and its error.
func life(ctx context.Context, s *suite, t *testing.T) (Step, error) {
	p, err := s.h.Engine.Prepare(ctx, s.prepareConfig(t))
	if err != nil {
		return StepPrepare, err
	}
	m, err := p.Load(ctx, s.template.state)
	if err != nil {
		return StepLoad, err
	}
	s.end(t, m)
	steps := []struct {
		step Step
		do   func() error
	}{
		{StepResume, func() error { return m.Resume(ctx) }},
		{StepDial, func() error {
			conn, err := m.Dial(ctx, vmm.PortControl)
			if err == nil {
				conn.Close()
			}
			return err
		}},
		{StepPause, func() error { return m.Pause(ctx) }},
		{StepSave, func() error { return m.SaveState(ctx, newState(t)) }},
		{StepAttach, func() error { _, err := s.h.Engine.Attach(ctx, m.Process()); return err }},
	}
	for _, step := range steps {
		if err := step.do(); err != nil {
			return step.step, err
		}
	}
	return "", nil
}

func TestHostFaults(t *testing.T) {
	s, engine := newSuite(t, FakeOptions{})
	for _, step := range []Step{StepPrepare, StepLoad, StepResume, StepDial, StepPause, StepSave, StepAttach} {
		for _, action := range []Action{Fail, FailLate, Stall, Die} {
			t.Run(string(step)+" "+string(action), func(t *testing.T) {
				if step == StepPrepare && action == Die {
					t.Skip("there is no monitor yet")
				}
				before := children()
				engine.Inject(Fault{Step: step, Call: 1, Action: action})
				defer engine.Inject()
				ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
				defer cancel()
				if action == Stall {
					defer giveUpAt(engine, step, cancel)()
				}
				var at Step
				var err error
				t.Run("life", func(t *testing.T) { at, err = life(ctx, s, t) })
				want := map[Action]error{Fail: ErrInjected, FailLate: ErrInjected, Stall: context.Canceled, Die: vmm.ErrGone}[action]
				if at != step || !errors.Is(err, want) {
					t.Errorf("failed at %q with %v, want at %q with %v", at, err, step, want)
				}
				checkNoProcess(t, s.template.ram, before)
			})
		}
	}
}

// giveUpAt calls cancel once a step was reached. The function that it returns ends the wait.
func giveUpAt(engine *Fake, step Step, cancel func()) func() {
	stop, stopped := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(stopped)
		look := time.NewTicker(time.Millisecond)
		defer look.Stop()
		for engine.Calls()[step] == 0 {
			select {
			case <-look.C:
			case <-stop:
				return
			}
		}
		cancel()
	}()
	return func() {
		close(stop)
		<-stopped
	}
}

func TestBootFaults(t *testing.T) {
	s, engine := newSuite(t, FakeOptions{})
	for _, action := range []Action{Fail, FailLate} {
		t.Run(string(action), func(t *testing.T) {
			before := children()
			engine.Inject(Fault{Step: StepBoot, Action: action})
			defer engine.Inject()
			ram, err := memory.New("boot", 2<<20)
			if err != nil {
				t.Fatal(err)
			}
			defer ram.Close()
			if _, err := engine.Boot(s.step(t), s.bootConfig(t, ram)); !errors.Is(err, ErrInjected) {
				t.Errorf("Boot: got %v, want the injected failure", err)
			}
			checkNoProcess(t, ram, before)
		})
	}
}

// TestFailLateIsDone checks that a late failure is one of a step that took effect.
func TestFailLateIsDone(t *testing.T) {
	s, engine := newSuite(t, FakeOptions{})
	child := s.fork(t, "paused")
	engine.Inject(Fault{Step: StepPause, Action: FailLate})
	if err := child.Pause(s.step(t)); !errors.Is(err, ErrInjected) {
		t.Fatalf("Pause: got %v, want the injected failure", err)
	}
	s.checkSilent(t, child)
}

func TestFaultAtTheNthCall(t *testing.T) {
	own := errors.New("no such luck")
	s, engine := newSuite(t, FakeOptions{})
	engine.Inject(Fault{Step: StepLoad, Call: 2, Action: Fail, Err: own})
	for call, want := range []error{nil, own, nil} {
		m, err := s.prepare(t).Load(s.step(t), s.template.state)
		if !errors.Is(err, want) {
			t.Errorf("Load %d: got %v, want %v", call+1, err, want)
		}
		if err == nil {
			s.end(t, m)
		}
	}
	if got := engine.Calls()[StepLoad]; got != 3 {
		t.Errorf("calls of Load: got %d, want 3", got)
	}
}

func TestGuestFaults(t *testing.T) {
	s, engine := newSuite(t, FakeOptions{})
	load := func(t *testing.T, faults ...Fault) *vm {
		t.Helper()
		engine.Inject(faults...)
		m := s.load(t, s.template.state)
		if err := m.Resume(s.step(t)); err != nil {
			t.Fatal(err)
		}
		v := s.withAgent(m, false)
		t.Cleanup(v.agent.close)
		return v
	}
	t.Run("nothing answers", func(t *testing.T) {
		s.checkSilent(t, load(t, Fault{Step: StepGuest, Action: Fail}))
	})
	t.Run("identity fails", func(t *testing.T) {
		v := load(t, Fault{Step: StepIdentify, Action: Fail})
		checkCode(t, v.agent.identify(s.step(t), "x"), agentproto.CodeIdentity)
		s.ping(t, v)
	})
	t.Run("identity of the second child only", func(t *testing.T) {
		first := load(t, Fault{Step: StepIdentify, Call: 2, Action: Fail})
		second := s.withAgent(s.load(t, s.template.state), false)
		defer second.agent.close()
		if err := second.Resume(s.step(t)); err != nil {
			t.Fatal(err)
		}
		if err := first.agent.identify(s.step(t), "x"); err != nil {
			t.Errorf("identity of the first child: %v", err)
		}
		checkCode(t, second.agent.identify(s.step(t), "y"), agentproto.CodeIdentity)
	})
	t.Run("identity stalls", func(t *testing.T) {
		v := load(t, Fault{Step: StepIdentify, Action: Stall})
		ctx, cancel := context.WithTimeout(t.Context(), s.h.Silence)
		defer cancel()
		if err := v.agent.identify(ctx, "x"); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("identity: got %v, want no answer", err)
		}
	})
	t.Run("a command is the machine's death", func(t *testing.T) {
		v := load(t, Fault{Step: StepExec, Action: Die})
		if _, err := v.agent.exec(s.step(t), []string{"true"}); err == nil {
			t.Error("exec: got no error")
		}
		s.checkEnd(t, v, vmm.ExitCrashed)
	})
	t.Run("eval fails", func(t *testing.T) {
		v := load(t, Fault{Step: StepEval, Action: Fail})
		_, err := v.agent.Eval(s.step(t), agentproto.EvalRequest{Code: "1"})
		checkCode(t, err, agentproto.CodeInternal)
	})
}

func TestUnavailable(t *testing.T) {
	engine := NewFake(t.TempDir(), FakeOptions{Unavailable: errors.New("no KVM here")})
	if _, err := engine.Probe(t.Context()); !errors.Is(err, vmm.ErrUnavailable) {
		t.Errorf("Probe: got %v, want vmm.ErrUnavailable", err)
	}
	ram, err := memory.New("ram", 2<<20)
	if err != nil {
		t.Fatal(err)
	}
	defer ram.Close()
	s := &suite{h: Harness{Shape: vmm.Shape{MemMiB: 2, VCPUs: 1}}}
	if _, err := engine.Boot(t.Context(), s.bootConfig(t, ram)); !errors.Is(err, vmm.ErrUnavailable) {
		t.Errorf("Boot: got %v, want vmm.ErrUnavailable", err)
	}
}

func TestSlowStart(t *testing.T) {
	const slow = 200 * time.Millisecond
	s, _ := newSuite(t, FakeOptions{SlowStart: slow})
	begin := time.Now()
	p := s.prepare(t)
	if took := time.Since(begin); took < slow {
		t.Errorf("Prepare took %v, want at least %v", took, slow)
	}
	if err := p.Kill(); err != nil {
		t.Error(err)
	}
}

// TestMachinesDontStay checks that a machine that nobody ends isn't there for ever.
func TestMachinesDontStay(t *testing.T) {
	t.Run("when its life is over", func(t *testing.T) {
		s, engine := newSuite(t, FakeOptions{})
		engine.opts.MaxLife = 100 * time.Millisecond
		s.checkEnd(t, s.load(t, s.template.state), vmm.ExitCrashed)
	})
	t.Run("when its directory is gone", func(t *testing.T) {
		s, _ := newSuite(t, FakeOptions{})
		m := s.load(t, s.template.state)
		if err := os.RemoveAll(m.Process().Dir); err != nil {
			t.Fatal(err)
		}
		s.checkEnd(t, m, vmm.ExitCrashed)
		if err := os.Mkdir(m.Process().Dir, 0o700); err != nil { // for the check that it is empty
			t.Fatal(err)
		}
	})
}

// TestCloseFindsOrphans checks that a Fake ends machines that another Fake over the same directory started.
func TestCloseFindsOrphans(t *testing.T) {
	s, engine := newSuite(t, FakeOptions{})
	m := s.load(t, s.template.state)
	other := NewFake(engine.dir, FakeOptions{})
	live, err := other.Live()
	if err != nil || len(live) != 1 || live[0].PID != m.Process().PID || live[0].StartTicks != m.Process().StartTicks {
		t.Errorf("Live: got %+v (%v), want process %+v", live, err, m.Process())
	}
	if err := other.Close(); err != nil {
		t.Errorf("Close: %v", err)
	}
	s.checkEnd(t, m, vmm.ExitCrashed)
	if live, err := other.Live(); err != nil || len(live) != 0 {
		t.Errorf("Live after Close: got %+v (%v), want none", live, err)
	}
}

// TestLoadOfAnotherFamily checks that a device state doesn't go with any memory.
func TestLoadOfAnotherFamily(t *testing.T) {
	a, _ := newSuite(t, FakeOptions{})
	b, _ := newSuite(t, FakeOptions{})
	if _, err := a.prepare(t).Load(a.step(t), b.template.state); err == nil {
		t.Error("Load of another parent's device state: got no error")
	}
}

func TestPrepareRefusesUnsealedMemory(t *testing.T) {
	s, engine := newSuite(t, FakeOptions{})
	ram, err := memory.New("unsealed", 2<<20)
	if err != nil {
		t.Fatal(err)
	}
	defer ram.Close()
	cfg := s.prepareConfig(t)
	cfg.Memory = ram
	if _, err := engine.Prepare(s.step(t), cfg); !errors.Is(err, vmm.ErrInvalidConfig) {
		t.Errorf("Prepare over an unsealed memfd: got %v, want vmm.ErrInvalidConfig", err)
	}
}

// TestWritesArePrivateByTheKernel checks that a child's memory is its own pages over shared ones, as of a real monitor.
func TestWritesArePrivateByTheKernel(t *testing.T) {
	s, _ := newSuite(t, FakeOptions{})
	child := s.fork(t, "writer")
	img, err := memory.NewImage(dup(t, s.template.ram))
	if err != nil {
		t.Fatal(err)
	}
	defer img.Close()
	measure := func() int64 {
		t.Helper()
		usage, err := memory.Measure(child.Process().PID, img)
		if err != nil {
			t.Fatal(err)
		}
		return usage.GuestAnonKiB
	}
	before := measure()
	const pages = 100
	if _, err := child.agent.exec(s.step(t), []string{"dirty", "100"}); err != nil {
		t.Fatal(err)
	}
	if got, want := measure()-before, int64(pages*pageBytes>>10); got < want || got > want+64 {
		t.Errorf("private memory after writing %d pages: %d KiB more, want about %d", pages, got, want)
	}
	if err := unix.Kill(child.Process().PID, 0); err != nil {
		t.Errorf("the child: %v", err)
	}
}
