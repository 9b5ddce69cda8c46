package store

import (
	"context"
	"database/sql"
	"encoding/json"
	"fmt"
	"time"

	"github.com/forkd/forkd/internal/limits"
	"github.com/forkd/forkd/internal/netpolicy"
	"github.com/forkd/forkd/internal/vmm"
)

// Sandbox is the record of a sandbox.
type Sandbox struct {
	ID             string
	SnapshotID     string
	SnapshotTag    string
	State          string // starting, running, suspended, stopped, failed
	CreatedAt      time.Time
	Deadline       time.Time // zero: none
	EndedAt        time.Time // zero: lives
	ReadyIn        time.Duration
	MemoryLimitMiB int
	Limits         limits.Limits
	BranchCount    int
	Path           string
	GuestAddr      string
	Netns          string
	Reason         string
	Env, Metadata  map[string]string
	Process        vmm.Process // its zero value until the monitor is known, and while it is suspended
	Name           string      // unique among those of its tenant that have not ended; "" for none
	AnchorID       string      // the nearest snapshot below it that is kept on disk
	StateID        string      // the snapshot that it was last suspended to
	AutoSuspend    time.Duration
	AutoResume     bool
	SuspendedAt    time.Time     // zero unless it is suspended
	Left           time.Duration // until its deadline, while it is suspended; 0: it has none
	Tenant         string        // whose it is
	KeyID          string        // of the key it was started with; "" for none
	Secrets        []string      // names of the secrets it was given
	Network        netpolicy.Policy
}

const (
	insertSandbox = `INSERT INTO sandboxes (id, snapshot_id, snapshot_tag, state, created_ns, deadline_ns, ended_ns, ready_ns,
 memory_limit_mib, branch_count, path, guest_addr, netns, reason, env, metadata, process,
 name, anchor_id, auto_suspend_ns, auto_resume, tenant, key_id, secrets, limits, network)
 VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)`
	markRunning = `UPDATE sandboxes SET state = 'running', process = ?, ready_ns = ?, deadline_ns = ?, suspended_ns = 0, left_ns = 0
 WHERE id = ?`
	selectSandbox = `SELECT id, snapshot_id, snapshot_tag, state, created_ns, deadline_ns, ended_ns, ready_ns,
 memory_limit_mib, branch_count, path, guest_addr, netns, reason, env, metadata, process,
 name, anchor_id, state_id, auto_suspend_ns, auto_resume, suspended_ns, left_ns, tenant, key_id, secrets, limits, network FROM sandboxes`
)

// AddSandbox records a sandbox before it is started. It wraps ErrExists when its name is taken.
func (db *DB) AddSandbox(ctx context.Context, s Sandbox) error {
	env, err := encodeMap(s.Env)
	if err != nil {
		return fmt.Errorf("record sandbox %s: env: %w", s.ID, err)
	}
	meta, err := encodeMap(s.Metadata)
	if err != nil {
		return fmt.Errorf("record sandbox %s: metadata: %w", s.ID, err)
	}
	proc, err := json.Marshal(s.Process)
	if err != nil {
		return fmt.Errorf("record sandbox %s: process: %w", s.ID, err)
	}
	bounds, err := json.Marshal(s.Limits)
	if err != nil {
		return fmt.Errorf("record sandbox %s: limits: %w", s.ID, err)
	}
	secrets := []byte("[]")
	if len(s.Secrets) > 0 {
		if secrets, err = json.Marshal(s.Secrets); err != nil {
			return fmt.Errorf("record sandbox %s: secrets: %w", s.ID, err)
		}
	}
	network, err := encodePolicy(s.Network)
	if err != nil {
		return fmt.Errorf("record sandbox %s: network: %w", s.ID, err)
	}
	db.mu.Lock()
	defer db.mu.Unlock()
	_, err = db.insert.ExecContext(ctx, s.ID, s.SnapshotID, s.SnapshotTag, s.State, nanos(s.CreatedAt), nanos(s.Deadline), nanos(s.EndedAt),
		s.ReadyIn.Nanoseconds(), s.MemoryLimitMiB, s.BranchCount, s.Path, s.GuestAddr, s.Netns, s.Reason, env, meta, string(proc),
		s.Name, s.AnchorID, s.AutoSuspend.Nanoseconds(), s.AutoResume,
		s.Tenant, s.KeyID, string(secrets), string(bounds), network)
	if err != nil {
		return fmt.Errorf("record sandbox %s: %w", s.ID, classify(err))
	}
	return nil
}

// MarkRunning records that the sandbox is ready, which monitor it is, and its deadline.
func (db *DB) MarkRunning(ctx context.Context, id string, p vmm.Process, readyIn time.Duration, deadline time.Time) error {
	proc, err := json.Marshal(p)
	if err != nil {
		return fmt.Errorf("record sandbox %s: process: %w", id, err)
	}
	db.mu.Lock()
	defer db.mu.Unlock()
	res, err := db.running.ExecContext(ctx, string(proc), readyIn.Nanoseconds(), nanos(deadline), id)
	if err == nil {
		err = changedOne(res)
	}
	if err != nil {
		return fmt.Errorf("record sandbox %s: %w", id, classify(err))
	}
	return nil
}

// SetDeadline records when the sandbox is to end; the zero time for never.
func (db *DB) SetDeadline(ctx context.Context, id string, deadline time.Time) error {
	return db.write(ctx, "record deadline of sandbox "+id, `UPDATE sandboxes SET deadline_ns = ? WHERE id = ?`, nanos(deadline), id)
}

