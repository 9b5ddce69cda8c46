package store_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/forkd/forkd/internal/store"
	"github.com/forkd/forkd/internal/vmm"
)

// childEnv names the database that the re-executed test binary writes to before it kills itself.
const childEnv = "FORKD_STORE_TEST_CHILD"

func TestMain(m *testing.M) {
	if path := os.Getenv(childEnv); path != "" {
		writeAndDie(path)
	}
	os.Exit(m.Run())
}

func open(t *testing.T, path string) *store.DB {
	t.Helper()
	db, err := store.Open(path)
	if err != nil {
		t.Fatalf("Open: %v", err)
	}
	t.Cleanup(func() {
		if err := db.Close(); err != nil {
			t.Errorf("Close: %v", err)
		}
	})
	return db
}

func tempDB(t *testing.T) (*store.DB, string) {
	path := filepath.Join(t.TempDir(), "forkd.db")
	return open(t, path), path
}

var epoch = time.Unix(1_700_000_000, 123)

func exampleSandbox(id string) store.Sandbox {
	return store.Sandbox{
		ID: id, SnapshotID: "sn1", SnapshotTag: "py", State: "starting", CreatedAt: epoch, Deadline: epoch.Add(time.Hour),
		MemoryLimitMiB: 512, Path: "cold", Env: map[string]string{"A": "1=2"}, Metadata: map[string]string{"who": "über"},
		Process: vmm.Process{PID: 7, StartTicks: 9, Dir: "/run/x", LayerFDs: []int{3, 4}},
	}
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func TestSnapshotRecords(t *testing.T) {
	db, _ := tempDB(t)
	ctx := t.Context()
	a := store.Snapshot{ID: "sn1", Tag: "py", Status: store.SnapshotWriting, Image: "debian", CreatedAt: epoch, PoolSize: 3}
	must(t, db.AddSnapshot(ctx, a))
	b := a
	b.ID = "sn2"
	if err := db.AddSnapshot(ctx, b); !errors.Is(err, store.ErrExists) {
		t.Errorf("second snapshot with the tag: got %v, want ErrExists", err)
	}
	b.Tag = "other"
	must(t, db.AddSnapshot(ctx, b)) // the refused attempt left no row behind
	must(t, db.MarkSnapshotReady(ctx, "sn1", 3*time.Second))
	must(t, db.SetPoolSize(ctx, "sn1", 8))

	a.Status, a.BootWarm, a.PoolSize = store.SnapshotReady, 3*time.Second, 8
	got, err := db.Snapshots(ctx)
	must(t, err)
	if diff := cmp.Diff(got, []store.Snapshot{b, a}); diff != "" {
		t.Errorf("Snapshots (-got +want):\n%s", diff)
	}

	if err := db.MarkSnapshotsDeleting(ctx, "sn1", "nope"); !errors.Is(err, store.ErrNotFound) {
		t.Errorf("MarkSnapshotsDeleting with an unknown id: got %v, want ErrNotFound", err)
	}
	got, err = db.Snapshots(ctx)
	must(t, err)
	if got[1].Status != store.SnapshotReady {
		t.Errorf("after a refused MarkSnapshotsDeleting: got status %s, want ready", got[1].Status)
	}
	must(t, db.MarkSnapshotsDeleting(ctx, "sn1"))
	must(t, db.RemoveSnapshot(ctx, "sn1"))
	must(t, db.RemoveSnapshot(ctx, "sn1"))
	must(t, db.AddSnapshot(ctx, a)) // its tag is free again
}

func TestSandboxRecords(t *testing.T) {
	db, _ := tempDB(t)
	ctx := t.Context()
	s := exampleSandbox("sb1")
	must(t, db.AddSandbox(ctx, s))
	if err := db.AddSandbox(ctx, s); !errors.Is(err, store.ErrExists) {
		t.Errorf("second AddSandbox: got %v, want ErrExists", err)
	}
	p := vmm.Process{PID: 8, StartTicks: 10, Dir: "/run/y"}
	must(t, db.MarkRunning(ctx, "sb1", p, 80*time.Millisecond, epoch.Add(time.Minute)))
	s.State, s.Process, s.ReadyIn, s.Deadline = "running", p, 80*time.Millisecond, epoch.Add(time.Minute)
	check := func(step string) {
		t.Helper()
		got, err := db.Sandbox(ctx, "sb1")
		must(t, err)
		if diff := cmp.Diff(got, s); diff != "" {
			t.Errorf("after %s (-got +want):\n%s", step, diff)
		}
	}
	s.Env, s.Metadata = map[string]string{"A": "1=2"}, map[string]string{"who": "über"}
	check("MarkRunning")
	must(t, db.SetDeadline(ctx, "sb1", time.Time{}))
	s.Deadline = time.Time{}
	check("SetDeadline")
	must(t, db.EndSandbox(ctx, "sb1", "stopped", "deadline", epoch.Add(2*time.Hour)))
	s.State, s.Reason, s.EndedAt = "stopped", "deadline", epoch.Add(2*time.Hour)
	check("EndSandbox")
	must(t, db.RemoveSandbox(ctx, "sb1"))

	for name, err := range map[string]error{
		"RemoveSandbox": db.RemoveSandbox(ctx, "sb1"),
		"EndSandbox":    db.EndSandbox(ctx, "sb1", "stopped", "", epoch),
		"SetDeadline":   db.SetDeadline(ctx, "sb1", epoch),
		"MarkRunning":   db.MarkRunning(ctx, "sb1", p, 0, epoch),
	} {
		if !errors.Is(err, store.ErrNotFound) {
			t.Errorf("%s of a missing sandbox: got %v, want ErrNotFound", name, err)
		}
	}
}

func TestAddSandboxRefusesUnknownState(t *testing.T) {
	db, _ := tempDB(t)
	s := exampleSandbox("sb1")
	s.State = "dancing"
	if err := db.AddSandbox(t.Context(), s); err == nil {
		t.Error("got no error for a state outside the vocabulary")
	}
}

func TestForgetEnded(t *testing.T) {
	tests := []struct {
		name   string
		before time.Time
		keep   int
		want   []string // newest end first
	}{
		{"nothing to forget", epoch, 10, []string{"sb5", "sb4", "sb3", "sb2", "sb1"}},
		{"by age", epoch.Add(3 * time.Minute), 10, []string{"sb5", "sb4", "sb3"}},
		{"by number", epoch, 2, []string{"sb5", "sb4"}},
		{"all", epoch.Add(time.Hour), 0, nil},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			db, _ := tempDB(t)
			ctx := t.Context()
			must(t, db.AddSandbox(ctx, exampleSandbox("lives")))
			for i := 1; i <= 5; i++ {
				s := exampleSandbox(fmt.Sprintf("sb%d", i))
				must(t, db.AddSandbox(ctx, s))
				must(t, db.EndSandbox(ctx, s.ID, "stopped", "x", epoch.Add(time.Duration(i)*time.Minute)))
			}
			n, err := db.ForgetEnded(ctx, tt.before, tt.keep)
			must(t, err)
			if want := 5 - len(tt.want); n != want {
				t.Errorf("ForgetEnded: got %d, want %d", n, want)
			}
			ended, err := db.EndedSandboxes(ctx)
			must(t, err)
			var got []string
			for _, s := range ended {
				got = append(got, s.ID)
			}
			if diff := cmp.Diff(got, tt.want); diff != "" {
				t.Errorf("what is left (-got +want):\n%s", diff)
			}
			if _, err := db.Sandbox(ctx, "lives"); err != nil {
				t.Errorf("a live sandbox was forgotten: %v", err)
			}
		})
	}
}

