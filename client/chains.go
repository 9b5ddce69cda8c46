package client

import (
	"context"
	"net/http"

	"github.com/forkd/forkd/api"
)

// DiffRequest says what to run in a child of a snapshot, and how to call what comes of it.
type DiffRequest = api.DiffRequest

// TreeNode is a snapshot, the sandboxes that came of it and the snapshots that rest on it.
type TreeNode = api.TreeNode

// SnapshotDiff runs something in a child of a snapshot and freezes what it changed, and calls progress (which may be nil) for each step.
//
//	snap, err := c.SnapshotDiff(ctx, "py", client.DiffRequest{
//		Tag: "pandas", Steps: []client.WarmUp{{Kind: "exec", Code: "pip install pandas"}},
//	}, nil)
func (c *Client) SnapshotDiff(ctx context.Context, from string, req DiffRequest, progress func(Progress)) (Snapshot, error) {
	last, err := c.stream(ctx, snapshotPath(from)+"/diff", req, progress)
	if err != nil {
		return Snapshot{}, err
	}
	return *last.Snapshot, nil
}

// Compact stores a snapshot anew, under another tag, so that it rests on no other. The old one stays.
func (c *Client) Compact(ctx context.Context, from, to string) (Snapshot, error) {
	var s Snapshot
	err := c.call(ctx, http.MethodPost, snapshotPath(from)+"/compact", api.CompactRequest{To: to}, &s)
	return s, err
}

// Tree returns the snapshots that rest on no other, each with all that rests on it.
func (c *Client) Tree(ctx context.Context) ([]TreeNode, error) {
	var roots []TreeNode
	err := c.call(ctx, http.MethodGet, "/v1/tree", nil, &roots)
	return roots, err
}
