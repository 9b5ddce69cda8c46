package store

import (
	"context"
	"database/sql"
	"fmt"
	"time"

	"github.com/forkd/forkd/internal/netpolicy"
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
	Tenant    string // whose it is; tags are unique among those of one tenant
	Public    bool   // others may fork it
	Secrets   bool   // secrets that a sandbox was given are in its memory
	Status    SnapshotStatus
	Image     string // as it was asked for
	CreatedAt time.Time
	BootWarm  time.Duration // boot, readiness and warm-up of the parent
	PoolSize  int
	Owner     string // the sandbox whose suspended state it is, or ""
	Network   netpolicy.Policy
	Damage    string // why its data can't be used, or ""
	Measured
}

// Measured is what making a snapshot of a running sandbox took.
type Measured struct {
	Warning      string        // why it was not made the way that was asked for
	Pause, Diff  time.Duration // the source stood still; from the request to the captured difference
	DiffPhysical int64         // bytes of the pages that differ, without those of zeros
	DiffLogical  int64         // bytes of all pages that differ
}

// AddSnapshot records that s is about to be written and takes its tag, if it has one. It wraps ErrExists when the tag is taken.
func (db *DB) AddSnapshot(ctx context.Context, s Snapshot) error {
	return db.AddSnapshots(ctx, s)
}

// AddSnapshots records several at once: all of them, or on an error none.
func (db *DB) AddSnapshots(ctx context.Context, all ...Snapshot) error {
	return db.tx(ctx, "record snapshot "+all[len(all)-1].name(), func(tx *sql.Tx) error {
		for _, s := range all {
			if err := addSnapshot(ctx, tx, s); err != nil {
				return err
			}
		}
		return nil
	})
}

func (s Snapshot) name() string {
	if s.Tag == "" {
		return s.ID
	}
	return s.Tag
}

func addSnapshot(ctx context.Context, tx *sql.Tx, s Snapshot) error {
	network, err := encodePolicy(s.Network)
	if err != nil {
		return err
	}
	_, err = tx.ExecContext(ctx,
		`INSERT INTO snapshots (id, status, image, created_ns, boot_warm_ns, pool_size, owner, tenant, public, secrets, network)
 VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)`,
		s.ID, s.Status, s.Image, nanos(s.CreatedAt), s.BootWarm.Nanoseconds(), s.PoolSize, s.Owner, s.Tenant, s.Public, s.Secrets, network)
	if err != nil || s.Tag == "" {
		return err
	}
	return addTag(ctx, tx, s.Tenant, s.Tag, s.ID, s.CreatedAt)
}

func addTag(ctx context.Context, tx *sql.Tx, tenant, tag, id string, at time.Time) error {
	_, err := tx.ExecContext(ctx, `INSERT INTO tags (tenant, tag, snapshot_id, created_ns) VALUES (?, ?, ?, ?)`, tenant, tag, id, nanos(at))
	return err
}

// AddTag gives a snapshot of the tenant a tag. It wraps ErrExists when the tag is taken.
func (db *DB) AddTag(ctx context.Context, tenant, tag, id string, at time.Time) error {
	return db.tx(ctx, "record tag "+tag, func(tx *sql.Tx) error { return addTag(ctx, tx, tenant, tag, id, at) })
}

// MarkSnapshotReady records that the snapshot is published.
func (db *DB) MarkSnapshotReady(ctx context.Context, id string, bootWarm time.Duration) error {
	return db.tx(ctx, "record snapshot "+id, func(tx *sql.Tx) error {
		return one(ctx, tx, `UPDATE snapshots SET status = 'ready', boot_warm_ns = ? WHERE id = ?`, bootWarm.Nanoseconds(), id)
	})
}

// SetMeasured records what making the snapshot took.
func (db *DB) SetMeasured(ctx context.Context, id string, m Measured) error {
	return db.write(ctx, "record figures of snapshot "+id,
		`UPDATE snapshots SET warning = ?, pause_ns = ?, diff_ns = ?, diff_physical = ?, diff_logical = ? WHERE id = ?`,
		m.Warning, m.Pause.Nanoseconds(), m.Diff.Nanoseconds(), m.DiffPhysical, m.DiffLogical, id)
}

// SetDamage records why the data of a snapshot can't be used; "": it can.
func (db *DB) SetDamage(ctx context.Context, id, why string) error {
	return db.write(ctx, "record damage of snapshot "+id, `UPDATE snapshots SET damage = ? WHERE id = ?`, why, id)
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
		`SELECT s.id, coalesce(t.tag, ''), s.status, s.image, s.created_ns, s.boot_warm_ns, s.pool_size,
		  s.owner, s.warning, s.pause_ns, s.diff_ns, s.diff_physical, s.diff_logical, s.tenant, s.public, s.secrets, s.network, s.damage
		 FROM snapshots s LEFT JOIN tags t ON t.snapshot_id = s.id ORDER BY t.tag, s.id`)
	if err != nil {
		return nil, fmt.Errorf("list snapshots: %w", classify(err))
	}
	defer func() { _ = rows.Close() }()
	var all []Snapshot
	for rows.Next() {
		var s Snapshot
		var created, bootWarm, pause, diff int64
		var network string
		if err := rows.Scan(&s.ID, &s.Tag, &s.Status, &s.Image, &created, &bootWarm, &s.PoolSize,
			&s.Owner, &s.Warning, &pause, &diff, &s.DiffPhysical, &s.DiffLogical,
			&s.Tenant, &s.Public, &s.Secrets, &network, &s.Damage); err != nil {
			return nil, fmt.Errorf("list snapshots: %w", err)
		}
		if s.Network, err = decodePolicy(network); err != nil {
			return nil, fmt.Errorf("snapshot %s: network: %w", s.ID, err)
		}
		s.CreatedAt, s.BootWarm = fromNanos(created), time.Duration(bootWarm)
		s.Pause, s.Diff = time.Duration(pause), time.Duration(diff)
		all = append(all, s)
	}
	if err := rows.Err(); err != nil {
		return nil, fmt.Errorf("list snapshots: %w", err)
	}
	return all, nil
}
