-- The snapshot graph: branches, suspended sandboxes, names.

-- owner: the sandbox whose suspended state the snapshot is; such a snapshot has no tag and nobody else uses it.
ALTER TABLE snapshots ADD COLUMN owner          TEXT    NOT NULL DEFAULT '';
ALTER TABLE snapshots ADD COLUMN warning        TEXT    NOT NULL DEFAULT '';
ALTER TABLE snapshots ADD COLUMN pause_ns       INTEGER NOT NULL DEFAULT 0;
ALTER TABLE snapshots ADD COLUMN diff_ns        INTEGER NOT NULL DEFAULT 0;
ALTER TABLE snapshots ADD COLUMN diff_physical  INTEGER NOT NULL DEFAULT 0; -- bytes
ALTER TABLE snapshots ADD COLUMN diff_logical   INTEGER NOT NULL DEFAULT 0; -- bytes

-- anchor_id: the nearest snapshot below the sandbox that is kept on disk; its own one, unless it was forked from a running sandbox.
-- state_id: what it was last suspended to. left_ns: the rest of its time while it is suspended.
ALTER TABLE sandboxes ADD COLUMN name            TEXT    NOT NULL DEFAULT '';
ALTER TABLE sandboxes ADD COLUMN anchor_id       TEXT    NOT NULL DEFAULT '';
ALTER TABLE sandboxes ADD COLUMN state_id        TEXT    NOT NULL DEFAULT '';
ALTER TABLE sandboxes ADD COLUMN auto_suspend_ns INTEGER NOT NULL DEFAULT 0;
ALTER TABLE sandboxes ADD COLUMN auto_resume     INTEGER NOT NULL DEFAULT 0 CHECK (auto_resume IN (0, 1));
ALTER TABLE sandboxes ADD COLUMN suspended_ns    INTEGER NOT NULL DEFAULT 0;
ALTER TABLE sandboxes ADD COLUMN left_ns         INTEGER NOT NULL DEFAULT 0;
-- A name is free again when its sandbox has ended.
CREATE UNIQUE INDEX sandboxes_name ON sandboxes (name) WHERE name <> '' AND ended_ns = 0;
