package store_test

import (
	"errors"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/forkd/forkd/internal/store"
	"github.com/forkd/forkd/internal/vmm"
)

func TestSuspendedRecords(t *testing.T) {
	db, path := tempDB(t)
	ctx := t.Context()
	s := exampleSandbox("sb1")
	s.Name, s.AnchorID, s.AutoSuspend, s.AutoResume = "work", "sn1", time.Minute, true
	must(t, db.AddSandbox(ctx, s))
	for _, id := range []string{"st1", "st2"} {
		must(t, db.AddSnapshot(ctx, store.Snapshot{ID: id, Status: store.SnapshotWriting, CreatedAt: epoch, Owner: "sb1"}))
	}
	must(t, db.AddSnapshot(ctx, store.Snapshot{ID: "alien", Status: store.SnapshotWriting, CreatedAt: epoch, Owner: "sb2"}))
	if err := db.MarkSuspended(ctx, "sb1", "alien", epoch, 0); !errors.Is(err, store.ErrNotFound) {
		t.Errorf("MarkSuspended to the state of another sandbox: got %v, want ErrNotFound", err)
	}
	must(t, db.MarkSuspended(ctx, "sb1", "st1", epoch, time.Hour))
	must(t, db.MarkSuspended(ctx, "sb1", "st2", epoch.Add(time.Second), time.Hour))

	s.State, s.StateID, s.SuspendedAt, s.Left, s.Deadline, s.Process = "suspended", "st2", epoch.Add(time.Second), time.Hour, time.Time{}, vmm.Process{}
	check := func(step string) {
		t.Helper()
		got, err := open(t, path).Sandbox(ctx, "sb1")
		must(t, err)
		if diff := cmp.Diff(got, s); diff != "" {
			t.Errorf("after %s (-got +want):\n%s", step, diff)
		}
	}
	check("MarkSuspended")
	status := map[string]store.SnapshotStatus{}
	all, err := db.Snapshots(ctx)
	must(t, err)
	for _, sn := range all {
		status[sn.ID] = sn.Status
	}
	want := map[string]store.SnapshotStatus{"st1": store.SnapshotDeleting, "st2": store.SnapshotReady, "alien": store.SnapshotWriting}
	if diff := cmp.Diff(status, want); diff != "" {
		t.Errorf("states (-got +want):\n%s", diff)
	}

	must(t, db.SetLeft(ctx, "sb1", time.Minute))
	s.Left = time.Minute
	check("SetLeft")
	p := vmm.Process{PID: 3, StartTicks: 4}
	must(t, db.MarkRunning(ctx, "sb1", p, time.Second, epoch.Add(time.Hour)))
	must(t, db.CountBranch(ctx, "sb1"))
	s.State, s.Process, s.ReadyIn, s.Deadline, s.SuspendedAt, s.Left, s.BranchCount = "running", p, time.Second, epoch.Add(time.Hour), time.Time{}, 0, 1
	check("MarkRunning")
}

func TestSandboxNames(t *testing.T) {
	db, _ := tempDB(t)
	ctx := t.Context()
	named := func(id string) store.Sandbox {
		s := exampleSandbox(id)
		s.Name = "work"
		return s
	}
	must(t, db.AddSandbox(ctx, named("sb1")))
	must(t, db.AddSandbox(ctx, exampleSandbox("sb2")))
	must(t, db.AddSandbox(ctx, exampleSandbox("sb3"))) // many may have none
	if err := db.AddSandbox(ctx, named("sb4")); !errors.Is(err, store.ErrExists) {
		t.Errorf("a second sandbox with the name: got %v, want ErrExists", err)
	}
	if _, err := db.EndedByName(ctx, "", "work"); !errors.Is(err, store.ErrNotFound) {
		t.Errorf("EndedByName of one that lives: got %v, want ErrNotFound", err)
	}
	must(t, db.EndSandbox(ctx, "sb1", "failed", "", epoch))
	must(t, db.AddSandbox(ctx, named("sb4")))
	must(t, db.EndSandbox(ctx, "sb4", "failed", "", epoch.Add(time.Second)))
	got, err := db.EndedByName(ctx, "", "work")
	must(t, err)
	if got.ID != "sb4" {
		t.Errorf("EndedByName: got %s, want the one that ended last", got.ID)
	}
}

func TestSnapshotFamilyRecords(t *testing.T) {
	db, _ := tempDB(t)
	ctx := t.Context()
	root := store.Snapshot{ID: "root", Status: store.SnapshotReady, CreatedAt: epoch}
	tip := store.Snapshot{ID: "tip", Tag: "py", Status: store.SnapshotReady, CreatedAt: epoch}
	must(t, db.AddSnapshots(ctx, root, tip))
	more := store.Snapshot{ID: "more", Status: store.SnapshotReady, CreatedAt: epoch}
	clash := store.Snapshot{ID: "clash", Tag: "py", Status: store.SnapshotReady, CreatedAt: epoch}
	if err := db.AddSnapshots(ctx, more, clash); !errors.Is(err, store.ErrExists) {
		t.Errorf("a family whose tag is taken: got %v, want ErrExists", err)
	}
	if err := db.AddTag(ctx, "", "py", "root", epoch); !errors.Is(err, store.ErrExists) {
		t.Errorf("AddTag that is taken: got %v, want ErrExists", err)
	}
	must(t, db.AddTag(ctx, "", "base", "root", epoch))
	root.Tag = "base"
	tip.Measured = store.Measured{Warning: "not live", Pause: time.Millisecond, Diff: time.Second, DiffPhysical: 1, DiffLogical: 2}
	must(t, db.SetMeasured(ctx, "tip", tip.Measured))
	got, err := db.Snapshots(ctx)
	must(t, err)
	if diff := cmp.Diff(got, []store.Snapshot{root, tip}); diff != "" {
		t.Errorf("Snapshots (-got +want):\n%s", diff)
	}
}
