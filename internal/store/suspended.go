package store

import (
	"context"
	"database/sql"
	"fmt"
	"time"
)

// MarkSuspended records that a sandbox is suspended to a snapshot, that the snapshot is published, and that what the sandbox was suspended
// to before is going: all at once, durably. Other than the rest of a sandbox's record it survives a power failure, as the snapshot does.
func (db *DB) MarkSuspended(ctx context.Context, id, stateID string, at time.Time, left time.Duration) error {
	return db.tx(ctx, "record suspension of sandbox "+id, func(tx *sql.Tx) error {
		if err := one(ctx, tx, `UPDATE snapshots SET status = 'ready' WHERE id = ? AND owner = ?`, stateID, id); err != nil {
			return fmt.Errorf("snapshot %s: %w", stateID, err)
		}
		if _, err := tx.ExecContext(ctx, `UPDATE snapshots SET status = 'deleting' WHERE owner = ? AND id <> ?`, id, stateID); err != nil {
			return err
		}
		return one(ctx, tx, `UPDATE sandboxes SET state = 'suspended', state_id = ?, suspended_ns = ?, left_ns = ?, deadline_ns = 0,
 process = '{}' WHERE id = ?`, stateID, nanos(at), left.Nanoseconds(), id)
	})
}

// SetLeft records how much time a suspended sandbox has left; 0 for no deadline.
func (db *DB) SetLeft(ctx context.Context, id string, left time.Duration) error {
	return db.write(ctx, "record time left of sandbox "+id, `UPDATE sandboxes SET left_ns = ? WHERE id = ?`, left.Nanoseconds(), id)
}

// CountBranch adds one to the branches of a sandbox.
func (db *DB) CountBranch(ctx context.Context, id string) error {
	return db.write(ctx, "count a branch of sandbox "+id, `UPDATE sandboxes SET branch_count = branch_count + 1 WHERE id = ?`, id)
}

// EndedByName returns the sandbox of a tenant with a name that ended last. It wraps ErrNotFound when there is none.
func (db *DB) EndedByName(ctx context.Context, tenant, name string) (Sandbox, error) {
	all, err := db.sandboxes(ctx, selectSandbox+` WHERE tenant = ? AND name = ? AND ended_ns > 0 ORDER BY ended_ns DESC LIMIT 1`, tenant, name)
	if err != nil {
		return Sandbox{}, err
	}
	if len(all) == 0 {
		return Sandbox{}, fmt.Errorf("sandbox named %s: %w", name, ErrNotFound)
	}
	return all[0], nil
}
