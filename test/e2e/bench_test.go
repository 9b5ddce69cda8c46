package e2e

import (
	"encoding/json"
	"errors"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/forkd/forkd/internal/bench"
)

// TestBenchmarks runs the benchmarks of the graph, small: their reports are complete, nothing fails, and nothing is left. How long anything
// took is not looked at.
func TestBenchmarks(t *testing.T) {
	t.Parallel()
	d := ownDaemon(t, setup{})
	t.Run("chain", func(t *testing.T) {
		d := d.in(t)
		var r bench.ChainReport
		d.benchReport(&r, "bench", "chain", "--depth", "2", "-n", "1", "--layer-mib", "1")
		d.checkSubject(r.Subject)
		if r.Depth != 2 || r.N != 1 || r.LayerMiB != 1 || r.ChangedMiB < 2 || r.DiskMiB < 2 {
			t.Errorf("a chain of 2 layers of 1 MiB: %+v", r)
		}
		for what, end := range map[string]bench.ChainEnd{"base": r.Base, "tip": r.Tip} {
			for path, run := range map[string]bench.Run{"cold": end.Cold, "claim": end.Claim} {
				if run.N != 1 || run.Failed != 0 || run.Ready.P50MS <= 0 || run.Answer.P50MS < run.Ready.P50MS {
					t.Errorf("%s, %s: %+v", what, path, run)
				}
			}
			if s := end.Shared; end.FirstMS <= 0 || s.Children < 2 || s.GuestMiB <= s.OwnMiB || s.OwnMiB <= 0 || s.ProcessMiB <= s.GuestMiB || s.ChildPSSMiB <= 0 {
				t.Errorf("%s: %+v", what, end)
			}
		}
		if r.Tip.DiskMiB < r.Base.DiskMiB+2 || r.ColdRatio <= 0 || r.ClaimRatio <= 0 || r.DiskRatio <= 0 {
			t.Errorf("tip beside base: %+v", r)
		}
	})
	t.Run("fork-running", func(t *testing.T) {
		d := d.in(t)
		var r bench.ForkRunningReport
		d.benchReport(&r, "bench", "fork-running", "-n", "2", "--rounds", "1", "--dirty-mib", "4")
		d.checkSubject(r.Subject)
		if r.N != 2 || r.Rounds != 1 || r.DirtyMiB != 4 || r.Failed != 0 || r.PauseMS.P50 <= 0 || r.RunningMS.P50 <= r.PauseMS.P50 || r.ColdMS.P50 <= 0 || r.Ratio <= 0 {
			t.Errorf("got %+v", r)
		}
	})
	t.Run("branch", func(t *testing.T) {
		d := d.in(t)
		var r bench.BranchReport
		d.benchReport(&r, "bench", "branch", "-n", "1", "--dirty-mib", "4")
		d.checkSubject(r.Subject)
		for _, mode := range []string{"live", "diff", "full"} {
			run := r.Modes[mode]
			if run == nil || run.N != 1 || run.Failed != 0 || len(run.Warnings) != 0 {
				t.Errorf("%s: %+v", mode, run)
				continue
			}
			// A stall shorter than the program can see is none.
			if run.PauseMS.P50 <= 0 || run.GuestStallMS.P50 < 0 || run.ReadyMS.P50 < run.PauseMS.P50 || run.LayerMiB < 4 || run.WroteMiBPerS <= 0 || run.RewroteRounds < 1 {
				t.Errorf("%s: %+v", mode, run)
			}
		}
		if r.DirtyMiB != 4 || len(r.Modes) != 3 {
			t.Errorf("got %+v", r)
		}
	})
}

// benchReport runs a benchmark, whose JSON must be one report with all fields and no other, and compares what is there before and after.
func (d *daemon) benchReport(into any, args ...string) {
	d.t.Helper()
	inventory := func() string {
		return d.must("images", "-q") + "\n" + strings.Join(entries(filepath.Join(d.data, "snapshots")), " ")
	}
	before := inventory()
	got := d.forkd(append([]string{"--json"}, args...)...)
	if got.code != 0 {
		d.t.Fatalf("%v", got)
	}
	var fields, complete any
	err := errors.Join(json.Unmarshal([]byte(got.stdout), into), json.Unmarshal([]byte(got.stdout), &fields))
	if err != nil {
		d.t.Fatalf("want one report, as JSON: %v\n%s", err, got.stdout)
	}
	again, err := json.Marshal(into)
	if err := errors.Join(err, json.Unmarshal(again, &complete)); err != nil {
		d.t.Fatal(err)
	}
	if diff := cmp.Diff(complete, fields); diff != "" {
		d.t.Errorf("fields of the report (-want +got):\n%s", diff)
	}
	if after := inventory(); after != before {
		d.t.Errorf("snapshots before:\n%s\nand after:\n%s", before, after)
	}
	if ids := d.must("ls", "-q"); ids != "" {
		d.t.Errorf("sandboxes are left: %s", ids)
	}
	d.checkTidy()
}

func (d *daemon) checkSubject(s bench.Subject) {
	d.t.Helper()
	if s.Tag != pyTag || s.Engine == "" || s.EngineVersion == "" || !slices.Contains([]string{"tcg", "kvm"}, s.Accel) || s.MemMiB != memMiB {
		d.t.Errorf("measured on %+v", s)
	}
}
