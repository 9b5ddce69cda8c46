package sandbox

import (
	"context"

	"github.com/forkd/forkd/internal/store"
)

// enlist takes a snapshot's tag, makes it visible as one that is being written, and records that. Of two who want a tag one fails at once.
func (m *Manager) enlist(ctx context.Context, f *frozen, poolSize int, undo *cleanup) error {
	m.mu.Lock()
	if f.tag != "" && m.frozen[f.key()] != nil {
		m.mu.Unlock()
		return newError(CodeSnapshotExists, nil, "delete it first, or choose another tag", "a snapshot with the tag %s exists", f.tag)
	}
	m.listLocked(f)
	m.mu.Unlock()
	undo.add(func() error {
		m.mu.Lock()
		defer m.mu.Unlock()
		m.unlistLocked(f)
		return nil
	})
	err := m.db.AddSnapshot(context.WithoutCancel(ctx), store.Snapshot{ID: f.id, Tag: f.tag, Status: store.SnapshotWriting, Image: f.image,
		CreatedAt: f.createdAt, PoolSize: poolSize, Owner: f.owner, Tenant: f.tenant, Secrets: f.secrets, Network: f.network})
	if err != nil {
		return err
	}
	undo.add(func() error { return m.db.RemoveSnapshot(context.Background(), f.id) })
	return nil
}
