package sandbox

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/forkd/forkd/internal/failpoint"
	"github.com/forkd/forkd/internal/snapshot"
)

// soon fails the test when do does not return.
func soon(t *testing.T, what string, do func()) {
	t.Helper()
	done := make(chan struct{})
	go func() { defer close(done); do() }()
	select {
	case <-done:
	case <-time.After(10 * time.Second):
		t.Fatalf("%s does not return", what)
	}
}

// TestSlowWriteStallsOneSandbox holds a sandbox's lock, as a write to the database on a slow disk does: all others go on, whoever asks for it.
func TestSlowWriteStallsOneSandbox(t *testing.T) {
	d := newWorld(t).start(t, options{})
	d.snapshot(t, "base", nil)
	boxes := d.fork(t, "base", 2, func(r *ForkRequest) { r.Name = "" })
	slow, _ := d.live(boxes[0].ID)
	slow.mu.Lock()
	var waiting sync.WaitGroup
	waiting.Go(func() { _, _ = d.Sandboxes(context.Background()) })
	waiting.Go(func() { _, _ = d.SandboxByName(context.Background(), "none") })
	waiting.Go(func() { d.Stats() })
	defer waiting.Wait()
	defer slow.mu.Unlock()
	time.Sleep(20 * time.Millisecond) // they wait for the sandbox by now
	soon(t, "Snapshots", func() { _, _ = d.Snapshots(t.Context()) })
	soon(t, "Tree", func() { _, _ = d.Tree(t.Context()) })
	soon(t, "DeleteSnapshot", func() {
		checkCode(t, "DeleteSnapshot", d.DeleteSnapshot(t.Context(), "base", DeleteSafe), CodeSnapshotInUse)
	})
	soon(t, "Ping of another sandbox", func() {
		if _, err := d.Ping(t.Context(), boxes[1].ID); err != nil {
			t.Error(err)
		}
	})
	soon(t, "Fork", func() { d.fork(t, "base", 1, nil) })
}

// TestEventsMayAskBack asks for everything whenever something happens.
func TestEventsMayAskBack(t *testing.T) {
	d := newWorld(t).start(t, options{})
	m := d.Manager
	m.cfg.Events = func(Event) {
		if _, err := m.Sandboxes(context.Background()); err != nil {
			t.Error(err)
		}
		if _, err := m.Tree(context.Background()); err != nil {
			t.Error(err)
		}
		m.Stats()
	}
	soon(t, "a life with events", func() {
		d.snapshot(t, "base", nil)
		b := d.fork(t, "base", 1, nil)[0]
		d.branch(t, b.ID, "tip", nil)
		d.suspend(t, b.ID)
		d.resume(t, b.ID)
		if err := d.Kill(t.Context(), b.ID); err != nil {
			t.Error(err)
		}
		if err := d.DeleteSnapshot(t.Context(), "base", DeleteCascade); err != nil {
			t.Error(err)
		}
	})
}

// TestClaimWithATakenName refuses a name that a sandbox has: that is no fault of the members, which stay as they are.
func TestClaimWithATakenName(t *testing.T) {
	var log bytes.Buffer
	var mu sync.Mutex
	d := newWorld(t).start(t, options{log: slog.New(slog.NewTextHandler(lockedWriter{&mu, &log}, nil))})
	d.snapshot(t, "base", func(r *SnapshotRequest) { r.PoolSize = 3 })
	waitPool(t, d, "base", 3)
	d.stopRefills()
	named := func() error {
		results, err := d.Fork(t.Context(), ForkRequest{Tag: "base", N: 1, Name: "mine"})
		if err != nil {
			return err
		}
		return results[0].Err
	}
	if err := named(); err != nil {
		t.Fatal(err)
	}
	checkCode(t, "Fork with a name that is taken", named(), CodeSandboxExists)
	if st, err := d.Pool(t.Context(), "base"); err != nil || st.Ready != 2 {
		t.Errorf("pool: got %+v, %v, want the other two ready", st, err)
	}
	mu.Lock()
	defer mu.Unlock()
	if strings.Contains(log.String(), "failed when it was claimed") {
		t.Errorf("a member is blamed:\n%s", log.String())
	}
}

type lockedWriter struct {
	mu *sync.Mutex
	b  *bytes.Buffer
}

func (w lockedWriter) Write(p []byte) (int, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.b.Write(p)
}

// TestDiffThatFailsHoldsNothing counts the memfds of a daemon whose snapshot failed after it was frozen.
func TestDiffThatFailsHoldsNothing(t *testing.T) {
	points := failpoint.New()
	d := newWorld(t).start(t, options{failpoints: points})
	d.snapshot(t, "base", nil)
	diff := func() error {
		_, err := d.SnapshotDiff(t.Context(), DiffRequest{From: "base", Tag: "tip", Steps: []WarmUp{{WarmUpExec, "true"}}}, nil)
		return err
	}
	points.On(pointDiffLoaded, 1, func(context.Context) error { return failpoint.ErrInjected })
	points.On(pointDiffFrozen, 1, func(context.Context) error { return failpoint.ErrInjected })
	if diff() == nil { // what is opened once is open then
		t.Fatal("got no error")
	}
	before := memfds(t)
	if diff() == nil || points.Hits(pointDiffFrozen) != 1 {
		t.Fatal("got no error after the freeze")
	}
	if after := memfds(t); len(after) != len(before) {
		t.Errorf("memfds: got %v, want %v as before", after, before)
	}
}

