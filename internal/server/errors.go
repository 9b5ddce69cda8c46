package server

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"net/http"
	"strconv"
	"syscall"
	"time"

	"github.com/forkd/forkd/api"
	"github.com/forkd/forkd/internal/image"
	"github.com/forkd/forkd/internal/sandbox"
	"github.com/forkd/forkd/internal/transfer"
)

// Codes that only the interface itself has; the others are the domain's.
const (
	codeBodyTooLarge         sandbox.Code = "body_too_large"
	codeUnauthorized         sandbox.Code = "unauthorized"
	codeForbidden                         = sandbox.CodeForbidden
	codeKeyNotFound          sandbox.Code = "key_not_found"
	codeKeyExists            sandbox.Code = "key_exists"
	codeRateLimited          sandbox.Code = "rate_limited"
	codeNotFound             sandbox.Code = "not_found"
	codeMethodNotAllowed     sandbox.Code = "method_not_allowed"
	codeIdempotencyKeyReused sandbox.Code = "idempotency_key_reused"
)

// statusClientGone is what logs and metrics show when the client left before the answer; nobody receives it.
const statusClientGone = 499

// errClientGone is the error of a client that left in the middle of its request.
var errClientGone = errors.New("the client left")

// statusOf is the HTTP status of a code.
func statusOf(code sandbox.Code) int {
	switch code {
	case sandbox.CodeInvalidArgument, sandbox.CodeInvalidTag:
		return http.StatusBadRequest
	case codeUnauthorized:
		return http.StatusUnauthorized
	case codeForbidden, transfer.CodeUntrustedPack:
		return http.StatusForbidden
	case sandbox.CodeSnapshotNotFound, sandbox.CodeSandboxNotFound, sandbox.CodeImageNotFound, codeKeyNotFound, codeNotFound:
		return http.StatusNotFound
	case codeMethodNotAllowed:
		return http.StatusMethodNotAllowed
	case sandbox.CodeSnapshotExists, sandbox.CodeImageExists, sandbox.CodeSandboxExists, codeKeyExists, sandbox.CodeHoldsSecrets, sandbox.CodeSnapshotInUse, sandbox.CodeImageInUse, sandbox.CodeInvalidState:
		return http.StatusConflict
	case sandbox.CodeSandboxGone:
		return http.StatusGone
	case codeBodyTooLarge:
		return http.StatusRequestEntityTooLarge
	case sandbox.CodeNoInterpreter, sandbox.CodeWarmUpFailed, sandbox.CodeSnapshotCorrupt, sandbox.CodeSnapshotIncompatible, transfer.CodeInvalidPack,
		codeIdempotencyKeyReused:
		return http.StatusUnprocessableEntity
	case codeRateLimited, sandbox.CodeQuotaExceeded:
		return http.StatusTooManyRequests
	case sandbox.CodeGuestUnreachable:
		return http.StatusBadGateway
	case sandbox.CodeInsufficientMemory, sandbox.CodeQueueFull, sandbox.CodeBranchCap, sandbox.CodeShuttingDown, sandbox.CodeEngineUnavailable, sandbox.CodeLimitsUnavailable,
		sandbox.CodeNetworkUnavailable:
		return http.StatusServiceUnavailable
	case sandbox.CodeTimeout:
		return http.StatusGatewayTimeout
	case sandbox.CodeDiskFull:
		return http.StatusInsufficientStorage
	default: // identity_failed, internal and what a later domain adds
		return http.StatusInternalServerError
	}
}

// errBrokenOff is in the record of what a guest's port began to answer and did not finish, or was not let finish.
var errBrokenOff = errors.New("what the port answers has broken off")

// retryable says which codes get a Retry-After even when the domain doesn't know how long.
func retryable(code sandbox.Code) bool {
	return code == sandbox.CodeInsufficientMemory || code == sandbox.CodeQueueFull || code == sandbox.CodeBranchCap
}

// invalid is a 400 that names what is wrong with the request.
func invalid(hint, format string, args ...any) *sandbox.Error {
	return &sandbox.Error{Code: sandbox.CodeInvalidArgument, Message: fmt.Sprintf(format, args...), Hint: hint}
}

// describe turns any error into the one that is shown.
func describe(err error) api.Error {
	var known *sandbox.Error
	switch {
	case errors.As(err, &known):
		out := api.Error{Error: err.Error(), Code: string(known.Code), Hint: known.Hint}
		if known.RetryAfter > 0 {
			out.RetryAfterSecs = int(math.Ceil(known.RetryAfter.Seconds()))
		} else if retryable(known.Code) {
			out.RetryAfterSecs = 1
		}
		return out
	case errors.Is(err, image.ErrNotFound):
		return api.Error{Error: err.Error(), Code: string(sandbox.CodeImageNotFound), Hint: "`forkd image ls` lists the images, `forkd image build` makes one"}
	case errors.Is(err, image.ErrInvalid):
		return api.Error{Error: err.Error(), Code: string(sandbox.CodeInvalidArgument)}
	case errors.Is(err, image.ErrCorrupt):
		return api.Error{Error: err.Error(), Code: string(sandbox.CodeInternal), Hint: "remove it with `forkd image rm` and build it again"}
	case errors.Is(err, syscall.ENOSPC):
		return api.Error{Error: err.Error(), Code: string(sandbox.CodeDiskFull), Hint: "make room: `forkd images` and `forkd image ls` show what takes it"}
	case errors.Is(err, context.DeadlineExceeded):
		return api.Error{Error: err.Error(), Code: string(sandbox.CodeTimeout)}
	default:
		return api.Error{Error: err.Error(), Code: string(sandbox.CodeInternal), Hint: "the daemon's log has more under this request id"}
	}
}

// writeError answers with err's status and body. A client that left gets nothing, but logs and metrics see 499.
func writeError(w http.ResponseWriter, r *http.Request, err error) {
	err = endedByKey(r, endedByStop(r, err))
	if errors.Is(err, errClientGone) || r.Context().Err() != nil && errors.Is(err, context.Canceled) {
		noteError(r.Context(), err)
		w.WriteHeader(statusClientGone)
		return
	}
	body := describe(err)
	body.RequestID = requestID(r.Context())
	if body.RetryAfterSecs > 0 {
		w.Header().Set("Retry-After", strconv.Itoa(body.RetryAfterSecs))
	}
	noteError(r.Context(), err)
	writeJSON(w, statusOf(sandbox.Code(body.Code)), body)
}

// endedByStop turns the error of a request that ended because the daemon is stopping into one that says so, whatever the layers on the
// way have made of it.
func endedByStop(r *http.Request, err error) error {
	if errors.Is(err, errStopping) || errors.Is(err, context.Canceled) && context.Cause(r.Context()) == errStopping {
		return &sandbox.Error{Code: sandbox.CodeShuttingDown, Message: "the daemon is stopping and ended this request",
			Hint: "repeat it when the daemon is back", RetryAfter: stoppedRetry}
	}
	return err
}

// stoppedRetry is how long a daemon that stops is likely to be away when it is being restarted.
const stoppedRetry = 5 * time.Second

// writeJSON answers with a JSON body. A failed write means that the client is gone: there is nobody to tell.
func writeJSON(w http.ResponseWriter, status int, v any) {
	data, err := json.Marshal(v)
	if err != nil { // only by a mistake in this package; the recovery answers and logs
		panic(fmt.Errorf("encode %T: %w", v, err))
	}
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	_, _ = w.Write(append(data, '\n'))
}
