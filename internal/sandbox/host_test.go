package sandbox

import (
	"context"
	"fmt"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/forkd/forkd/internal/memory"
	"github.com/forkd/forkd/internal/vmm"
)

// TestHostWithoutLiveBranches branches where monitors can't be given a userfaultfd.
func TestHostWithoutLiveBranches(t *testing.T) {
	d := newWorld(t).start(t, options{})
	d.snapshot(t, "base", nil)
	kept := d.uffd
	d.uffd = nil
	src := d.fork(t, "base", 1, nil)[0]
	d.uffd = kept
	d.mark(t, src.ID, "one")
	s := d.branch(t, src.ID, "tip", nil)
	if !strings.Contains(s.Warning, "live") || s.ParentTag != "base" || !s.Bootable {
		t.Errorf("branch: got %+v, want a warning that it was not live", s)
	}
	d.checkMark(t, d.fork(t, "tip", 1, nil)[0].ID, "one")
	d = d.restart(t)
	if again, err := d.Snapshot(t.Context(), "tip"); err != nil || again.Warning != s.Warning {
		t.Errorf("after a restart: got %+v, %v", again, err)
	}
	if s := d.branch(t, d.fork(t, "base", 1, nil)[0].ID, "live", nil); s.Warning != "" {
		t.Errorf("branch of a sandbox that can be: got warning %q", s.Warning)
	}
}

// TestHostWithoutLayers forks layers where nothing can be mapped over a base: they are flattened in memory, and branched as well.
func TestHostWithoutLayers(t *testing.T) {
	d := newWorld(t).start(t, options{})
	d.snapshot(t, "base", nil)
	src := d.fork(t, "base", 1, nil)[0]
	d.mark(t, src.ID, "one")
	d.branch(t, src.ID, "tip", nil)
	d.noOverlay.Store(true)
	box := d.fork(t, "tip", 2, nil)[1]
	d.checkMark(t, box.ID, "one")
	d.sh(t, box.ID, "poke 1200128 two")
	if s := d.branch(t, box.ID, "tiptip", nil); s.ParentTag != "tip" || s.PhysicalBytes > 400<<10 {
		t.Errorf("branch of a child of a flattened image: got parent %q, %d bytes", s.ParentTag, s.PhysicalBytes)
	}
	res, err := d.ForkRunning(t.Context(), box.ID, ForkRunningRequest{N: 1})
	if err != nil || res.Results[0].Err != nil {
		t.Fatalf("ForkRunning: %+v, %v", res, err)
	}
	deep := res.Results[0].Sandbox.ID
	if s := d.branch(t, deep, "deep", nil); s.Status != StatusReady { // it may be whole: its memory does not tell
		t.Errorf("branch of a child of a flattened instant: got %+v", s)
	}
	for range 2 {
		for _, tag := range []string{"tiptip", "deep"} {
			child := d.fork(t, tag, 1, nil)[0]
			d.checkMark(t, child.ID, "one")
			if got := d.sh(t, child.ID, "peek 1200128 3"); got != "two" {
				t.Errorf("child of %s: got %q", tag, got)
			}
			if err := d.Kill(t.Context(), child.ID); err != nil {
				t.Fatal(err)
			}
		}
		d = d.restart(t)
	}
	if err := d.Kill(t.Context(), deep); err != nil {
		t.Fatal(err)
	}
	if d.cache.Resident(res.SnapshotID) || d.cache.Resident(res.SnapshotID+flatSuffix) {
		t.Error("the flattened instant is still resident without its children")
	}
}

// TestHostWithoutLayersIsFoundOut has several launches find out at once that nothing can be mapped over a base here.
func TestHostWithoutLayersIsFoundOut(t *testing.T) {
	const n = 3
	d := newWorld(t).start(t, options{limits: Limits{Launches: n}})
	d.snapshot(t, "base", nil)
	src := d.fork(t, "base", 1, nil)[0]
	d.mark(t, src.ID, "one")
	d.branch(t, src.ID, "tip", nil)
	var calls atomic.Int32
	all := make(chan struct{})
	d.overlay = func(ctx context.Context, _ vmm.Process, img *memory.Image, _ []int) error {
		if len(img.Layers()) == 0 {
			return nil
		}
		if calls.Add(1) == n {
			close(all)
		}
		select {
		case <-all:
			return fmt.Errorf("map layers: %w", memory.ErrNotPermitted)
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
	for _, b := range d.fork(t, "tip", n, nil) {
		d.checkMark(t, b.ID, "one")
	}
	d.fork(t, "tip", 1, nil)
	if got := calls.Load(); got != n {
		t.Errorf("layers were mapped %d times, want %d: it is known then", got, n)
	}
}
