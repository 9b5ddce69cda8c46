package pack

import "errors"

// Errors that callers tell apart with errors.Is. Besides these there are snapshot.ErrCorrupt (content that does not match its digest),
// snapshot.ErrDiskFull and snapshot.ErrExists (the same id with other content).
var (
	ErrInvalid   = errors.New("not a valid pack")
	ErrTooNew    = errors.New("pack has a newer format")
	ErrTooLarge  = errors.New("pack is too large")
	ErrUnsigned  = errors.New("pack is not signed")
	ErrSignature = errors.New("signature of the pack does not match")
	ErrUntrusted = errors.New("pack is signed by another key")
)
