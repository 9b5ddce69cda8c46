// Package store keeps forkd's records in an embedded SQLite database: snapshots and their settings, tags, and sandboxes. It holds
// the only SQL of the project.
//
// It decides nothing: states are checked against their vocabulary, not against the moves between them; that is internal/sandbox.
// What a snapshot is made of lives in its manifest (internal/snapshot), not here.
//
// # Durability
//
// The database is in WAL mode and is written through two connections, one at a time. Snapshots and tags are written with
// synchronous=FULL: a committed change survives a power failure, as the published snapshot directory does. Sandboxes are written with
// synchronous=NORMAL, which saves an fsync on the path of every fork: a killed process loses nothing (committed pages are in
// the page cache), only a power failure may lose the newest rows, and the machines they describe are gone then too.
package store

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"net/url"
	"os"
	"path/filepath"
	"sync"
	"time"

	"modernc.org/sqlite"
	sqlite3 "modernc.org/sqlite/lib"
)

// Errors that callers tell apart with errors.Is.
var (
	ErrNotFound = errors.New("no such record")
	ErrExists   = errors.New("record exists")
	ErrFull     = errors.New("disk is full")
	ErrNewer    = errors.New("database was written by a newer forkd")
)

// busyTimeout bounds the wait for another process that holds the database, such as a backup or a person's sqlite3.
const busyTimeout = 5 * time.Second

// DB is an open database. Its methods may be called concurrently.
type DB struct {
	reader *sql.DB

	mu      sync.Mutex // one write at a time: SQLite's own lock waits by polling
	durable *sql.DB    // synchronous=FULL
	fast    *sql.DB    // synchronous=NORMAL
	insert  *sql.Stmt  // on fast: the statements on the path of a fork
	running *sql.Stmt
}

// Open opens the database at path, creates it when it is missing, and brings its schema up to date.
func Open(path string) (_ *DB, err error) {
	// The file holds environment values of sandboxes, which may be secrets; SQLite gives its WAL the same mode.
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, fmt.Errorf("open database: %w", err)
	}
	if err := f.Close(); err != nil {
		return nil, fmt.Errorf("open database: %w", err)
	}
	db := &DB{}
	defer func() {
		if err != nil {
			_ = db.Close()
		}
	}()
	if db.durable, err = connect(path, "FULL", 1); err != nil {
		return nil, err
	}
	if err := migrate(context.Background(), db.durable); err != nil {
		return nil, fmt.Errorf("database %s: %w", path, err)
	}
	if db.fast, err = connect(path, "NORMAL", 1); err != nil {
		return nil, err
	}
	if db.reader, err = connect(path, "NORMAL", 4); err != nil {
		return nil, err
	}
	if err := db.prepare(); err != nil {
		return nil, fmt.Errorf("database %s: %w", path, err)
	}
	return db, nil
}

func connect(path, synchronous string, conns int) (*sql.DB, error) {
	abs, err := filepath.Abs(path)
	if err != nil {
		return nil, fmt.Errorf("database path: %w", err)
	}
	q := url.Values{"_txlock": {"immediate"}, "_pragma": {
		fmt.Sprintf("busy_timeout(%d)", busyTimeout.Milliseconds()),
		"journal_mode(WAL)",
		"synchronous(" + synchronous + ")",
		"foreign_keys(1)",
	}}
	dsn := (&url.URL{Scheme: "file", Path: abs, RawQuery: q.Encode()}).String()
	pool, err := sql.Open("sqlite", dsn)
	if err != nil {
		return nil, fmt.Errorf("open database %s: %w", path, err)
	}
	pool.SetMaxOpenConns(conns)
	pool.SetMaxIdleConns(conns)
	if err := pool.Ping(); err != nil {
		_ = pool.Close()
		return nil, fmt.Errorf("open database %s: %w", path, classify(err))
	}
	return pool, nil
}

func (db *DB) prepare() (err error) {
	if db.insert, err = db.fast.Prepare(insertSandbox); err != nil {
		return fmt.Errorf("prepare: %w", err)
	}
	if db.running, err = db.fast.Prepare(markRunning); err != nil {
		return fmt.Errorf("prepare: %w", err)
	}
	return nil
}

// Close closes the database. What was committed stays.
func (db *DB) Close() error {
	var errs []error
	for _, s := range []*sql.Stmt{db.insert, db.running} {
		if s != nil {
			errs = append(errs, s.Close())
		}
	}
	// The reader goes first: the last connection to go folds the WAL into the database.
	for _, pool := range []*sql.DB{db.reader, db.fast, db.durable} {
		if pool != nil {
			errs = append(errs, pool.Close())
		}
	}
	return errors.Join(errs...)
}

// tx runs f in a durable transaction.
func (db *DB) tx(ctx context.Context, what string, f func(*sql.Tx) error) error {
	db.mu.Lock()
	defer db.mu.Unlock()
	tx, err := db.durable.BeginTx(ctx, nil)
	if err != nil {
		return fmt.Errorf("%s: %w", what, classify(err))
	}
	defer func() { _ = tx.Rollback() }() // a no-op after Commit
	if err := f(tx); err != nil {
		return fmt.Errorf("%s: %w", what, classify(err))
	}
	if err := tx.Commit(); err != nil {
		return fmt.Errorf("%s: %w", what, classify(err))
	}
	return nil
}

// execer is a connection pool or a transaction.
type execer interface {
	ExecContext(ctx context.Context, query string, args ...any) (sql.Result, error)
}

// one runs a statement that must change exactly one row.
func one(ctx context.Context, e execer, query string, args ...any) error {
	res, err := e.ExecContext(ctx, query, args...)
	if err != nil {
		return err
	}
	return changedOne(res)
}

func changedOne(res sql.Result) error {
	n, err := res.RowsAffected()
	if err != nil {
		return err
	}
	if n == 0 {
		return ErrNotFound
	}
	return nil
}

// classify adds the sentinel that callers look for to an error of the driver.
func classify(err error) error {
	if errors.Is(err, sql.ErrNoRows) {
		return ErrNotFound
	}
	var e *sqlite.Error
	if !errors.As(err, &e) {
		return err
	}
	switch e.Code() {
	case sqlite3.SQLITE_CONSTRAINT_PRIMARYKEY, sqlite3.SQLITE_CONSTRAINT_UNIQUE:
		return fmt.Errorf("%w: %w", ErrExists, err)
	case sqlite3.SQLITE_FULL:
		return fmt.Errorf("%w: %w", ErrFull, err)
	}
	return err
}

// nanos is how times are stored: 0 stands for the zero time.
func nanos(t time.Time) int64 {
	if t.IsZero() {
		return 0
	}
	return t.UnixNano()
}

func fromNanos(n int64) time.Time {
	if n == 0 {
		return time.Time{}
	}
	return time.Unix(0, n)
}
