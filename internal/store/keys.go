package store

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"time"
)

// Key is the record of an API key. Of the key itself only the digest is kept.
type Key struct {
	ID, Name, Tenant string
	Scope            string // read, run, admin
	Hash             [32]byte
	CreatedAt        time.Time
	ExpiresAt        time.Time // zero: never
	RevokedAt        time.Time // zero: it was not
	MaxSandboxes     int       // 0: no limit of its own
	Rate             float64   // requests a second; 0: no limit of its own
	Burst            int
}

// AddKey records a key. It wraps ErrExists when another one of the tenant that was not revoked has the name.
func (db *DB) AddKey(ctx context.Context, k Key) error {
	return db.tx(ctx, "record key "+k.Name, func(tx *sql.Tx) error {
		_, err := tx.ExecContext(ctx, `INSERT INTO keys (id, name, tenant, scope, hash, created_ns, expires_ns, max_sandboxes, rate, burst)
 VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)`, k.ID, k.Name, k.Tenant, k.Scope, k.Hash[:], nanos(k.CreatedAt), nanos(k.ExpiresAt), k.MaxSandboxes, k.Rate, k.Burst)
		return err
	})
}

// RevokeKey records that a key is good for nothing any more. It wraps ErrNotFound when there is none with the id that still was.
func (db *DB) RevokeKey(ctx context.Context, id string, at time.Time) error {
	return db.tx(ctx, "revoke key "+id, func(tx *sql.Tx) error {
		return one(ctx, tx, `UPDATE keys SET revoked_ns = ? WHERE id = ? AND revoked_ns = 0`, nanos(at), id)
	})
}

// RemoveKey forgets a key.
func (db *DB) RemoveKey(ctx context.Context, id string) error {
	return db.tx(ctx, "forget key "+id, func(tx *sql.Tx) error {
		_, err := tx.ExecContext(ctx, `DELETE FROM keys WHERE id = ?`, id)
		return err
	})
}

// Keys returns all keys, those that expired or were revoked too, oldest first.
func (db *DB) Keys(ctx context.Context) ([]Key, error) {
	rows, err := db.reader.QueryContext(ctx, `SELECT id, name, tenant, scope, hash, created_ns, expires_ns, revoked_ns, max_sandboxes, rate, burst
 FROM keys ORDER BY created_ns, id`)
	if err != nil {
		return nil, fmt.Errorf("list keys: %w", classify(err))
	}
	defer func() { _ = rows.Close() }()
	var all []Key
	for rows.Next() {
		var k Key
		var hash []byte
		var created, expires, revoked int64
		if err := rows.Scan(&k.ID, &k.Name, &k.Tenant, &k.Scope, &hash, &created, &expires, &revoked, &k.MaxSandboxes, &k.Rate, &k.Burst); err != nil {
			return nil, fmt.Errorf("list keys: %w", err)
		}
		if copy(k.Hash[:], hash) != len(k.Hash) {
			return nil, fmt.Errorf("list keys: the digest of key %s is damaged", k.ID)
		}
		k.CreatedAt, k.ExpiresAt, k.RevokedAt = fromNanos(created), fromNanos(expires), fromNanos(revoked)
		all = append(all, k)
	}
	if err := rows.Err(); err != nil {
		return nil, fmt.Errorf("list keys: %w", err)
	}
	return all, nil
}

// Everybody stands for all tenants where an image is shared.
const Everybody = "*"

// ShareImage gives an image to a tenant, or to Everybody, besides those who have it. first is whose it is if nothing was recorded of it yet.
func (db *DB) ShareImage(ctx context.Context, id, tenant, first string) error {
	return db.tx(ctx, "share image "+id, func(tx *sql.Tx) error {
		var n int
		if err := tx.QueryRowContext(ctx, `SELECT count(*) FROM image_tenants WHERE image_id = ?`, id).Scan(&n); err != nil {
			return err
		}
		tenants := []string{tenant}
		if n == 0 && first != "" {
			tenants = append(tenants, first)
		}
		for _, t := range tenants {
			if _, err := tx.ExecContext(ctx, `INSERT OR IGNORE INTO image_tenants (image_id, tenant) VALUES (?, ?)`, id, t); err != nil {
				return err
			}
		}
		return nil
	})
}

// UnshareImage takes back what ShareImage gave. It is not an error when there is nothing to take.
func (db *DB) UnshareImage(ctx context.Context, id, tenant string) error {
	return db.tx(ctx, "unshare image "+id, func(tx *sql.Tx) error {
		_, err := tx.ExecContext(ctx, `DELETE FROM image_tenants WHERE image_id = ? AND tenant = ?`, id, tenant)
		return err
	})
}

// ForgetImage removes what is recorded of an image that is gone.
func (db *DB) ForgetImage(ctx context.Context, id string) error {
	return db.tx(ctx, "forget image "+id, func(tx *sql.Tx) error {
		_, err := tx.ExecContext(ctx, `DELETE FROM image_tenants WHERE image_id = ?`, id)
		return err
	})
}

// ImageTenants returns who has an image, by its id; an image that is missing has no record and is the default tenant's.
func (db *DB) ImageTenants(ctx context.Context) (map[string][]string, error) {
	rows, err := db.reader.QueryContext(ctx, `SELECT image_id, tenant FROM image_tenants ORDER BY image_id, tenant`)
	if err != nil {
		return nil, fmt.Errorf("list tenants of images: %w", classify(err))
	}
	defer func() { _ = rows.Close() }()
	all := map[string][]string{}
	for rows.Next() {
		var id, tenant string
		if err := rows.Scan(&id, &tenant); err != nil {
			return nil, fmt.Errorf("list tenants of images: %w", err)
		}
		all[id] = append(all[id], tenant)
	}
	return all, errors.Join(rows.Err())
}

// SetPublic records whether others than its tenant may fork a snapshot.
func (db *DB) SetPublic(ctx context.Context, id string, public bool) error {
	return db.tx(ctx, "share snapshot "+id, func(tx *sql.Tx) error {
		return one(ctx, tx, `UPDATE snapshots SET public = ? WHERE id = ?`, public, id)
	})
}
