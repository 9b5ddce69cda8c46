-- Times are nanoseconds since the Unix epoch, 0 for none. Maps and processes are JSON.

CREATE TABLE snapshots (
  id           TEXT    NOT NULL PRIMARY KEY,
  status       TEXT    NOT NULL CHECK (status IN ('writing', 'ready', 'deleting')),
  image        TEXT    NOT NULL,
  created_ns   INTEGER NOT NULL,
  boot_warm_ns INTEGER NOT NULL DEFAULT 0,
  pool_size    INTEGER NOT NULL DEFAULT 0 CHECK (pool_size >= 0)
) STRICT;

CREATE TABLE tags (
  tag         TEXT    NOT NULL PRIMARY KEY,
  snapshot_id TEXT    NOT NULL REFERENCES snapshots (id) ON DELETE CASCADE,
  created_ns  INTEGER NOT NULL
) STRICT;
CREATE INDEX tags_by_snapshot ON tags (snapshot_id);

-- A sandbox names its snapshot without a foreign key: the record of an ended sandbox may outlive its snapshot.
CREATE TABLE sandboxes (
  id               TEXT    NOT NULL PRIMARY KEY,
  snapshot_id      TEXT    NOT NULL,
  snapshot_tag     TEXT    NOT NULL,
  state            TEXT    NOT NULL CHECK (state IN ('starting', 'running', 'suspended', 'stopped', 'failed')),
  created_ns       INTEGER NOT NULL,
  deadline_ns      INTEGER NOT NULL DEFAULT 0,
  ended_ns         INTEGER NOT NULL DEFAULT 0,
  ready_ns         INTEGER NOT NULL DEFAULT 0,
  memory_limit_mib INTEGER NOT NULL DEFAULT 0,
  branch_count     INTEGER NOT NULL DEFAULT 0,
  path             TEXT    NOT NULL DEFAULT '',
  guest_addr       TEXT    NOT NULL DEFAULT '',
  netns            TEXT    NOT NULL DEFAULT '',
  reason           TEXT    NOT NULL DEFAULT '',
  env              TEXT    NOT NULL DEFAULT '{}',
  metadata         TEXT    NOT NULL DEFAULT '{}',
  process          TEXT    NOT NULL DEFAULT '{}'
) STRICT, WITHOUT ROWID;
-- Partial, so that starting a sandbox touches one tree only.
CREATE INDEX sandboxes_ended ON sandboxes (ended_ns) WHERE ended_ns > 0;
