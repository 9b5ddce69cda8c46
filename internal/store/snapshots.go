package store

import (
	"context"
	"database/sql"
	"fmt"
	"time"
)

// SnapshotStatus is where the record of a snapshot is in its life.
type SnapshotStatus string

// Statuses.
const (
	SnapshotWriting  SnapshotStatus = "writing"  // its directory is not published, or just so
	SnapshotReady    SnapshotStatus = "ready"    // its directory is published
	SnapshotDeleting SnapshotStatus = "deleting" // its directory is going or gone
)

// Snapshot is the record of a snapshot and its tag.
type Snapshot struct {
	ID        string
	Tag       string // "" when it has none
	Status    SnapshotStatus
	Image     string // as it was asked for
	CreatedAt time.Time
	BootWarm  time.Duration // boot, readiness and warm-up of the parent
	PoolSize  int
}

// AddSnapshot records that s is about to be written and takes its tag. It wraps ErrExists when the tag is taken.
func (db *DB) AddSnapshot(ctx context.Context, s Snapshot) error {
	return db.tx(ctx, "record snapshot "+s.Tag, func(tx *sql.Tx) error {
		_, err := tx.ExecContext(ctx,
			`INSERT INTO snapshots (id, status, image, created_ns, boot_warm_ns, pool_size) VALUES (?, ?, ?, ?, ?, ?)`,
			s.ID, s.Status, s.Image, nanos(s.CreatedAt), s.BootWarm.Nanoseconds(), s.PoolSize)
		if err != nil {
			return err
		}
		_, err = tx.ExecContext(ctx, `INSERT INTO tags (tag, snapshot_id, created_ns) VALUES (?, ?, ?)`,
			s.Tag, s.ID, nanos(s.CreatedAt))
		return err
	})
}

// MarkSnapshotReady records that the snapshot is published.
func (db *DB) MarkSnapshotReady(ctx context.Context, id string, bootWarm time.Duration) error {
	return db.tx(ctx, "record snapshot "+id, func(tx *sql.Tx) error {
		return one(ctx, tx, `UPDATE snapshots SET status = 'ready', boot_warm_ns = ? WHERE id = ?`, bootWarm.Nanoseconds(), id)
	})
}

// MarkSnapshotsDeleting records that the snapshots are about to be removed: all of them, or on an error none.
func (db *DB) MarkSnapshotsDeleting(ctx context.Context, ids ...string) error {
	return db.tx(ctx, "record removal of snapshots", func(tx *sql.Tx) error {
		for _, id := range ids {
			if err := one(ctx, tx, `UPDATE snapshots SET status = 'deleting', pool_size = 0 WHERE id = ?`, id); err != nil {
				return fmt.Errorf("snapshot %s: %w", id, err)
			}
		}
		return nil
	})
}

// RemoveSnapshot removes the record and its tags. It is not an error when there is none.
func (db *DB) RemoveSnapshot(ctx context.Context, id string) error {
	return db.tx(ctx, "remove record of snapshot "+id, func(tx *sql.Tx) error {
		_, err := tx.ExecContext(ctx, `DELETE FROM snapshots WHERE id = ?`, id)
		return err
	})
}

// SetPoolSize records how many children the snapshot's pool is to hold.
func (db *DB) SetPoolSize(ctx context.Context, id string, size int) error {
	return db.tx(ctx, "record pool size of snapshot "+id, func(tx *sql.Tx) error {
		return one(ctx, tx, `UPDATE snapshots SET pool_size = ? WHERE id = ?`, size, id)
	})
}

// Snapshots returns all records, by tag.
func (db *DB) Snapshots(ctx context.Context) ([]Snapshot, error) {
	rows, err := db.reader.QueryContext(ctx,
		`SELECT s.id, coalesce(t.tag, ''), s.status, s.image, s.created_ns, s.boot_warm_ns, s.pool_size
		 FROM snapshots s LEFT JOIN tags t ON t.snapshot_id = s.id ORDER BY t.tag, s.id`)
	if err != nil {
		return nil, fmt.Errorf("list snapshots: %w", classify(err))
	}
	defer func() { _ = rows.Close() }()
	var all []Snapshot
	for rows.Next() {
		var s Snapshot
		var created, bootWarm int64
		if err := rows.Scan(&s.ID, &s.Tag, &s.Status, &s.Image, &created, &bootWarm, &s.PoolSize); err != nil {
			return nil, fmt.Errorf("list snapshots: %w", err)
		}
		s.CreatedAt, s.BootWarm = fromNanos(created), time.Duration(bootWarm)
		all = append(all, s)
	}
	if err := rows.Err(); err != nil {
		return nil, fmt.Errorf("list snapshots: %w", err)
	}
	return all, nil
}
