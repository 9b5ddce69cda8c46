-- Why the data of a snapshot can't be used, once that was found out; empty: it was not.
ALTER TABLE snapshots ADD COLUMN damage TEXT NOT NULL DEFAULT '';
