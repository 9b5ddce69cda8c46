package sandbox

import (
	"errors"
	"fmt"
	"time"
)

// Code is a stable, machine-readable name of what went wrong. internal/server maps codes to HTTP statuses.
type Code string

// Codes.
const (
	CodeInvalidArgument      Code = "invalid_argument"
	CodeInvalidTag           Code = "invalid_tag"
	CodeSnapshotNotFound     Code = "snapshot_not_found"
	CodeSandboxNotFound      Code = "sandbox_not_found"
	CodeImageNotFound        Code = "image_not_found"
	CodeSnapshotExists       Code = "snapshot_exists"
	CodeImageExists          Code = "image_exists"
	CodeSandboxExists        Code = "sandbox_exists" // a sandbox with that name
	CodeSnapshotInUse        Code = "snapshot_in_use"
	CodeImageInUse           Code = "image_in_use"
	CodeInvalidState         Code = "invalid_state"
	CodeNoInterpreter        Code = "no_interpreter"
	CodeWarmUpFailed         Code = "warm_up_failed"
	CodeSnapshotCorrupt      Code = "snapshot_corrupt"
	CodeSnapshotIncompatible Code = "snapshot_incompatible"
	CodeInsufficientMemory   Code = "insufficient_memory"
	CodeQueueFull            Code = "queue_full"
	CodeBranchCap            Code = "too_many_branches"
	CodeShuttingDown         Code = "shutting_down"
	CodeDiskFull             Code = "disk_full"
	CodeTimeout              Code = "timeout"
	CodeIdentityFailed       Code = "identity_failed"
	CodeGuestUnreachable     Code = "guest_unreachable"
	CodeSandboxGone          Code = "sandbox_gone"
	CodeEngineUnavailable    Code = "engine_unavailable"
	CodeNetworkUnavailable   Code = "network_unavailable"
	CodeHoldsSecrets         Code = "holds_secrets"      // a copy of its memory would have them
	CodeForbidden            Code = "forbidden"          // somebody else's, who shares it for use only
	CodeQuotaExceeded        Code = "quota_exceeded"     // more sandboxes than the caller may have
	CodeLimitsUnavailable    Code = "limits_unavailable" // this host can't keep a limit
	CodeInternal             Code = "internal"
)

// Error is what every method of Manager returns for a failure that a user may see.
type Error struct {
	Code       Code
	Message    string        // names the thing and says what is wrong with it
	Hint       string        // what to do about it; "" when there is nothing to say
	RetryAfter time.Duration // when trying again is likely to work; 0: unknown
	Err        error         // cause, or nil
}

// Error returns the message and the cause, without the hint.
func (e *Error) Error() string {
	if e.Err == nil {
		return e.Message
	}
	return e.Message + ": " + e.Err.Error()
}

// Unwrap returns the cause.
func (e *Error) Unwrap() error { return e.Err }

// CodeOf returns the code of the outermost *Error in err's chain; CodeInternal when there is none, "" for nil.
func CodeOf(err error) Code {
	if err == nil {
		return ""
	}
	var e *Error
	if errors.As(err, &e) {
		return e.Code
	}
	return CodeInternal
}

// newError returns an *Error with a formatted message.
func newError(code Code, cause error, hint, format string, args ...any) *Error {
	return &Error{Code: code, Message: fmt.Sprintf(format, args...), Hint: hint, Err: cause}
}
