package sandbox

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/forkd/forkd/internal/failpoint"
	"github.com/forkd/forkd/internal/vmm/vmmtest"
)

// outcome is what is there after a scenario that was struck at a point.
type outcome struct {
	Sandboxes int      // that live, beside the pool
	Suspended int      // of them
	States    int      // what sandboxes are suspended to, or were before
	Pool      int      // members
	Tags      []string // snapshots
}

// before is what every scenario finds.
var before = outcome{Sandboxes: 2, Tags: []string{oldTag}}

// afterError is the outcome when the point fails: nothing is left of what was begun, and what must end ends.
func afterError(point string) outcome {
	o := before
	switch scenarioOf(point) {
	case "kill":
		o.Sandboxes = 1
	case "claim":
		o.Pool = 1 // refilled
	case "pool":
		o.Pool = 1 // the second try works
	case "resume":
		o.Suspended, o.States = 1, 1 // as before
	}
	switch point {
	case pointSuspendMarked, pointSuspendEnded:
		o.Suspended, o.States = 1, 1
	case pointResumeRunning:
		o.Suspended = 0
	}
	return o
}

// afterCrash is the outcome when the daemon is killed at the point and another one has recovered.
func afterCrash(point string) outcome {
	o := afterError(point)
	switch point {
	case pointSnapshotPublished, pointSnapshotReady, pointBranchPublished, pointBranchReady, pointDiffPublished, pointDiffReady,
		pointCompactPublished, pointCompactReady:
		o.Tags = []string{newTag, oldTag} // it was complete: it is finished, not thrown away
	case pointForkRunning, pointClaimRunning:
		o.Sandboxes = 3 // recorded as running, and it runs
	}
	return o
}

// populate makes what every scenario finds: a snapshot and sandboxes with something of their own.
func populate(t *testing.T, d *daemon) []Sandbox {
	t.Helper()
	d.snapshot(t, oldTag, nil)
	boxes := d.fork(t, oldTag, before.Sandboxes, nil)
	for _, b := range boxes {
		d.sh(t, b.ID, "echo "+b.ID+" > /tmp/mine")
	}
	return boxes
}

