-- What machines may reach: internal/netpolicy as JSON; empty: nothing. A snapshot's is what its children get unless they ask for another.

ALTER TABLE snapshots ADD COLUMN network TEXT NOT NULL DEFAULT '';
ALTER TABLE sandboxes ADD COLUMN network TEXT NOT NULL DEFAULT '';
