package sandbox

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/forkd/forkd/internal/failpoint"
	"github.com/forkd/forkd/internal/vmm/vmmtest"
)

// TestStuckMachineEnds freezes sandboxes whose machines can't be let go on, while the daemon stops or the request fails in another way that has
// an error of its own: nobody is left with a machine that stands still.
func TestStuckMachineEnds(t *testing.T) {
	stopping := newError(CodeShuttingDown, nil, "", "the daemon is shutting down")
	for _, what := range []string{"branch", "suspend"} {
		for _, late := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s, late %v", what, late), func(t *testing.T) {
				t.Parallel()
				points := failpoint.New()
				d := newWorld(t).start(t, options{failpoints: points, limits: Limits{PingTimeout: time.Second}})
				d.snapshot(t, "base", nil)
				src := d.fork(t, "base", 1, nil)[0]
				ctx, stop := context.WithCancelCause(t.Context())
				defer stop(nil)
				point := pointBranchSaved
				if late {
					point = pointSuspendStaged
					if what == "branch" {
						t.Skip("a branch goes on long before")
					}
				}
				points.On(point, 1, func(context.Context) error {
					d.fake.Inject(vmmtest.Fault{Step: vmmtest.StepResume, Action: vmmtest.Fail})
					stop(stopping)
					return stopping
				})
				var err error
				if what == "branch" {
					_, err = d.Branch(ctx, src.ID, BranchRequest{Tag: "tip", Wait: true})
				} else {
					_, err = d.Suspend(ctx, src.ID, false)
				}
				if err == nil {
					t.Error("got no error")
				}
				if b, err := d.Sandbox(t.Context(), src.ID); err != nil || b.State != StateFailed {
					t.Errorf("the sandbox: got %+v, %v, want it failed", b, err)
				}
				d.checkTidy(t, 0, "base")
			})
		}
	}
}

// TestShutdownKillsWhatStartsLate has a sandbox start, or come back, after the time of the requests in flight was up.
func TestShutdownKillsWhatStartsLate(t *testing.T) {
	for _, what := range []string{"fork", "resume"} {
		t.Run(what, func(t *testing.T) {
			t.Parallel()
			points := failpoint.New()
			w := newWorld(t)
			d := w.start(t, options{failpoints: points, killAll: true, limits: Limits{DrainTimeout: 50 * time.Millisecond}})
			d.snapshot(t, "base", nil)
			b := d.fork(t, "base", 1, nil)[0]
			m, entered := d.Manager, make(chan struct{})
			late := func(context.Context) error {
				close(entered)
				<-m.life.Done()
				return nil
			}
			done := make(chan struct{})
			if what == "resume" {
				d.suspend(t, b.ID)
				points.On(pointResumeIdentified, 1, late)
				go func() { defer close(done); _, _ = m.Resume(context.Background(), b.ID) }()
			} else {
				points.On(pointForkIdentified, 2, late)
				go func() { defer close(done); _, _ = m.Fork(context.Background(), ForkRequest{Tag: "base", N: 1}) }()
			}
			<-entered
			d.stop(t) // says so when it could not end one
			<-done
			eventually(t, "all to be gone", func() string { return d.untidy(0, []string{"base"}) })
		})
	}
}
