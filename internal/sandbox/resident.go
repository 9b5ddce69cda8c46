package sandbox

import (
	"context"
	"fmt"
	"os"
	"slices"
	"strings"
	"sync"

	"github.com/forkd/forkd/internal/memory"
)

// liveSnapshot is what a branch has beside other snapshots: it can be forked before it is on disk.
type liveSnapshot struct {
	captured chan struct{} // closed when its memory is resident, or err says why it never will be
	err      error
	written  chan struct{} // closed when it is on disk, or never will be

	mu  sync.Mutex
	ref *memory.Ref // keeps its memory while it is not on disk
}

func newLiveSnapshot() *liveSnapshot {
	return &liveSnapshot{captured: make(chan struct{}), written: make(chan struct{})}
}

// await waits until the snapshot can be forked.
func (l *liveSnapshot) await(ctx context.Context) error {
	if l == nil {
		return nil
	}
	select {
	case <-l.captured:
		return l.err
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

func (l *liveSnapshot) isCaptured() bool {
	select {
	case <-l.captured:
		return true
	default:
		return false
	}
}

// land makes the snapshot one that can be forked. The reference is the snapshot's from then on.
func (l *liveSnapshot) land(ref *memory.Ref) {
	l.mu.Lock()
	l.ref = ref
	l.mu.Unlock()
	close(l.captured)
}

// releaseImage lets the memory go when nobody else uses it. Releasing twice is harmless.
func (l *liveSnapshot) releaseImage() {
	if l == nil {
		return
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.ref != nil {
		l.ref.Release()
	}
}

// resident returns a reference to a snapshot's memory that a monitor can be started from.
func (m *Manager) resident(ctx context.Context, f *frozen) (*memory.Ref, error) {
	ref, err := m.snapshots.Acquire(ctx, m.cache, f.id)
	if err != nil {
		return nil, err
	}
	img := ref.Image()
	if len(img.Layers()) == 0 || !m.noOverlay.Load() && overlays(img) <= memory.MaxOverlay {
		return ref, nil
	}
	defer ref.Release()
	return m.cache.Acquire(ctx, f.id+flatSuffix, func(ctx context.Context) (*memory.Image, error) { return flatten(ctx, f.id, img) })
}

// flatSuffix is not part of any snapshot's id.
const flatSuffix = "~flat"

// overlays is how many mappings it takes to put an image's layers over its base.
func overlays(img *memory.Image) int {
	n := 0
	for _, l := range img.Plan() {
		n += len(l.Extents)
	}
	return n
}

// flatten copies an image into one without layers.
func flatten(ctx context.Context, id string, img *memory.Image) (*memory.Image, error) {
	data, err := memory.DataExtents(img.Base())
	if err != nil {
		return nil, fmt.Errorf("flatten snapshot %s: %w", id, err)
	}
	for _, l := range img.Layers() {
		data = memory.Union(data, l.Extents)
	}
	f, err := copyOf(ctx, id, img, data)
	if err != nil {
		return nil, fmt.Errorf("flatten snapshot %s: %w", id, err)
	}
	flat, err := memory.NewImage(f)
	if err != nil {
		_ = f.Close() // a memfd: nothing can be lost
		return nil, fmt.Errorf("flatten snapshot %s: %w", id, err)
	}
	return flat, nil
}

// copyOf returns a sealed memfd that has those pages of an image. Pages of zeros stay holes.
func copyOf(ctx context.Context, id string, img *memory.Image, extents []memory.Extent) (_ *os.File, err error) {
	f, err := memory.New(memoryName(id), img.Bytes())
	if err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			_ = f.Close()
		}
	}()
	buf := make([]byte, 1<<20)
	for _, e := range extents {
		for off, end := e.Offset(), e.Offset()+e.Bytes(); off < end; off += int64(len(buf)) {
			if err := ctx.Err(); err != nil {
				return nil, context.Cause(ctx)
			}
			part := buf[:min(int64(len(buf)), end-off)]
			if _, err := img.ReadAt(part, off); err != nil {
				return nil, err
			}
			if err := writePages(f, part, off); err != nil {
				return nil, err
			}
		}
	}
	return f, memory.Seal(f)
}

// writePages writes the pages that are not all zeros.
func writePages(f *os.File, pages []byte, off int64) error {
	for len(pages) > 0 {
		n := 0
		for n < len(pages) && !memory.IsZeroPage(pages[n:n+memory.PageSize]) {
			n += memory.PageSize
		}
		if n > 0 {
			if _, err := f.WriteAt(pages[:n], off); err != nil {
				return err
			}
		}
		if n < len(pages) {
			n += memory.PageSize // a page of zeros
		}
		pages, off = pages[n:], off+int64(n)
	}
	return nil
}

// The memfds of guest memory are named after the snapshot whose pages they hold: internal/snapshot does so when it loads one, and
// we do when we capture one. That is how a restarted daemon knows what a machine that it finds was started from.
const memoryPrefix = "snap-"

func memoryName(id string) string { return memoryPrefix + id }

// memoryID is the snapshot whose pages a file of a resident image holds.
func memoryID(f *os.File) string {
	id, _ := strings.CutPrefix(memory.NameOf(f), memoryPrefix)
	return id
}

// above returns the pages of an image that may differ from the last snapshot of a chain (ids, root first), one that the image descends from.
// It returns false when it does not know: then nothing less than all pages will do.
func above(img *memory.Image, chain []string) ([]memory.Extent, bool) {
	layers := img.Layers()
	for i := len(layers) - 1; i >= 0; i-- {
		if slices.Contains(chain, memoryID(layers[i].File)) {
			return unionOf(layers[i+1:]), true
		}
	}
	if slices.Contains(chain, memoryID(img.Base())) {
		return unionOf(layers), true
	}
	return nil, false
}

func unionOf(layers []memory.Layer) []memory.Extent {
	var all []memory.Extent
	for _, l := range layers {
		all = memory.Union(all, l.Extents)
	}
	return all
}
