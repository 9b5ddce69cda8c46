package memory

import (
	"context"
	"fmt"

	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"

	"github.com/forkd/forkd/internal/thread"
)

// copyBatch is how many pages are read by one call, and about how many runs of pages.
const copyBatch = 256

// copier captures without a window: what the process owns is copied while the guest stands still.
type copier struct {
	*capture
	pages   *pagemap
	mem     []byte // the layer, mapped
	tracked bool   // soft-dirty bits tell what was written since ahead began
	ahead   bitset // copied while the guest ran
}

// copied captures by copying in the pause. What was copied ahead has its place in the layer's memory by then, so that the pause
// does not wait for the allocation of pages; where the kernel keeps soft-dirty bits it is not copied a second time.
func (c *capture) copied(ctx context.Context) (_ []Extent, err error) {
	k := &copier{capture: c, ahead: newBitset(c.guest.pages())}
	if k.pages, err = openPagemap(c.proc); err != nil {
		return nil, err
	}
	defer k.pages.close()
	const prot = unix.PROT_READ | unix.PROT_WRITE
	if k.mem, err = unix.Mmap(int(c.layer.Fd()), 0, int(c.target.Image.Bytes()), prot, unix.MAP_SHARED); err != nil {
		return nil, fmt.Errorf("map layer: %w", err)
	}
	defer unix.Munmap(k.mem) // it could not be sealed otherwise
	if c.result.Mode == ModeDiff {
		if err := k.copyAhead(ctx); err != nil {
			return nil, err
		}
	}
	var owned []Extent
	err = c.inPause(ctx, func() (err error) {
		owned, err = k.copyHeld(ctx)
		return err
	})
	if err != nil {
		return nil, err
	}
	return owned, k.punchZeros(owned)
}

// owned are the pages that the process has of its own.
func (k *copier) owned() ([]Extent, error) {
	set := newBitset(k.guest.pages())
	err := k.pages.owned(k.guest, Extent{0, k.guest.pages()}, set.setAll)
	return set.extents(), err
}

func (k *copier) copyAhead(ctx context.Context) error {
	if k.tracked = hasSoftDirty(); k.tracked {
		if err := clearSoftDirty(k.proc); err != nil {
			return err
		}
	}
	owned, err := k.owned()
	if err != nil {
		return err
	}
	for _, e := range owned {
		k.ahead.setAll(e)
	}
	return k.copy(ctx, owned)
}

// copyHeld copies what is not in the layer as it is now, and returns all that the process owns.
// Preconditions: the guest stands still.
func (k *copier) copyHeld(ctx context.Context) ([]Extent, error) {
	owned, err := k.owned()
	if err != nil {
		return nil, err
	}
	if !k.tracked {
		return owned, k.copy(ctx, owned)
	}
	stale := newBitset(k.guest.pages())
	for _, e := range owned {
		if err := k.pages.rewritten(k.guest, e, stale.setAll); err != nil {
			return nil, err
		}
	}
	fresh := Subtract(owned, k.ahead.extents())
	return owned, k.copy(ctx, Union(stale.extents(), fresh))
}

// copy reads extents into the layer, on all processors.
func (k *copier) copy(ctx context.Context, extents []Extent) error {
	group, ctx := errgroup.WithContext(ctx)
	group.SetLimit(thread.Cores())
	var batch []Extent
	room := uint64(copyBatch)
	flush := func() {
		part := batch
		batch, room = nil, copyBatch
		group.Go(func() error { return k.copyBatch(ctx, part) })
	}
	for _, e := range extents {
		for e.N > 0 {
			part := Extent{e.First, min(e.N, room)}
			batch = append(batch, part)
			room -= part.N
			e = from(e, part.End())
			if room == 0 {
				flush()
			}
		}
	}
	flush()
	return group.Wait()
}

func (k *copier) copyBatch(ctx context.Context, extents []Extent) error {
	if err := context.Cause(ctx); err != nil {
		return err
	}
	var local []unix.Iovec
	var remote []unix.RemoteIovec
	for _, e := range extents {
		within(k.guest.runs, e, func(run Mapping, part Extent) error {
			to := unix.Iovec{Base: &k.mem[part.Offset()]}
			to.SetLen(int(part.Bytes()))
			local = append(local, to)
			remote = append(remote, unix.RemoteIovec{Base: uintptr(run.at(part.First)), Len: int(part.Bytes())})
			return nil
		})
	}
	return readProcess(k.proc, local, remote)
}

// punchZeros gives back the memory of captured pages that hold only zeros.
func (k *copier) punchZeros(extents []Extent) error {
	var zero []Extent
	for _, e := range extents {
		zero = appendZeroPages(zero, k.mem[e.Offset():e.Offset()+e.Bytes()], e.First)
	}
	return Punch(k.layer, mergeSorted(zero, 0))
}
