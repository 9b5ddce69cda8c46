package sandbox

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"syscall"
	"testing"
	"time"

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

// TestRecoverFallsBackToState loses the machines of sandboxes that had been suspended before, as a host that fails does.
func TestRecoverFallsBackToState(t *testing.T) {
	for _, tt := range []struct {
		name  string
		limit time.Duration
		lose  func(t *testing.T, w *world, b Sandbox, state string)
		want  State
	}{
		{"machine", 0, func(*testing.T, *world, Sandbox, string) {}, StateSuspended},
		{"machine with a deadline", time.Hour, func(*testing.T, *world, Sandbox, string) {}, StateSuspended},
		{"machine past its deadline", 3 * time.Second, func(_ *testing.T, _ *world, b Sandbox, _ string) { time.Sleep(time.Until(b.Deadline)) }, StateFailed},
		{"machine and state", 0, func(t *testing.T, w *world, _ Sandbox, state string) {
			if err := os.RemoveAll(filepath.Join(w.data(), "snapshots", state)); err != nil {
				t.Fatal(err)
			}
		}, StateFailed},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t)
			d := w.start(t, options{})
			d.snapshot(t, "base", nil)
			b := d.fork(t, "base", 1, func(r *ForkRequest) { r.Timeout = tt.limit })[0]
			d.mark(t, b.ID, "one")
			d.suspend(t, b.ID)
			b = d.resume(t, b.ID)
			d.mark(t, b.ID, "two")
			box, _ := d.live(b.ID)
			state := box.state.Load().id
			d.stop(t)
			if err := syscall.Kill(b.PID, syscall.SIGKILL); err != nil {
				t.Fatal(err)
			}
			tt.lose(t, w, b, state)
			for range 2 { // the second daemon finds what the first one made of it
				d = w.start(t, options{})
				got, err := d.Sandbox(t.Context(), b.ID)
				if err != nil || got.State != tt.want || (tt.want == StateSuspended) == got.SuspendedAt.IsZero() {
					t.Fatalf("sandbox: got %+v, %v, want it %s", got, err, tt.want)
				}
				if tt.want == StateFailed { // the daemon that finds it lost removes its state
					d.checkTidy(t, 0, "base")
				}
				d.stop(t)
			}
			d = w.start(t, options{})
			if tt.want == StateSuspended {
				d.checkTidy(t, 0, "base", "state")
				r := d.resume(t, b.ID)
				d.checkMark(t, b.ID, "one")
				if left := time.Until(r.Deadline); tt.limit > 0 && (left < tt.limit-time.Minute || left > tt.limit) {
					t.Errorf("deadline: %v are left, want about %v", left, tt.limit)
				}
				if err := d.Kill(t.Context(), b.ID); err != nil {
					t.Fatal(err)
				}
			}
			d.checkTidy(t, 0, "base")
			if recs, err := d.db.Snapshots(t.Context()); err != nil || len(recs) != 1 {
				t.Errorf("records: got %+v, %v, want that of the base", recs, err)
			}
			if err := d.DeleteSnapshot(t.Context(), "base", DeleteSafe); err != nil {
				t.Errorf("DeleteSnapshot: %v", err)
			}
			if err := d.ImageInUse("img1"); err != nil {
				t.Errorf("ImageInUse: got %v, want it free", err)
			}
		})
	}
}
