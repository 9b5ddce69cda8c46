package sandbox

import (
	"context"
	"errors"

	"github.com/forkd/forkd/internal/memory"
	"github.com/forkd/forkd/internal/store"
)

// adoptImage finds out what a machine that outlived the daemon was started from: the memfds are gone from everywhere but the machine, which
// still holds them. The image becomes resident as that of the snapshot, so that new children share it, unless another one is.
func (m *Manager) adoptImage(ctx context.Context, c *child, rec store.Sandbox) error {
	m.mu.Lock()
	mib := m.originLocked(rec).manifest.Shape.MemMiB
	m.mu.Unlock()
	img, err := memory.MappedImage(c.machine.Process(), int64(mib)<<20)
	if err != nil {
		return err
	}
	id := startedFrom(rec)
	take := func(context.Context) (*memory.Image, error) { return img, nil }
	ref, err := m.cache.Acquire(ctx, id, take)
	if err != nil {
		return errors.Join(err, img.Close())
	}
	switch there := ref.Image(); {
	case there == img:
	case memory.SameFiles(there, img):
		err = img.Close()
	default:
		ref.Release()
		// A name that is no snapshot's: the image goes with the machine.
		id = "machine~" + c.id
		ref = m.cache.PutRef(id, img)
	}
	c.image = ref
	c.drop = func() { m.dropAdopted(id) }
	return err
}

// dropAdopted gives back an adopted image that is no snapshot's and that no other machine uses.
func (m *Manager) dropAdopted(id string) {
	m.mu.Lock()
	kept := m.byID[id] != nil
	m.mu.Unlock()
	if !kept {
		_ = m.cache.Drop(id) // in use: the last machine's end comes here again
	}
}
