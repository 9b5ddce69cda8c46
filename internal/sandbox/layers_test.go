package sandbox

import (
	"testing"
	"time"

	"github.com/forkd/forkd/internal/memory"
	"github.com/forkd/forkd/internal/store"
)

// TestForkOfALayer forks a snapshot that stores two pages over its parent.
func TestForkOfALayer(t *testing.T) {
	w := newWorld(t)
	d := w.start(t, options{})
	base := d.snapshot(t, "base", func(r *SnapshotRequest) { r.WarmUp = []WarmUp{{WarmUpExec, "poke 1048576 base; poke 1060864 base"}} })
	d.makeLayer(t, base.ID, "sntip", "tip")
	d.stop(t)

	d = w.start(t, options{})
	s, err := d.Snapshot(t.Context(), "tip")
	if err != nil || !s.Bootable || s.ParentTag != "base" {
		t.Fatalf("tip: got %+v, %v", s, err)
	}
	for tag, want := range map[string]string{"base": "base base", "tip": "tips base"} {
		b := d.fork(t, tag, 2, nil)[1]
		if got := d.sh(t, b.ID, "peek 1048576 4") + " " + d.sh(t, b.ID, "peek 1060864 4"); got != want {
			t.Errorf("memory of a child of %s: got %q, want %q", tag, got, want)
		}
	}
	checkCode(t, "DeleteSnapshot of the base", d.DeleteSnapshot(t.Context(), "base", DeleteSafe), CodeSnapshotInUse)
}

// makeLayer publishes a snapshot that differs from its parent in the page at 1 MiB.
func (d *daemon) makeLayer(t *testing.T, parent, id, tag string) {
	t.Helper()
	man, err := d.snapshots.Get(parent)
	if err != nil {
		t.Fatal(err)
	}
	device, err := d.snapshots.Device(parent)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = device.Close() }()
	ram, err := memory.New("layer", testMemMiB<<20)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = ram.Close() }()
	if _, err := ram.WriteAt([]byte("tips"), 1<<20); err != nil {
		t.Fatal(err)
	}
	st, err := d.snapshots.Stage(id)
	if err != nil {
		t.Fatal(err)
	}
	if err := st.WriteMemory(t.Context(), ram, []memory.Extent{{First: 256, N: 1}}); err != nil {
		t.Fatal(err)
	}
	if err := st.WriteDevice(t.Context(), device); err != nil {
		t.Fatal(err)
	}
	man.ID, man.Parent = id, parent
	if _, err := st.Publish(t.Context(), man); err != nil {
		t.Fatal(err)
	}
	if err := d.db.AddSnapshot(t.Context(), store.Snapshot{ID: id, Tag: tag, Status: store.SnapshotReady, Image: testImage, CreatedAt: time.Now()}); err != nil {
		t.Fatal(err)
	}
}
