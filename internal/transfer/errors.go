package transfer

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"syscall"

	"github.com/forkd/forkd/internal/image"
	"github.com/forkd/forkd/internal/sandbox"
	"github.com/forkd/forkd/internal/snapshot"
	"github.com/forkd/forkd/internal/snapshot/pack"
)

// Codes of errors that only packs have.
const (
	CodeInvalidPack   sandbox.Code = "invalid_pack"
	CodeUntrustedPack sandbox.Code = "untrusted_pack"
)

// packFault says to a user why a pack was not made. The end of the request stays what it is.
func packFault(err error, format string, args ...any) error {
	if plain(err) {
		return err
	}
	out := &sandbox.Error{Code: sandbox.CodeInternal, Message: fmt.Sprintf(format, args...), Err: err}
	switch {
	case errors.Is(err, pack.ErrSignature):
		out.Code, out.Hint = sandbox.CodeInvalidArgument, "sign the contents that this daemon gives for this very snapshot"
	case errors.Is(err, snapshot.ErrCorrupt), errors.Is(err, image.ErrCorrupt):
		out.Code, out.Hint = sandbox.CodeSnapshotCorrupt, "delete the snapshot and make it anew; `forkd snapshot-verify` finds what is damaged"
	case errors.Is(err, snapshot.ErrNotFound):
		out.Code, out.Hint = sandbox.CodeSnapshotNotFound, "`forkd images` lists the snapshots"
	case errors.Is(err, fs.ErrNotExist):
		out.Code, out.Hint = sandbox.CodeImageNotFound, "`forkd image ls` lists the images"
	}
	return out
}

// unpackFault says to a user why a pack was not taken in.
func unpackFault(err error) error {
	var known *sandbox.Error
	if errors.As(err, &known) {
		return known // from handing it over: it has nothing to do with the pack
	}
	if plain(err) {
		return err
	}
	out := &sandbox.Error{Code: sandbox.CodeInternal, Message: "the pack can't be taken in", Err: err}
	switch {
	case errors.Is(err, pack.ErrUnsigned), errors.Is(err, pack.ErrSignature), errors.Is(err, pack.ErrUntrusted):
		out.Code, out.Hint = CodeUntrustedPack, "it was not unpacked: take it only from whom you trust, since what is in it will run"
	case errors.Is(err, snapshot.ErrDiskFull), errors.Is(err, syscall.ENOSPC), errors.Is(err, syscall.EDQUOT):
		out.Code, out.Hint = sandbox.CodeDiskFull, "make room: `forkd images` and `forkd image ls` show what takes it"
	case errors.Is(err, snapshot.ErrExists), errors.Is(err, fs.ErrExist):
		out.Code, out.Hint = sandbox.CodeSnapshotExists, "one of the two was tampered with: delete the one that is here, or leave the pack alone"
	case errors.Is(err, pack.ErrTooNew), errors.Is(err, snapshot.ErrTooNew):
		out.Code, out.Hint = sandbox.CodeSnapshotIncompatible, "unpack it with the forkd that packed it, or a newer one"
	case errors.Is(err, pack.ErrInvalid), errors.Is(err, pack.ErrTooLarge), errors.Is(err, snapshot.ErrCorrupt), errors.Is(err, snapshot.ErrInvalid),
		errors.Is(err, image.ErrInvalid), errors.Is(err, image.ErrCorrupt):
		out.Code, out.Hint = CodeInvalidPack, "copy or make the pack again"
	}
	return out
}

// plain reports whether an error is for others to explain: none, or the end of the request.
func plain(err error) bool {
	return err == nil || errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded)
}
