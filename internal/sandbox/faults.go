package sandbox

import (
	"context"
	"errors"
	"fmt"
	"time"

	"golang.org/x/sys/unix"

	"github.com/forkd/forkd/internal/image"
	"github.com/forkd/forkd/internal/memory"
	"github.com/forkd/forkd/internal/snapshot"
	"github.com/forkd/forkd/internal/store"
	"github.com/forkd/forkd/internal/vmm"
)

// fault turns an error of a dependency into one for users: what was being done, and a code and a hint by what went wrong. An *Error that is
// in the chain already stays what it is.
func fault(err error, format string, args ...any) error {
	if err == nil {
		return nil
	}
	var known *Error
	if errors.As(err, &known) {
		return err
	}
	code, hint := classify(err)
	return newError(code, err, hint, format, args...)
}

func classify(err error) (Code, string) {
	switch {
	case errors.Is(err, snapshot.ErrCorrupt):
		return CodeSnapshotCorrupt, "delete the snapshot and make it anew; its recipe is in its manifest"
	case errors.Is(err, vmm.ErrIncompatible), errors.Is(err, snapshot.ErrTooNew):
		return CodeSnapshotIncompatible, ""
	case errors.Is(err, image.ErrNotFound):
		return CodeImageNotFound, "`forkd image ls` lists the images, `forkd image build` makes one"
	case errors.Is(err, vmm.ErrUnavailable):
		return CodeEngineUnavailable, "`forkd doctor` says what is missing"
	case errors.Is(err, vmm.ErrInvalidConfig):
		return CodeInvalidArgument, ""
	case errors.Is(err, snapshot.ErrDiskFull), errors.Is(err, store.ErrFull), errors.Is(err, unix.ENOSPC), errors.Is(err, unix.EDQUOT):
		return CodeDiskFull, "remove snapshots or images, or make the disk larger"
	case errors.Is(err, unix.ENOMEM):
		return CodeInsufficientMemory, "end sandboxes, or make their snapshot smaller"
	case errors.Is(err, memory.ErrInUse):
		return CodeSnapshotInUse, ""
	case errors.Is(err, context.DeadlineExceeded):
		return CodeTimeout, ""
	}
	return CodeInternal, ""
}

// retryLater is when a request that found no room is likely to find some.
const retryLater = 2 * time.Second

func queueFull(n int) error {
	return &Error{Code: CodeQueueFull, RetryAfter: retryLater,
		Message: fmt.Sprintf("%d forks are waiting for their turn, which is as many as may wait", n), Hint: "try again in a moment"}
}

func tooManyBranches(n int) error {
	return &Error{Code: CodeBranchCap, RetryAfter: retryLater,
		Message: fmt.Sprintf("%d branches are under way or waiting, which is as many as may be", n), Hint: "try again in a moment"}
}

func noMemory(tag string, each need, free int64) error {
	return &Error{Code: CodeInsufficientMemory, RetryAfter: retryLater,
		Message: fmt.Sprintf("no memory for another child of snapshot %s: it is expected to take %d MiB, %d MiB are left",
			tag, each.total()>>20, max(free, 0)>>20),
		Hint: "end sandboxes, shrink pools, or give the daemon a larger memory budget"}
}
