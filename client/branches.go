package client

import (
	"context"
	"net/http"

	"github.com/forkd/forkd/api"
)

// BranchRequest says how to freeze a running sandbox. The zero value is right for most: live, with a tag that is made up.
type BranchRequest = api.BranchRequest

// BranchMode says how a running sandbox is frozen.
type BranchMode = api.BranchRequestMode

// Branch modes.
const (
	BranchLive = api.BranchRequestModeLive // the pause does not depend on memory
	BranchDiff = api.BranchRequestModeDiff // changed pages are copied ahead and in the pause
	BranchFull = api.BranchRequestModeFull // as live, stored so that it rests on no other snapshot
)

// ForkRunningRequest asks for children of a running sandbox. N nil means one.
type ForkRunningRequest = api.ForkRunningRequest

// ForkedRunning is what came of a ForkRunningRequest.
type ForkedRunning struct {
	Sandboxes  []Sandbox
	PauseMS    float64 // how long the source stood still
	SnapshotID string  // of the instant
	Tag        string  // "" when the instant is not kept
}

// Branch freezes a running sandbox into a new snapshot while it goes on. It returns when the snapshot is on disk; with Wait false when the
// sandbox runs again: the snapshot can be forked then, and is ready a while later.
//
//	snap, err := c.Branch(ctx, id, client.BranchRequest{Tag: "checkpoint"})
//	children, err := c.Fork(ctx, client.ForkRequest{SnapshotTag: snap.Tag, N: client.Int(5)})
func (c *Client) Branch(ctx context.Context, id string, req BranchRequest) (Snapshot, error) {
	var s Snapshot
	err := c.call(ctx, http.MethodPost, sandboxPath(id)+"/branch", req, &s)
	return s, err
}

// ForkRunning starts children of a running sandbox as it is at this instant. Some of them may fail, as with Fork.
//
//	forked, err := c.ForkRunning(ctx, id, client.ForkRunningRequest{N: client.Int(5)})
func (c *Client) ForkRunning(ctx context.Context, id string, req ForkRunningRequest) (ForkedRunning, error) {
	req.Report = true
	var report api.ForkRunningReport
	if err := c.call(ctx, http.MethodPost, sandboxPath(id)+"/fork", req, &report); err != nil {
		return ForkedRunning{}, err
	}
	forked := ForkedRunning{Sandboxes: report.Sandboxes, PauseMS: report.PauseMS, SnapshotID: report.SnapshotID}
	if report.Tag != nil {
		forked.Tag = *report.Tag
	}
	if len(report.Errors) > 0 {
		return forked, &PartialError{Sandboxes: report.Sandboxes, Failures: report.Errors}
	}
	return forked, nil
}

// Suspend freezes a sandbox to disk and gives its memory back.
func (c *Client) Suspend(ctx context.Context, id string, opts ...SuspendRequest) (Sandbox, error) {
	var s Sandbox
	err := c.call(ctx, http.MethodPost, sandboxPath(id)+"/suspend", suspendBody(opts), &s)
	return s, err
}

// Resume brings a suspended sandbox back, under the same id.
func (c *Client) Resume(ctx context.Context, id string) (Sandbox, error) {
	var s Sandbox
	err := c.call(ctx, http.MethodPost, sandboxPath(id)+"/resume", nil, &s)
	return s, err
}

// Bool returns a pointer to v, for optional fields.
func Bool(v bool) *bool { return &v }

// SuspendRequest says how to suspend.
type SuspendRequest = api.SuspendRequest

// suspendBody is the last of the requests, or none.
func suspendBody(opts []SuspendRequest) any {
	if len(opts) == 0 {
		return nil
	}
	return opts[len(opts)-1]
}
