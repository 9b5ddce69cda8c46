package sandbox

import (
	"context"
	"errors"
	"time"
)

// Compact stores a snapshot anew, under another tag, so that it rests on no other. The old one stays.
func (m *Manager) Compact(ctx context.Context, from, to string) (Snapshot, error) {
	if err := checkTag(from); err != nil {
		return Snapshot{}, err
	}
	if err := checkTag(to); err != nil {
		return Snapshot{}, err
	}
	ctx, done, err := m.enter(ctx)
	if err != nil {
		return Snapshot{}, err
	}
	defer done()
	f, release, err := m.use(ctx, from)
	if err != nil {
		return Snapshot{}, err
	}
	defer release()
	if err := m.compact(ctx, f, to); err != nil {
		m.noteCorrupt(f, err)
		m.emit(Event{Kind: EventSnapshotFailed, Tenant: callerOf(ctx).Tenant, Tag: to, Reason: err.Error()})
		return Snapshot{}, fault(err, "compact snapshot %s", from)
	}
	m.emit(Event{Kind: EventSnapshotReady, Tenant: callerOf(ctx).Tenant, Tag: to})
	return m.Snapshot(ctx, to)
}

func (m *Manager) compact(ctx context.Context, from *frozen, to string) (err error) {
	undo := &cleanup{}
	defer func() {
		if err != nil {
			m.warn(undo.run(), "unwind a compaction", to)
		}
	}()
	f := &frozen{id: newID("sn"), tag: to, tenant: callerOf(ctx).Tenant, secrets: from.secrets, image: from.image, imageID: from.imageID, createdAt: time.Now(), status: StatusWriting,
		network: from.inherited(callerOf(ctx))}
	if err := m.enlist(ctx, f, 0, undo); err != nil {
		return err
	}
	if err := m.hit(ctx, pointCompactRecorded); err != nil {
		return err
	}
	man, err := m.snapshots.Compact(ctx, from.id, f.id)
	if err != nil {
		return err
	}
	undo.add(func() error { return m.snapshots.Remove(f.id) })
	if err := m.hit(ctx, pointCompactPublished); err != nil {
		return err
	}
	m.mu.Lock()
	bootWarm := from.bootWarm
	m.mu.Unlock()
	err = m.db.MarkSnapshotReady(context.WithoutCancel(ctx), f.id, bootWarm)
	if err = errors.Join(err, m.hit(ctx, pointCompactReady)); err != nil {
		return err
	}
	m.admitSnapshot(f, man, bootWarm, 0)
	return nil
}