// checkOutcome compares what the daemon says, and what is really there, with what is wanted.
func checkOutcome(t *testing.T, d *daemon, want outcome, survivors []Sandbox) {
	t.Helper()
	if want.Pool > 0 {
		eventually(t, "pool", func() string {
			if st, err := d.Pool(t.Context(), oldTag); err != nil || st.Ready != want.Pool {
				return fmt.Sprintf("got %+v, %v, want %d ready", st, err, want.Pool)
			}
			return ""
		})
	}
	list, err := d.Sandboxes(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	got := outcome{Sandboxes: len(list), Pool: d.Stats().PoolReady}
	snaps, err := d.Snapshots(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	for _, s := range snaps {
		got.Tags = append(got.Tags, s.Tag)
		if s.Status != StatusReady || !s.Bootable {
			t.Errorf("snapshot %s: got status %s, bootable %v, %s", s.Tag, s.Status, s.Bootable, s.Warning)
		}
	}
	got.Suspended = d.Stats().Suspended
	entries, err := os.ReadDir(filepath.Join(d.w.data(), "snapshots"))
	if err != nil {
		t.Fatal(err)
	}
	got.States = len(entries) - len(got.Tags)
	if diff := cmp.Diff(got, want); diff != "" {
		t.Errorf("outcome (-got +want):\n%s", diff)
	}
	d.checkTidy(t, want.Sandboxes-want.Suspended+want.Pool, make([]string, len(want.Tags)+want.States)...)
	d.checkRecords(t, want)
	for _, b := range list {
		if b.State == StateSuspended {
			if _, err := d.Resume(t.Context(), b.ID); err != nil {
				t.Errorf("Resume: %v", err)
			}
		}
		if _, err := d.Ping(t.Context(), b.ID); err != nil {
			t.Errorf("sandbox %s is listed as %s: ping: %v", b.ID, b.State, err)
		}
	}
	alive := 0
	for _, b := range survivors {
		if _, ok := d.live(b.ID); !ok {
			continue
		}
		alive++
		if got := d.sh(t, b.ID, "cat /tmp/mine"); got != b.ID {
			t.Errorf("memory of sandbox %s: got %q", b.ID, got)
		}
	}
	if least := min(want.Sandboxes, len(survivors)); alive < least {
		t.Errorf("%d of the sandboxes that were there before live, want %d", alive, least)
	}
	for _, tag := range want.Tags {
		box := d.fork(t, tag, 1, func(r *ForkRequest) { r.Path = PathCold })[0]
		if err := d.Kill(t.Context(), box.ID); err != nil {
			t.Errorf("Kill: %v", err)
		}
	}
}

// checkRecords compares the database with what is wanted.
func (d *daemon) checkRecords(t *testing.T, want outcome) {
	t.Helper()
	recs, err := d.db.Sandboxes(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if len(recs) != want.Sandboxes {
		t.Errorf("records of sandboxes: got %d, want %d: %+v", len(recs), want.Sandboxes, recs)
	}
	snaps, err := d.db.Snapshots(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	var tags []string
	for _, s := range snaps {
		tags = append(tags, s.Tag+" "+string(s.Status))
	}
	var wanted []string
	for range want.States {
		wanted = append(wanted, " ready")
	}
	for _, tag := range want.Tags {
		wanted = append(wanted, tag+" ready")
	}
	if diff := cmp.Diff(tags, wanted); diff != "" {
		t.Errorf("records of snapshots (-got +want):\n%s", diff)
	}
}

// TestEveryPointFails injects an error at every failpoint.
func TestEveryPointFails(t *testing.T) {
	for _, point := range Points() {
		t.Run(strings.TrimPrefix(point, "sandbox."), func(t *testing.T) {
			t.Parallel()
			w := newWorld(t)
			first := w.start(t, options{networks: &testNetworks{}})
			boxes := populate(t, first)
			first.stop(t)

			spec := point + "@1=error"
			if scenarioOf(point) == "claim" {
				spec = point + "=error" // else the next member, if the pool has one again, is claimed
			}
			points, err := failpoint.Parse(spec)
			if err != nil {
				t.Fatal(err)
			}
			d := w.start(t, options{networks: &testNetworks{}, failpoints: points})
			err = scenarios()[scenarioOf(point)](t.Context(), d)
			if points.Hits(point) == 0 {
				t.Fatalf("the point was never passed; those that were: %v", points.Passed())
			}
			// What must end ends, whatever goes wrong on the way.
			carriedOn := scenarioOf(point) == "kill" || scenarioOf(point) == "delete" ||
				slices.Contains([]string{pointSuspendMarked, pointSuspendEnded, pointResumeRunning}, point)
			retried := scenarioOf(point) == "pool"
			if (err == nil) != carriedOn && !retried {
				t.Errorf("got error %v, want one: %v", err, !carriedOn)
			}
			checkOutcome(t, d, afterError(point), boxes)
		})
	}
}

// TestEveryPointKills kills a daemon at every failpoint, and has another one recover.
func TestEveryPointKills(t *testing.T) {
	for _, point := range Points() {
		t.Run(strings.TrimPrefix(point, "sandbox."), func(t *testing.T) {
			t.Parallel()
			w := newWorld(t)
			first := w.start(t, options{networks: &testNetworks{}})
			boxes := populate(t, first)
			first.stop(t)

			w.crash(t, scenarioOf(point), point+"=kill")
			d := w.start(t, options{networks: &testNetworks{}})
			checkOutcome(t, d, afterCrash(point), boxes)
		})
	}
}

// TestEngineFailuresDuringSnapshot makes the engine fail at every step of a snapshot.
func TestEngineFailuresDuringSnapshot(t *testing.T) {
	d := newWorld(t).start(t, options{limits: Limits{LaunchTimeout: 4 * time.Second}})
	for _, step := range []vmmtest.Step{vmmtest.StepBoot, vmmtest.StepPause, vmmtest.StepSave} {
		for _, action := range []vmmtest.Action{vmmtest.Fail, vmmtest.FailLate, vmmtest.Die} {
			t.Run(fmt.Sprintf("%s %s", step, action), func(t *testing.T) {
				d.fake.Inject(vmmtest.Fault{Step: step, Call: 1, Action: action})
				_, err := d.trySnapshot(t.Context(), newTag, nil)
				d.fake.Inject()
				if err == nil && !(step == vmmtest.StepBoot && action == vmmtest.Die) {
					t.Fatal("got no error")
				}
				if err == nil {
					if err := d.DeleteSnapshot(t.Context(), newTag, DeleteSafe); err != nil {
						t.Fatal(err)
					}
				}
				d.checkTidy(t, 0)
				if recs, err := d.db.Snapshots(t.Context()); err != nil || len(recs) != 0 {
					t.Errorf("records: got %v, %v, want none", recs, err)
				}
			})
		}
	}
}
