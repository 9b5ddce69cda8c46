package vmmtest

import (
	"bytes"
	"context"
	"errors"
	"os"
	"testing"

	"github.com/forkd/forkd/internal/memory"
	"github.com/forkd/forkd/internal/vmm"
)

// testOverlay maps a layer over a child's memory before it runs. The layer holds the pages with the parent's mark, changed.
func (s *suite) testOverlay(t *testing.T) {
	if !s.info.Features.Layers {
		t.Skip("the engine's monitors take no layers")
	}
	const changed = "changed-by-a-layer-"
	mark := []byte(s.template.mark)
	layer := s.layer(t, mark, append([]byte(changed), mark[len(changed):]...))
	img, err := memory.NewImage(dup(t, s.template.ram), layer)
	if err != nil {
		t.Fatal(err)
	}
	defer img.Close()
	over := s.forkImage(t, img, s.template.state)
	s.checkRead(t, over, changed+s.template.mark[len(changed):])
	s.write(t, over, "written-over-a-layer")
	s.checkRead(t, over, "written-over-a-layer")
	s.checkRead(t, s.fork(t, "without"), s.template.mark)
}

// forkImage makes a running child of an image with layers.
func (s *suite) forkImage(t *testing.T, img *memory.Image, state *os.File) *vm {
	t.Helper()
	p := s.prepareWith(t, func(cfg *vmm.PrepareConfig) {
		for _, layer := range img.Layers() {
			cfg.Layers = append(cfg.Layers, layer.File)
		}
	})
	if !s.info.Features.LayersLoaded {
		s.overlay(t, p, img)
		return s.resume(t, s.loadInto(t, p, state))
	}
	m := s.loadInto(t, p, state)
	s.overlay(t, m, img)
	return s.resume(t, m)
}

// overlay maps the layers of an image over a monitor's memory.
func (s *suite) overlay(t *testing.T, monitor interface {
	Process() vmm.Process
	Kill() error
}, img *memory.Image) {
	t.Helper()
	err := memory.Overlay(s.step(t), monitor.Process(), img, nil)
	if err == nil {
		return
	}
	if killErr := monitor.Kill(); killErr != nil {
		t.Errorf("Kill: %v", killErr)
	}
	if errors.Is(err, memory.ErrNotPermitted) {
		t.Skipf("this host doesn't allow layers: %v", err)
	}
	t.Fatalf("Overlay: %v", err)
}

// testLiveBranch freezes a running child into a layer while it goes on, and makes children of that.
func (s *suite) testLiveBranch(t *testing.T) {
	if !s.info.Features.Live || !s.info.Features.Layers {
		t.Skip("the engine's monitors can't be captured while they run")
	}
	uffd, err := memory.OpenUFFD()
	if err != nil {
		t.Skipf("this host has no userfaultfd: %v", err)
	}
	defer uffd.Close()
	base, err := memory.NewImage(dup(t, s.template.ram))
	if err != nil {
		t.Fatal(err)
	}
	defer base.Close()
	source := s.forkWith(t, "source", func(cfg *vmm.PrepareConfig) { cfg.UFFD = uffd })
	s.write(t, source, "before-the-branch")
	layer, state := s.capture(t, source, base)
	s.write(t, source, "after-the-branch")
	img, err := base.Derive(layer)
	if err != nil {
		t.Fatal(err)
	}
	defer img.Close()
	branch := s.forkImage(t, img, state)
	s.checkRead(t, branch, "before-the-branch")
	s.write(t, branch, "of-the-branch")
	s.checkRead(t, source, "after-the-branch")
	s.checkRead(t, s.forkImage(t, img, state), "before-the-branch")
	s.checkRead(t, s.fork(t, "without"), s.template.mark)
}

// capture takes the memory and the device state of a running machine at one instant.
func (s *suite) capture(t *testing.T, source *vm, base *memory.Image) (memory.Layer, *os.File) {
	t.Helper()
	state := newState(t)
	hooks := memory.Hooks{
		Pause: func(ctx context.Context) error {
			return errors.Join(source.Pause(ctx), source.SaveState(ctx, state))
		},
		Resume: source.Resume,
	}
	target := memory.Target{Process: source.Process(), Image: base}
	captured, err := memory.Capture(s.step(t), target, hooks, memory.CaptureOptions{Mode: memory.ModeLive})
	if errors.Is(err, memory.ErrNotPermitted) || errors.Is(err, memory.ErrNotTracked) {
		t.Skipf("this host doesn't allow live branches: %v", err)
	}
	if err != nil {
		t.Fatalf("Capture: %v", err)
	}
	t.Logf("captured %d pages, paused for %v", captured.Pages, captured.Times.Pause)
	return captured.Layer, state
}

// layer returns a layer of the template's pages that hold old, with replacement, of the same length, in its place.
func (s *suite) layer(t *testing.T, old, replacement []byte) memory.Layer {
	t.Helper()
	f, err := memory.New("vmmtest-layer", int64(s.h.Shape.MemMiB)<<20)
	if err != nil {
		t.Fatal(err)
	}
	var extents []memory.Extent
	page := make([]byte, memory.PageSize)
	for n := range uint64(s.h.Shape.MemMiB) << 20 / memory.PageSize {
		if _, err := s.template.ram.ReadAt(page, int64(n*memory.PageSize)); err != nil {
			t.Fatalf("read the template's memory: %v", err)
		}
		if !bytes.Contains(page, old) {
			continue
		}
		if _, err := f.WriteAt(bytes.ReplaceAll(page, old, replacement), int64(n*memory.PageSize)); err != nil {
			t.Fatalf("write the layer: %v", err)
		}
		extents = append(extents, memory.Extent{First: n, N: 1})
	}
	if len(extents) == 0 {
		t.Fatal("the parent's mark isn't in its memory")
	}
	if err := memory.Seal(f); err != nil {
		t.Fatal(err)
	}
	return memory.Layer{File: f, Extents: memory.Normalize(extents)}
}
