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
	d.makeLayerOf(t, parent, id, tag, memory.Extent{First: 256, N: 1})
}

// makeLayerOf publishes a snapshot that stores those pages over its parent and differs from it in the page at 1 MiB.
func (d *daemon) makeLayerOf(t *testing.T, parent, id, tag string, pages memory.Extent) {
	t.Helper()
	ref, err := d.snapshots.Acquire(t.Context(), d.cache, parent)
	if err != nil {
		t.Fatal(err)
	}
	defer ref.Release()
	all := make([]byte, testMemMiB<<20)
	if _, err := ref.Image().ReadAt(all, 0); err != nil {
		t.Fatal(err)
	}
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
	copy(all[1<<20:], "tips")
	if _, err := ram.WriteAt(all, 0); err != nil {
		t.Fatal(err)
	}
	st, err := d.snapshots.Stage(id)
	if err != nil {
		t.Fatal(err)
	}
	if err := st.WriteMemory(t.Context(), ram, []memory.Extent{pages}); err != nil {
		t.Fatal(err)
	}
	if err := st.WriteDevice(t.Context(), device); err != nil {
		t.Fatal(err)
	}
	man.ID, man.Parent = id, parent
	if _, err := st.Publish(t.Context(), man); err != nil {
		t.Fatal(err)
	}
	if err := d.db.AddSnapshot(t.Context(), store.Snapshot{Tenant: DefaultTenant, ID: id, Tag: tag, Status: store.SnapshotReady, Image: testImage, CreatedAt: time.Now()}); err != nil {
		t.Fatal(err)
	}
}

// TestAdoptsWhatALayerCovers takes over a sandbox of whose base nothing is mapped any more: its layer has every page.
func TestAdoptsWhatALayerCovers(t *testing.T) {
	w := newWorld(t)
	d := w.start(t, options{})
	base := d.snapshot(t, "base", nil)
	d.makeLayerOf(t, base.ID, "sntip", "tip", memory.Extent{N: testMemMiB << 20 / memory.PageSize})
	d = d.restart(t)
	box := d.fork(t, "tip", 1, nil)[0]
	d.sh(t, box.ID, "echo one > /tmp/one")
	d = d.restart(t)
	if s := d.branch(t, box.ID, "grand", nil); s.ParentTag != "tip" {
		t.Errorf("branch: got parent %q, want tip", s.ParentTag)
	}
	if got := d.sh(t, d.fork(t, "grand", 1, nil)[0].ID, "cat /tmp/one; peek 1048576 4"); got != "one\ntips" {
		t.Errorf("memory of a child: got %q", got)
	}
}
