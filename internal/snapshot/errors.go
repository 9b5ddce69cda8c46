package snapshot

import (
	"errors"
	"fmt"
	"io/fs"

	"golang.org/x/sys/unix"
)

// Errors that callers tell apart with errors.Is.
var (
	ErrNotFound = errors.New("snapshot not found")
	ErrExists   = errors.New("snapshot exists already")
	ErrCorrupt  = errors.New("snapshot is corrupt")
	ErrDiskFull = errors.New("no space left for the snapshot")
	ErrInvalid  = errors.New("invalid snapshot")
	ErrFinished = errors.New("snapshot was published or aborted already")
	ErrTooNew   = errors.New("snapshot has a newer format")
)

// CorruptError says what is wrong with a snapshot on disk, and where. It is ErrCorrupt.
type CorruptError struct {
	Snapshot string
	File     string // in the snapshot's directory; empty: the chain as a whole
	Offset   int64  // in the file; -1: the file as a whole
	Reason   string
	Expected string // may be empty
	Actual   string
	Err      error // what was found out on the way; may be nil
}

func (e *CorruptError) Error() string {
	msg := fmt.Sprintf("snapshot %s is corrupt: ", e.Snapshot)
	if e.File != "" {
		msg += "file " + e.File
		if e.Offset >= 0 {
			msg += fmt.Sprintf(" at offset %d", e.Offset)
		}
		msg += ": "
	}
	msg += e.Reason
	if e.Expected != "" || e.Actual != "" {
		msg += fmt.Sprintf(" (expected %s, actual %s)", e.Expected, e.Actual)
	}
	if e.Err != nil {
		msg += ": " + e.Err.Error()
	}
	return msg
}

// Unwrap makes the error an ErrCorrupt, and whatever caused it.
func (e *CorruptError) Unwrap() []error {
	if e.Err == nil {
		return []error{ErrCorrupt}
	}
	return []error{ErrCorrupt, e.Err}
}

// diskError turns a full disk into ErrDiskFull, whatever operation ran into it.
func diskError(err error) error {
	if err == nil || errors.Is(err, ErrDiskFull) {
		return err
	}
	if errors.Is(err, unix.ENOSPC) || errors.Is(err, unix.EDQUOT) {
		return fmt.Errorf("%w: free some or remove snapshots: %w", ErrDiskFull, err)
	}
	return err
}

func isNotExist(err error) bool { return errors.Is(err, fs.ErrNotExist) }