// TestReopenAfterKill writes records in a process that kills itself with the database open, and reads them here.
func TestReopenAfterKill(t *testing.T) {
	path := filepath.Join(t.TempDir(), "forkd.db")
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), childEnv+"="+path)
	cmd.Stderr = os.Stderr
	err := cmd.Run()
	var exit *exec.ExitError
	if !errors.As(err, &exit) || exit.Sys().(syscall.WaitStatus).Signal() != syscall.SIGKILL {
		t.Fatalf("child: got %v, want to see it killed", err)
	}
	db := open(t, path)
	snaps, err := db.Snapshots(t.Context())
	must(t, err)
	if len(snaps) != 1 || snaps[0].Status != store.SnapshotReady {
		t.Errorf("snapshots: got %+v, want one that is ready", snaps)
	}
	boxes, err := db.Sandboxes(t.Context())
	must(t, err)
	if len(boxes) != 50 {
		t.Fatalf("got %d sandboxes, want 50", len(boxes))
	}
	for _, s := range boxes {
		if s.State != "running" {
			t.Errorf("sandbox %s: got state %s, want running", s.ID, s.State)
		}
	}
}

func writeAndDie(path string) {
	fail := func(err error) {
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
	}
	ctx := context.Background()
	db, err := store.Open(path)
	fail(err)
	fail(db.AddSnapshot(ctx, store.Snapshot{ID: "sn1", Tag: "py", Status: store.SnapshotWriting, CreatedAt: epoch}))
	fail(db.MarkSnapshotReady(ctx, "sn1", time.Second))
	for i := range 50 {
		s := exampleSandbox(fmt.Sprintf("sb%d", i))
		fail(db.AddSandbox(ctx, s))
		fail(db.MarkRunning(ctx, s.ID, s.Process, time.Millisecond, time.Time{}))
	}
	fail(syscall.Kill(os.Getpid(), syscall.SIGKILL))
	select {}
}

