package client

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/http"
	"strconv"
	"strings"
	"time"

	"github.com/forkd/forkd/api"
)

// Codes of errors that the daemon never sends, because it wasn't reached or wasn't a daemon of ours.
const (
	CodeNoDaemon   = "no_daemon"
	CodeUnexpected = "unexpected_answer"
	CodeBrokenOff  = "broken_off" // an answer that began well
)

// Error is what a daemon answered instead of a result.
type Error struct {
	Status     int           // HTTP status; 0 when there was no answer
	Code       string        // stable, for programs: "snapshot_not_found"; api/openapi.yaml lists them
	Message    string        // what is wrong with what
	Hint       string        // what to do about it, or ""
	RetryAfter time.Duration // when trying again is likely to work; 0: unknown
	RequestID  string        // as in the daemon's log
	Err        error         // cause, when there was no answer
}

// Error returns the message alone; a program that talks to people shows Hint too.
func (e *Error) Error() string { return e.Message }

// Unwrap returns the cause.
func (e *Error) Unwrap() error { return e.Err }

// ForkError is one child that failed.
type ForkError = api.ForkError

// PartialError says that some children of a fork failed. The others are ready: they are what Fork returned beside it.
type PartialError struct {
	Sandboxes []Sandbox
	Failures  []ForkError // by index
}

// Error names how many failed and the first reason.
func (e *PartialError) Error() string {
	first := e.Failures[0]
	return fmt.Sprintf("%d of %d sandboxes failed; the first (number %d): %s", len(e.Failures), len(e.Failures)+len(e.Sandboxes), first.Index, first.Error)
}

// IsCode reports whether err is a daemon's error with that code.
//
//	if client.IsCode(err, "snapshot_not_found") { … }
func IsCode(err error, code string) bool {
	var e *Error
	return errors.As(err, &e) && e.Code == code
}

// unreachable explains a request that got no answer.
func (c *Client) unreachable(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	e := &Error{Code: CodeNoDaemon, Err: err, Message: fmt.Sprintf("no forkd daemon answers at %s: %v", c.addr, innermost(err)),
		Hint: "start one with `forkd serve`, or set FORKD_URL to where one runs"}
	switch {
	case errors.Is(err, fs.ErrPermission):
		e.Hint = "the socket belongs to the user that started the daemon: run this as that user, or with sudo"
	case errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF):
		e.Message = fmt.Sprintf("the forkd daemon at %s closed the connection without an answer", c.addr)
		e.Hint = "its log says why; whether the request took effect is not known"
	}
	return e
}

// innermost drops the layers that only repeat the URL and the address.
func innermost(err error) error {
	for {
		next := errors.Unwrap(err)
		if next == nil {
			return err
		}
		err = next
	}
}

// maxErrorBody bounds what is read of an answer that may come from anything.
const maxErrorBody = 1 << 20

// answerError reads an answer that is not a success.
func (c *Client) answerError(resp *http.Response) error {
	data, err := io.ReadAll(io.LimitReader(resp.Body, maxErrorBody))
	if err != nil {
		return fmt.Errorf("read the answer of %s: %w", c.addr, err)
	}
	var body api.Error
	if json.Unmarshal(data, &body) != nil || body.Code == "" {
		return &Error{Status: resp.StatusCode, Code: CodeUnexpected,
			Message: fmt.Sprintf("%s answered %s, not as a forkd daemon does: %.200s", c.addr, resp.Status, strings.TrimSpace(string(data))),
			Hint:    "check FORKD_URL"}
	}
	e := errorOf(body)
	e.Status = resp.StatusCode
	if secs, err := strconv.Atoi(resp.Header.Get("Retry-After")); err == nil {
		e.RetryAfter = time.Duration(secs) * time.Second
	}
	return e
}

func errorOf(body api.Error) *Error {
	return &Error{Code: body.Code, Message: body.Error, Hint: body.Hint, RequestID: body.RequestID,
		RetryAfter: time.Duration(body.RetryAfterSecs) * time.Second}
}
