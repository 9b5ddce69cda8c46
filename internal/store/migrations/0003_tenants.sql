-- Whose things are whose, and the keys that say who asks.

ALTER TABLE snapshots ADD COLUMN tenant  TEXT    NOT NULL DEFAULT 'default';
ALTER TABLE snapshots ADD COLUMN public  INTEGER NOT NULL DEFAULT 0 CHECK (public IN (0, 1)); -- others may fork it
ALTER TABLE snapshots ADD COLUMN secrets INTEGER NOT NULL DEFAULT 0 CHECK (secrets IN (0, 1)); -- secrets are in its memory

-- key_id: who started it, "" for none. secrets: the names of those it was given, a JSON list; their values are nowhere but in its guest.
ALTER TABLE sandboxes ADD COLUMN tenant  TEXT NOT NULL DEFAULT 'default';
ALTER TABLE sandboxes ADD COLUMN key_id  TEXT NOT NULL DEFAULT '';
ALTER TABLE sandboxes ADD COLUMN secrets TEXT NOT NULL DEFAULT '[]';

-- Names and tags are a tenant's own.
DROP INDEX sandboxes_name;
CREATE UNIQUE INDEX sandboxes_name ON sandboxes (tenant, name) WHERE name <> '' AND ended_ns = 0;
CREATE TABLE tags_of_tenants (
  tenant      TEXT    NOT NULL,
  tag         TEXT    NOT NULL,
  snapshot_id TEXT    NOT NULL REFERENCES snapshots (id) ON DELETE CASCADE,
  created_ns  INTEGER NOT NULL,
  PRIMARY KEY (tenant, tag)
) STRICT;
INSERT INTO tags_of_tenants SELECT 'default', tag, snapshot_id, created_ns FROM tags;
DROP TABLE tags;
ALTER TABLE tags_of_tenants RENAME TO tags;
CREATE INDEX tags_by_snapshot ON tags (snapshot_id);

-- An image without a row here is the default tenant's. The tenant '*' is everybody.
CREATE TABLE image_tenants (
  image_id TEXT NOT NULL,
  tenant   TEXT NOT NULL,
  PRIMARY KEY (image_id, tenant)
) STRICT, WITHOUT ROWID;

-- hash: SHA-256 of the whole key. A key that was revoked stays, so that records that name it can be understood.
CREATE TABLE keys (
  id            TEXT    NOT NULL PRIMARY KEY,
  name          TEXT    NOT NULL,
  tenant        TEXT    NOT NULL,
  scope         TEXT    NOT NULL CHECK (scope IN ('read', 'run', 'admin')),
  hash          BLOB    NOT NULL CHECK (length(hash) = 32),
  created_ns    INTEGER NOT NULL,
  expires_ns    INTEGER NOT NULL DEFAULT 0,
  revoked_ns    INTEGER NOT NULL DEFAULT 0,
  max_sandboxes INTEGER NOT NULL DEFAULT 0 CHECK (max_sandboxes >= 0),
  rate          REAL    NOT NULL DEFAULT 0 CHECK (rate >= 0), -- requests a second; 0: the daemon's own limit
  burst         INTEGER NOT NULL DEFAULT 0 CHECK (burst >= 0)
) STRICT, WITHOUT ROWID;
CREATE UNIQUE INDEX keys_name ON keys (tenant, name) WHERE revoked_ns = 0;