// memfds are those that this process holds open.
func memfds(t *testing.T) []string {
	t.Helper()
	entries, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, e := range entries {
		if target, err := os.Readlink("/proc/self/fd/" + e.Name()); err == nil && strings.Contains(target, "memfd:") {
			names = append(names, target)
		}
	}
	return names
}

// TestTombsAreTheNewest fails more branches than are remembered.
func TestTombsAreTheNewest(t *testing.T) {
	d := newWorld(t).start(t, options{})
	begin := time.Now()
	fail := func(i int) {
		d.entomb(&frozen{id: fmt.Sprintf("sn%d", i), tenant: DefaultTenant, tag: fmt.Sprintf("t%d", i), createdAt: begin.Add(time.Duration(i) * time.Second)}, failpoint.ErrInjected)
	}
	for i := range maxTombs + 2 {
		fail(i)
	}
	fail(maxTombs) // the same one again
	for i, want := range map[int]bool{0: false, 1: false, 2: true, maxTombs + 1: true} {
		if s, err := d.Snapshot(t.Context(), fmt.Sprintf("t%d", i)); (err == nil && s.Status == StatusFailed) != want {
			t.Errorf("branch %d: got %+v, %v, want it remembered: %v", i, s, err, want)
		}
	}
	if len(d.tombs) != maxTombs {
		t.Errorf("%d branches are remembered, want %d", len(d.tombs), maxTombs)
	}
}

// TestAddSnapshotLooksUnderTheLock adds a snapshot whose parent is being removed, at each moment of that.
func TestAddSnapshotLooksUnderTheLock(t *testing.T) {
	points := failpoint.New()
	d := newWorld(t).start(t, options{failpoints: points})
	base := d.snapshot(t, "base", nil)
	d.makeLayer(t, base.ID, "sntip", "tip")
	if err := d.db.RemoveSnapshot(t.Context(), "sntip"); err != nil { // as one that was just unpacked
		t.Fatal(err)
	}
	add := func(context.Context) error {
		err := d.AddSnapshot(t.Context(), "tip", "sntip")
		if code := CodeOf(err); code != CodeSnapshotInUse && code != CodeSnapshotCorrupt { // going, or gone
			t.Errorf("AddSnapshot during the removal: got %v", err)
		}
		return nil
	}
	points.On(pointDeleteRecorded, 1, add)
	points.On(pointDeleteRemoved, 1, add)
	// One that waits for the lock has looked at nothing yet.
	d.mu.Lock()
	added := make(chan error, 1)
	ctx := context.Background()
	go func() { added <- d.adoptChain(ctx, "tip", "sntip") }()
	still(t, "the answer", added)
	parent := d.frozen["base"]
	d.unlistLocked(parent)
	if err := d.snapshots.Remove(base.ID); err != nil {
		t.Error(err)
	}
	d.mu.Unlock()
	if err := <-added; !errors.Is(err, snapshot.ErrCorrupt) {
		t.Errorf("AddSnapshot after the removal: got %v, want what it rests on missing", err)
	}
	d.mu.Lock()
	d.listLocked(parent)
	d.mu.Unlock()
	if err := d.DeleteSnapshot(t.Context(), "base", DeleteSafe); err != nil {
		t.Error(err)
	}
	if recs, err := d.db.Snapshots(t.Context()); err != nil || len(recs) != 0 {
		t.Errorf("records: got %+v, %v, want none", recs, err)
	}
}

// A machine that the daemon would not make is not taken in.
func TestAddSnapshotThatDoesNotFit(t *testing.T) {
	d := newWorld(t).start(t, options{})
	base := d.snapshot(t, "base", nil)
	d.makeLayer(t, base.ID, "sntip", "tip")
	if err := d.db.RemoveSnapshot(t.Context(), "sntip"); err != nil { // as one that was just unpacked
		t.Fatal(err)
	}
	d.limits.MaxMemMiB = 1
	checkCode(t, "AddSnapshot", d.AddSnapshot(t.Context(), "tip", "sntip"), CodeSnapshotIncompatible)
	for _, tt := range []struct {
		mib, vcpus int
		want       bool
	}{{0, 1, false}, {3, 1, false}, {16, 1, true}, {32 << 10, 8, true}, {32<<10 + 1, 1, false}, {1e9, 1, false}, {256, 0, false}, {256, 9, false}, {256, 999, false}} {
		var man snapshot.Manifest
		man.Shape.MemMiB, man.Shape.VCPUs = tt.mib, tt.vcpus
		if err := (Limits{}.withDefaults()).fits(man); (err == nil) != tt.want {
			t.Errorf("%d MiB, %d vCPUs: %v", tt.mib, tt.vcpus, err)
		}
	}
}
