package client

import (
	"context"
	"net/http"
	"net/url"
	"time"

	"github.com/forkd/forkd/api"
)

// Sandbox is a running child of a snapshot.
type Sandbox = api.SandboxInfo

// ForkRequest says what to start and how many. N nil means one.
type ForkRequest = api.ForkRequest

// Limits are what a sandbox may take of the host.
type Limits = api.Limits

// Stats is the memory a sandbox uses.
type Stats = api.SandboxStats

// Fork starts sandboxes and returns them when each has answered and has its own identity. When some of them failed, the others
// are returned together with a *PartialError; when all failed, the error is the first one's *Error.
//
//	sandboxes, err := c.Fork(ctx, client.ForkRequest{SnapshotTag: "py", N: client.Int(10)})
//	var partial *client.PartialError
//	if errors.As(err, &partial) { … use sandboxes, or kill them … }
func (c *Client) Fork(ctx context.Context, req ForkRequest) ([]Sandbox, error) {
	req.Report = true
	var report api.ForkReport
	if err := c.call(ctx, http.MethodPost, "/v1/sandboxes", req, &report); err != nil {
		return nil, err
	}
	if len(report.Errors) > 0 {
		return report.Sandboxes, &PartialError{Sandboxes: report.Sandboxes, Failures: report.Errors}
	}
	return report.Sandboxes, nil
}

// Sandboxes lists the sandboxes that live, oldest first; with ended, also those that ended and are still remembered.
func (c *Client) Sandboxes(ctx context.Context, ended bool) ([]Sandbox, error) {
	path := "/v1/sandboxes"
	if ended {
		path += "?all=true"
	}
	var list []Sandbox
	err := c.call(ctx, http.MethodGet, path, nil, &list)
	return list, err
}

// Sandbox returns one sandbox.
func (c *Client) Sandbox(ctx context.Context, id string) (Sandbox, error) {
	var s Sandbox
	err := c.call(ctx, http.MethodGet, sandboxPath(id), nil, &s)
	return s, err
}

// Kill ends a sandbox and returns when it is gone.
func (c *Client) Kill(ctx context.Context, id string) error {
	return c.call(ctx, http.MethodDelete, sandboxPath(id), nil, nil)
}

// Extend moves the deadline of a sandbox to timeout from now; 0 removes it.
func (c *Client) Extend(ctx context.Context, id string, timeout time.Duration) (Sandbox, error) {
	var s Sandbox
	err := c.call(ctx, http.MethodPost, sandboxPath(id)+"/timeout", api.TimeoutRequest{TimeoutSecs: timeout.Seconds()}, &s)
	return s, err
}

// Stats returns the memory a sandbox uses.
func (c *Client) Stats(ctx context.Context, id string) (Stats, error) {
	var s Stats
	err := c.call(ctx, http.MethodGet, sandboxPath(id)+"/stats", nil, &s)
	return s, err
}

func sandboxPath(id string) string { return "/v1/sandboxes/" + url.PathEscape(id) }
