package store

import (
	"context"
	"database/sql"
	"embed"
	"fmt"
	"io/fs"
)

//go:embed migrations/*.sql
var migrations embed.FS

// migrate applies the migrations that the database has not seen, each in its own transaction. The number of a migration is its place
// among the sorted file names, and is what PRAGMA user_version holds after it.
func migrate(ctx context.Context, pool *sql.DB) error {
	names, err := fs.Glob(migrations, "migrations/*.sql")
	if err != nil {
		return fmt.Errorf("list migrations: %w", err)
	}
	var version int
	if err := pool.QueryRowContext(ctx, "PRAGMA user_version").Scan(&version); err != nil {
		return fmt.Errorf("read schema version: %w", classify(err))
	}
	if version > len(names) {
		return fmt.Errorf("%w: its schema is version %d, this forkd knows %d; run the newer forkd, or move the file away to start afresh",
			ErrNewer, version, len(names))
	}
	for i := version; i < len(names); i++ {
		if err := apply(ctx, pool, names[i], i+1); err != nil {
			return fmt.Errorf("migration %s: %w", names[i], classify(err))
		}
	}
	return nil
}

func apply(ctx context.Context, pool *sql.DB, name string, version int) error {
	script, err := migrations.ReadFile(name)
	if err != nil {
		return err
	}
	tx, err := pool.BeginTx(ctx, nil)
	if err != nil {
		return err
	}
	defer func() { _ = tx.Rollback() }() // a no-op after Commit
	if _, err := tx.ExecContext(ctx, string(script)); err != nil {
		return err
	}
	if _, err := tx.ExecContext(ctx, fmt.Sprintf("PRAGMA user_version = %d", version)); err != nil {
		return err
	}
	return tx.Commit()
}