func TestOpenRefusesNewerSchema(t *testing.T) {
	db, path := tempDB(t)
	must(t, db.Close())
	raw, err := sql.Open("sqlite", path)
	must(t, err)
	_, err = raw.Exec("PRAGMA user_version = 99")
	must(t, err)
	must(t, raw.Close())
	if _, err := store.Open(path); !errors.Is(err, store.ErrNewer) {
		t.Errorf("got %v, want ErrNewer", err)
	}
}

func TestOpenReportsWhatItCannotOpen(t *testing.T) {
	path := filepath.Join(t.TempDir(), "missing", "forkd.db")
	if _, err := store.Open(path); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("missing directory: got %v, want ErrNotExist", err)
	}
	path = filepath.Join(t.TempDir(), "forkd.db")
	must(t, os.WriteFile(path, []byte("this is not a database, and long enough to be read as one"), 0o600))
	if _, err := store.Open(path); err == nil {
		t.Error("not a database: got no error")
	}
}

func TestFileModeIsPrivate(t *testing.T) {
	db, path := tempDB(t)
	must(t, db.AddSandbox(t.Context(), exampleSandbox("sb1")))
	for _, p := range []string{path, path + "-wal"} {
		fi, err := os.Stat(p)
		must(t, err)
		if got := fi.Mode().Perm(); got != 0o600 {
			t.Errorf("%s: got mode %v, want 0600", filepath.Base(p), got)
		}
	}
}

func TestConcurrentUse(t *testing.T) {
	db, _ := tempDB(t)
	ctx := t.Context()
	var wg sync.WaitGroup
	for i := range 8 {
		wg.Go(func() {
			for j := range 20 {
				s := exampleSandbox(fmt.Sprintf("sb%dx%d", i, j))
				if err := db.AddSandbox(ctx, s); err != nil {
					t.Error(err)
				}
				if j%5 == 0 {
					if err := db.AddSnapshot(ctx, store.Snapshot{ID: s.ID, Tag: s.ID, Status: store.SnapshotWriting, CreatedAt: epoch}); err != nil {
						t.Error(err)
					}
				}
				if _, err := db.Sandboxes(ctx); err != nil {
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
	all, err := db.Sandboxes(ctx)
	must(t, err)
	if len(all) != 160 {
		t.Errorf("got %d sandboxes, want 160", len(all))
	}
}

// BenchmarkClaimWrites is what a claim costs here: the intent and the outcome.
func BenchmarkClaimWrites(b *testing.B) {
	db, err := store.Open(filepath.Join(b.TempDir(), "forkd.db"))
	if err != nil {
		b.Fatal(err)
	}
	defer func() { _ = db.Close() }()
	ctx := context.Background()
	i := 0
	for b.Loop() {
		i++
		s := exampleSandbox(fmt.Sprintf("sb%d", i))
		if err := db.AddSandbox(ctx, s); err != nil {
			b.Fatal(err)
		}
		if err := db.MarkRunning(ctx, s.ID, s.Process, time.Millisecond, time.Time{}); err != nil {
			b.Fatal(err)
		}
	}
}
