package sandbox

import (
	"context"
	"errors"
	"fmt"
	"os"

	"github.com/forkd/forkd/internal/memory"
	"github.com/forkd/forkd/internal/snapshot"
)

// persisting is an instant on its way to disk.
type persisting struct {
	frozen  *frozen
	layer   memory.Layer
	image   *memory.Image // of the instant, with the layer on top
	base    *memory.Image // what the layer is the difference to
	device  *os.File
	full    bool // rest on no other snapshot
	gently  bool // the source goes on meanwhile
	staged  string
	publish string // failpoints
}

// persist writes an instant to disk and publishes it. undo gets what takes that back. What it rests on is the nearest snapshot below it
// that is kept: where there are others between, which are not, their pages are in the layer, too.
func (m *Manager) persist(ctx context.Context, p persisting, undo *cleanup) (snapshot.Manifest, error) {
	parent, release, err := m.rest(ctx, p)
	if err != nil {
		return snapshot.Manifest{}, err
	}
	defer release()
	staging, err := m.snapshots.Stage(p.frozen.id)
	if err != nil {
		return snapshot.Manifest{}, err
	}
	undo.add(staging.Abort)
	if p.gently {
		staging.Gently()
	}
	man := p.frozen.manifest
	if man.Parent, err = m.writeMemory(ctx, staging, p, parent); err != nil {
		return snapshot.Manifest{}, err
	}
	m.mu.Lock()
	p.frozen.parent = man.Parent
	m.mu.Unlock()
	if err := staging.WriteDevice(ctx, p.device); err != nil {
		return snapshot.Manifest{}, err
	}
	if err := m.hit(ctx, p.staged); err != nil {
		return snapshot.Manifest{}, err
	}
	if man, err = staging.Publish(ctx, man); err != nil {
		return snapshot.Manifest{}, err
	}
	undo.add(func() error { return m.snapshots.Remove(man.ID) })
	return man, m.hit(ctx, p.publish)
}

// rest picks the snapshot that an instant will rest on, nil for none, and keeps it from being deleted until release. If what it was branched
// from is being written, it waits for that.
func (m *Manager) rest(ctx context.Context, p persisting) (_ *frozen, release func(), err error) {
	if p.full {
		return nil, func() {}, nil
	}
	for f := p.frozen.under; f != nil && f.live != nil; f = f.under {
		m.mu.Lock()
		kept := f.kept
		m.mu.Unlock()
		if !kept {
			continue
		}
		select {
		case <-f.live.written:
		case <-ctx.Done():
			return nil, nil, context.Cause(ctx)
		}
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	a := anchorLocked(p.frozen.under)
	if a == nil {
		return nil, func() {}, nil
	}
	p.frozen.parent = a.id
	a.forks++
	return a, func() { m.unuse(a) }, nil
}

// writeMemory writes what the instant adds to the snapshot that it rests on and returns that one's id; or all of it, and "".
func (m *Manager) writeMemory(ctx context.Context, staging *snapshot.Staging, p persisting, parent *frozen) (string, error) {
	if parent == nil {
		return "", staging.WriteImage(ctx, p.image)
	}
	chain, err := m.snapshots.Chain(parent.id)
	if err != nil {
		return "", fmt.Errorf("what it rests on: %w", err)
	}
	ids := make([]string, len(chain))
	for i, man := range chain {
		ids[i] = man.ID
	}
	between, known := above(p.base, ids)
	switch {
	case !known:
		m.log.Warn("a snapshot is stored whole: its memory does not tell what it rests on", "id", p.frozen.id, "parent", parent.id)
		return "", staging.WriteImage(ctx, p.image)
	case len(between) == 0:
		return parent.id, staging.WriteMemory(ctx, p.layer.File, orNone(p.layer.Extents))
	}
	extents := memory.Union(between, p.layer.Extents)
	merged, err := copyOf(ctx, p.frozen.id, p.image, extents)
	if err != nil {
		return "", fmt.Errorf("merge layers: %w", err)
	}
	return parent.id, errors.Join(staging.WriteMemory(ctx, merged, orNone(extents)), merged.Close())
}

// orNone makes no extents be none, not all.
func orNone(extents []memory.Extent) []memory.Extent {
	if extents == nil {
		return []memory.Extent{}
	}
	return extents
}
