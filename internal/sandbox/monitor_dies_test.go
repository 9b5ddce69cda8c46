package sandbox

import (
	"context"
	"fmt"
	"slices"
	"syscall"
	"testing"

	"github.com/forkd/forkd/internal/failpoint"
	"github.com/forkd/forkd/internal/memory"
)

// TestMonitorDiesDuring kills the monitor of a sandbox at every step of a branch and of a suspension, as the kernel does when memory is short.
func TestMonitorDiesDuring(t *testing.T) {
	branching := slices.Concat(memory.Points(), []string{pointBranchPaused, pointBranchSaved, pointBranchCaptured, pointBranchStaged, pointBranchPublished})
	suspending := []string{pointBranchPaused, pointBranchSaved, pointSuspendRecorded, pointSuspendCaptured, pointSuspendStaged, pointSuspendPublished,
		pointSuspendMarked, pointSuspendEnded}
	for what, points := range map[string][]string{"branch": branching, "suspend": suspending} {
		for _, point := range points {
			t.Run(what+" "+point, func(t *testing.T) {
				t.Parallel()
				set := failpoint.New()
				d := newWorld(t).start(t, options{failpoints: set})
				d.snapshot(t, "base", nil)
				src := d.fork(t, "base", 1, nil)[0]
				d.mark(t, src.ID, "one")
				set.On(point, 1, func(context.Context) error { return syscall.Kill(src.PID, syscall.SIGKILL) })
				var err error
				if what == "branch" {
					_, err = d.Branch(t.Context(), src.ID, BranchRequest{Tag: "tip", Wait: true})
				} else {
					_, err = d.Suspend(t.Context(), src.ID, false)
				}
				if set.Hits(point) == 0 {
					t.Fatal("the point was never passed")
				}
				want := []string{"base"}
				if err == nil {
					want = append(want, "tip or state")
				} else {
					checkCode(t, what, err, CodeSandboxGone)
				}
				d.checkTidy(t, 0, want...)
				switch {
				case err == nil && what == "branch":
					d.checkMark(t, d.fork(t, "tip", 1, nil)[0].ID, "one")
				case err == nil:
					d.resume(t, src.ID)
					d.checkMark(t, src.ID, "one")
				default:
					eventually(t, "end", func() string {
						if b, err := d.Sandbox(t.Context(), src.ID); err != nil || b.State != StateFailed {
							return fmt.Sprintf("got %+v, %v, want it failed", b, err)
						}
						return ""
					})
				}
			})
		}
	}
}
