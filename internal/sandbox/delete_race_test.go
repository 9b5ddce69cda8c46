package sandbox

import (
	"context"
	"fmt"
	"testing"

	"github.com/forkd/forkd/internal/failpoint"
)

// TestFreezeDuringForcedDelete freezes a sandbox whose turn to end with its snapshot has not come: nothing may rest on what is going.
func TestFreezeDuringForcedDelete(t *testing.T) {
	points := failpoint.New()
	d := newWorld(t).start(t, options{failpoints: points, limits: Limits{Launches: 1}})
	d.snapshot(t, "base", nil)
	boxes := d.fork(t, "base", 6, nil)
	release := make(chan struct{})
	points.On(pointKillRecorded, 0, func(context.Context) error { <-release; return nil })
	deleted := make(chan error, 1)
	go func() { deleted <- d.DeleteSnapshot(context.Background(), "base", DeleteForce) }()
	eventually(t, "the first to end", func() string {
		if n := points.Hits(pointKillRecorded); n != 4 {
			return fmt.Sprintf("%d are ending", n)
		}
		return ""
	})
	for _, b := range boxes {
		if box, ok := d.live(b.ID); !ok || box.life.Err() != nil {
			continue
		}
		_, err := d.Branch(t.Context(), b.ID, BranchRequest{Tag: "tip", Wait: true})
		checkCode(t, "Branch", err, CodeSnapshotInUse)
		_, err = d.ForkRunning(t.Context(), b.ID, ForkRunningRequest{N: 1})
		checkCode(t, "ForkRunning", err, CodeSnapshotInUse)
		_, err = d.Suspend(t.Context(), b.ID, false)
		checkCode(t, "Suspend", err, CodeSnapshotInUse)
		d.sh(t, b.ID, "true") // it runs on until its turn has come
		break
	}
	checkCode(t, "another DeleteSnapshot", d.DeleteSnapshot(t.Context(), "base", DeleteForce), CodeSnapshotNotFound)
	close(release)
	if err := <-deleted; err != nil {
		t.Errorf("DeleteSnapshot: %v", err)
	}
	d.checkTidy(t, 0)
}

// TestNothingRestsOnTheCondemned asks what a layer rests on that was begun before the snapshot below it was condemned.
func TestNothingRestsOnTheCondemned(t *testing.T) {
	d := newWorld(t).start(t, options{})
	d.snapshot(t, "base", nil)
	d.branch(t, d.fork(t, "base", 1, nil)[0].ID, "mid", nil)
	box, _ := d.live(d.fork(t, "mid", 1, nil)[0].ID)
	draft, err := d.draft(box, "sndraft", "tip")
	if err != nil || draft.parent != d.frozen["mid"].id {
		t.Fatalf("draft: got %+v, %v", draft, err)
	}
	defer d.unuse(draft)
	d.mu.Lock()
	mid, base := d.frozen["mid"], d.frozen["base"]
	mid.deleting = true
	d.mu.Unlock()
	got, release, err := d.rest(t.Context(), persisting{frozen: draft})
	if err != nil || got != base {
		t.Errorf("rest: got %+v, %v, want the base", got, err)
	}
	release()
	_, err = d.draft(box, "snlate", "late")
	checkCode(t, "draft over what is going", err, CodeSnapshotInUse)
	// Who deletes the base and all that rests on it comes second.
	checkCode(t, "DeleteSnapshot of both", d.DeleteSnapshot(t.Context(), "base", DeleteCascade), CodeSnapshotInUse)
	d.pardon([]*frozen{mid})
	if got, release, err = d.rest(t.Context(), persisting{frozen: draft}); err != nil || got != mid {
		t.Errorf("rest after a pardon: got %+v, %v, want the nearest", got, err)
	}
	release()
}

// TestForcedDeleteLooksAgain takes to a snapshot while its sandboxes are being ended for its removal.
func TestForcedDeleteLooksAgain(t *testing.T) {
	points := failpoint.New()
	d := newWorld(t).start(t, options{failpoints: points})
	s := d.snapshot(t, "base", nil)
	d.fork(t, "base", 1, nil)
	base := d.frozen["base"]
	points.On(pointKillRecorded, 1, func(context.Context) error {
		d.mu.Lock()
		defer d.mu.Unlock()
		d.byID["snnew"] = &frozen{id: "snnew", parent: s.ID, status: StatusReady, kept: true}
		return nil
	})
	checkCode(t, "DeleteSnapshot", d.DeleteSnapshot(t.Context(), "base", DeleteForce), CodeSnapshotInUse)
	d.mu.Lock()
	delete(d.byID, "snnew")
	pardoned := !base.deleting
	d.mu.Unlock()
	if recs, err := d.db.Snapshots(t.Context()); err != nil || len(recs) != 1 || recs[0].Status != "ready" || !pardoned {
		t.Errorf("afterwards: got records %+v, %v, pardoned %v, want it as before", recs, err, pardoned)
	}
}
