package client

import (
	"context"
	"net/http"
	"net/url"

	"github.com/forkd/forkd/api"
)

// Snapshot is a frozen machine.
type Snapshot = api.SnapshotInfo

// SnapshotDetail has a snapshot's sizes and lineage.
type SnapshotDetail = api.SnapshotDetail

// SnapshotRequest says what to boot, how to warm it up, and how to call the result.
type SnapshotRequest = api.SnapshotRequest

// WarmUp is work done in the parent before it is frozen.
type WarmUp = api.WarmUp

// Pool says how many children of a snapshot are ready to be claimed.
type Pool = api.PoolStatus

// DeleteMode says what the removal of a snapshot may take with it.
type DeleteMode string

// Delete modes.
const (
	DeleteUnused  DeleteMode = ""        // refuse when something uses it
	DeleteCascade DeleteMode = "cascade" // the snapshots that rest on it too
	DeleteForce   DeleteMode = "force"   // kill the sandboxes that run from it
)

// Snapshots lists the snapshots by tag.
func (c *Client) Snapshots(ctx context.Context) ([]Snapshot, error) {
	var list []Snapshot
	err := c.call(ctx, http.MethodGet, "/v1/snapshots", nil, &list)
	return list, err
}

// CreateSnapshot boots an image, warms it up and freezes it, and calls progress (which may be nil) for each step.
//
//	snap, err := c.CreateSnapshot(ctx, client.SnapshotRequest{
//		Tag: "py", Image: "py",
//		WarmUp: []client.WarmUp{{Kind: "eval", Code: "import numpy"}},
//	}, nil)
func (c *Client) CreateSnapshot(ctx context.Context, req SnapshotRequest, progress func(Progress)) (Snapshot, error) {
	last, err := c.stream(ctx, "/v1/snapshots", req, progress)
	if err != nil {
		return Snapshot{}, err
	}
	return *last.Snapshot, nil
}

// SnapshotInfo returns a snapshot's sizes, lineage and settings.
func (c *Client) SnapshotInfo(ctx context.Context, tag string) (SnapshotDetail, error) {
	var d SnapshotDetail
	err := c.call(ctx, http.MethodGet, snapshotPath(tag)+"/info", nil, &d)
	return d, err
}

// DeleteSnapshot deletes a snapshot.
func (c *Client) DeleteSnapshot(ctx context.Context, tag string, mode DeleteMode) error {
	path := snapshotPath(tag)
	if mode != DeleteUnused {
		path += "?" + string(mode) + "=true"
	}
	return c.call(ctx, http.MethodDelete, path, nil, nil)
}

// VerifySnapshot hashes what is on disk again. Damage is an *Error with the code "snapshot_corrupt".
func (c *Client) VerifySnapshot(ctx context.Context, tag string) error {
	return c.call(ctx, http.MethodPost, snapshotPath(tag)+"/verify", nil, nil)
}

// Pool returns the state of a snapshot's pool.
func (c *Client) Pool(ctx context.Context, tag string) (Pool, error) {
	var p Pool
	err := c.call(ctx, http.MethodGet, snapshotPath(tag)+"/pool", nil, &p)
	return p, err
}

// SetPool says how many children to keep ready. It returns at once; the pool fills in the background.
func (c *Client) SetPool(ctx context.Context, tag string, size int) (Pool, error) {
	var p Pool
	err := c.call(ctx, http.MethodPut, snapshotPath(tag)+"/pool", api.PoolRequest{Size: size}, &p)
	return p, err
}

func snapshotPath(tag string) string { return "/v1/snapshots/" + url.PathEscape(tag) }
