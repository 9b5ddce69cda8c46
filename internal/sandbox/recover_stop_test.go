package sandbox

import (
	"context"
	"errors"
	"fmt"
	"testing"

	"github.com/forkd/forkd/internal/vmm"
	"github.com/forkd/forkd/internal/vmm/vmmtest"
)

// TestRecoverIsStopped stops a daemon while it takes over sandboxes, and has another one do that: none is lost.
func TestRecoverIsStopped(t *testing.T) {
	for _, step := range []vmmtest.Step{vmmtest.StepAttach, vmmtest.StepResume, vmmtest.StepDial} {
		t.Run("in "+string(step), func(t *testing.T) {
			t.Parallel()
			w := newWorld(t)
			d := w.start(t, options{})
			d.snapshot(t, "py", nil)
			boxes := d.fork(t, "py", 3, nil)
			d.stop(t)
			d, err := w.open(options{})
			if err != nil {
				t.Fatal(err)
			}
			d.fake.Inject(vmmtest.Fault{Step: step, Action: vmmtest.Stall})
			ctx, cancel := context.WithCancel(t.Context())
			recovered := make(chan error, 1)
			go func() { _, err := d.Recover(ctx); recovered <- err }()
			eventually(t, "the step", func() string {
				if n := d.fake.Calls()[step]; n < len(boxes) {
					return fmt.Sprintf("%d calls", n)
				}
				return ""
			})
			cancel()
			if err := <-recovered; !errors.Is(err, context.Canceled) {
				t.Errorf("Recover: got %v, want it given up", err)
			}
			d.stop(t)
			d = w.start(t, options{})
			for _, b := range boxes {
				d.sh(t, b.ID, "true")
			}
			d.checkTidy(t, len(boxes), "py")
		})
	}
}

// TestRecoverGoesOnWithTheOthers has one machine that the engine can't take over: that ends neither it nor the others.
func TestRecoverGoesOnWithTheOthers(t *testing.T) {
	for _, step := range []vmmtest.Step{vmmtest.StepAttach, vmmtest.StepResume} {
		t.Run("in "+string(step), func(t *testing.T) {
			t.Parallel()
			w := newWorld(t)
			d := w.start(t, options{})
			d.snapshot(t, "py", nil)
			boxes := d.fork(t, "py", 3, nil)
			d.stop(t)
			d, err := w.open(options{})
			if err != nil {
				t.Fatal(err)
			}
			d.fake.Inject(vmmtest.Fault{Step: step, Call: 1, Action: vmmtest.Fail, Err: vmm.ErrUnavailable})
			r, err := d.Recover(t.Context())
			checkCode(t, "Recover", err, CodeEngineUnavailable)
			if r.Adopted != len(boxes)-1 || r.Lost != 0 {
				t.Errorf("Recover: got %+v, want all but one taken over", r)
			}
			d.stop(t)
			d = w.start(t, options{})
			for _, b := range boxes {
				d.sh(t, b.ID, "true")
			}
			d.checkTidy(t, len(boxes), "py")
		})
	}
}
