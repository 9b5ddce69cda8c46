-- What a sandbox may take of the host, as internal/limits has it.
ALTER TABLE sandboxes ADD COLUMN limits TEXT NOT NULL DEFAULT '{}';
