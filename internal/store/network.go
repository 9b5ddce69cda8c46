package store

import (
	"context"
	"database/sql"
	"encoding/json"

	"github.com/forkd/forkd/internal/netpolicy"
)

// SetNetwork records what a sandbox may reach, durably: it is not to reach more after a power failure.
func (db *DB) SetNetwork(ctx context.Context, id string, p netpolicy.Policy) error {
	text, err := encodePolicy(p)
	if err != nil {
		return err
	}
	return db.tx(ctx, "record network policy of sandbox "+id, func(tx *sql.Tx) error {
		return one(ctx, tx, `UPDATE sandboxes SET network = ? WHERE id = ?`, text, id)
	})
}

func encodePolicy(p netpolicy.Policy) (string, error) {
	if p.IsNone() && p.BandwidthMbit == 0 {
		return "", nil
	}
	b, err := json.Marshal(p)
	return string(b), err
}

func decodePolicy(text string) (p netpolicy.Policy, err error) {
	if text == "" {
		return p, nil
	}
	return p, json.Unmarshal([]byte(text), &p)
}