// EndSandbox records that the sandbox has ended or is about to be, and why.
func (db *DB) EndSandbox(ctx context.Context, id, state, reason string, at time.Time) error {
	return db.write(ctx, "record end of sandbox "+id,
		`UPDATE sandboxes SET state = ?, reason = ?, ended_ns = ? WHERE id = ?`, state, reason, nanos(at), id)
}

// RemoveSandbox removes the record. It wraps ErrNotFound when there is none.
func (db *DB) RemoveSandbox(ctx context.Context, id string) error {
	return db.write(ctx, "remove record of sandbox "+id, `DELETE FROM sandboxes WHERE id = ?`, id)
}

// write runs one statement that must change a row, without waiting for the disk.
func (db *DB) write(ctx context.Context, what, query string, args ...any) error {
	db.mu.Lock()
	defer db.mu.Unlock()
	if err := one(ctx, db.fast, query, args...); err != nil {
		return fmt.Errorf("%s: %w", what, classify(err))
	}
	return nil
}

// ForgetEnded removes the records of sandboxes that ended before the given time, and the oldest of the ended beyond keep. It returns how many went.
func (db *DB) ForgetEnded(ctx context.Context, before time.Time, keep int) (int, error) {
	db.mu.Lock()
	defer db.mu.Unlock()
	res, err := db.fast.ExecContext(ctx, `DELETE FROM sandboxes WHERE ended_ns > 0 AND (ended_ns < ? OR id IN
 (SELECT id FROM sandboxes WHERE ended_ns > 0 ORDER BY ended_ns DESC LIMIT -1 OFFSET ?))`, nanos(before), keep)
	if err != nil {
		return 0, fmt.Errorf("forget ended sandboxes: %w", classify(err))
	}
	n, err := res.RowsAffected()
	return int(n), err
}

// Sandboxes returns all records, oldest first.
func (db *DB) Sandboxes(ctx context.Context) ([]Sandbox, error) {
	return db.sandboxes(ctx, selectSandbox+` ORDER BY created_ns, id`)
}

// EndedSandboxes returns the records of sandboxes that ended, newest end first.
func (db *DB) EndedSandboxes(ctx context.Context) ([]Sandbox, error) {
	return db.sandboxes(ctx, selectSandbox+` WHERE ended_ns > 0 ORDER BY ended_ns DESC, id`)
}

// Sandbox returns one record. It wraps ErrNotFound when there is none.
func (db *DB) Sandbox(ctx context.Context, id string) (Sandbox, error) {
	all, err := db.sandboxes(ctx, selectSandbox+` WHERE id = ?`, id)
	if err != nil {
		return Sandbox{}, err
	}
	if len(all) == 0 {
		return Sandbox{}, fmt.Errorf("sandbox %s: %w", id, ErrNotFound)
	}
	return all[0], nil
}

func (db *DB) sandboxes(ctx context.Context, query string, args ...any) ([]Sandbox, error) {
	rows, err := db.reader.QueryContext(ctx, query, args...)
	if err != nil {
		return nil, fmt.Errorf("read sandboxes: %w", classify(err))
	}
	defer func() { _ = rows.Close() }()
	var all []Sandbox
	for rows.Next() {
		s, err := scanSandbox(rows)
		if err != nil {
			return nil, fmt.Errorf("read sandboxes: %w", err)
		}
		all = append(all, s)
	}
	if err := rows.Err(); err != nil {
		return nil, fmt.Errorf("read sandboxes: %w", err)
	}
	return all, nil
}

func scanSandbox(rows *sql.Rows) (Sandbox, error) {
	var s Sandbox
	var created, deadline, ended, ready, suspend, suspended, left int64
	var env, meta, proc, secrets, bounds, network string
	err := rows.Scan(&s.ID, &s.SnapshotID, &s.SnapshotTag, &s.State, &created, &deadline, &ended, &ready,
		&s.MemoryLimitMiB, &s.BranchCount, &s.Path, &s.GuestAddr, &s.Netns, &s.Reason, &env, &meta, &proc,
		&s.Name, &s.AnchorID, &s.StateID, &suspend, &s.AutoResume, &suspended, &left,
		&s.Tenant, &s.KeyID, &secrets, &bounds, &network)
	if err != nil {
		return s, err
	}
	if s.Network, err = decodePolicy(network); err != nil {
		return s, fmt.Errorf("sandbox %s: network: %w", s.ID, err)
	}
	s.CreatedAt, s.Deadline, s.EndedAt, s.ReadyIn = fromNanos(created), fromNanos(deadline), fromNanos(ended), time.Duration(ready)
	s.AutoSuspend, s.SuspendedAt, s.Left = time.Duration(suspend), fromNanos(suspended), time.Duration(left)
	for _, f := range []struct {
		name, text string
		into       any
	}{{"env", env, &s.Env}, {"metadata", meta, &s.Metadata}, {"process", proc, &s.Process}, {"secrets", secrets, &s.Secrets}, {"limits", bounds, &s.Limits}} {
		if err := json.Unmarshal([]byte(f.text), f.into); err != nil {
			return s, fmt.Errorf("sandbox %s: %s: %w", s.ID, f.name, err)
		}
	}
	if len(s.Secrets) == 0 {
		s.Secrets = nil
	}
	return s, nil
}

func encodeMap(m map[string]string) (string, error) {
	if len(m) == 0 {
		return "{}", nil
	}
	b, err := json.Marshal(m)
	return string(b), err
}
