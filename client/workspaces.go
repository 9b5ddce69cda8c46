package client

import (
	"context"
	"net/http"
	"net/url"

	"github.com/forkd/forkd/api"
)

// Workspace is a sandbox that is known by a name.
type Workspace = api.WorkspaceInfo

// WorkspaceRequest says what to start a workspace from.
type WorkspaceRequest = api.WorkspaceRequest

// Workspaces lists the workspaces by name.
func (c *Client) Workspaces(ctx context.Context) ([]Workspace, error) {
	var list []Workspace
	err := c.call(ctx, http.MethodGet, "/v1/workspaces", nil, &list)
	return list, err
}

// CreateWorkspace starts a sandbox with a name.
//
//	w, err := c.CreateWorkspace(ctx, client.WorkspaceRequest{Name: "mine", SnapshotTag: "py", AutoSuspendSecs: 600, AutoResume: true})
func (c *Client) CreateWorkspace(ctx context.Context, req WorkspaceRequest) (Workspace, error) {
	var w Workspace
	err := c.call(ctx, http.MethodPost, "/v1/workspaces", req, &w)
	return w, err
}

// Workspace returns one workspace.
func (c *Client) Workspace(ctx context.Context, name string) (Workspace, error) {
	var w Workspace
	err := c.call(ctx, http.MethodGet, workspacePath(name), nil, &w)
	return w, err
}

// DeleteWorkspace ends a workspace, running or suspended.
func (c *Client) DeleteWorkspace(ctx context.Context, name string) error {
	return c.call(ctx, http.MethodDelete, workspacePath(name), nil, nil)
}

// SuspendWorkspace freezes a workspace to disk and gives its memory back.
func (c *Client) SuspendWorkspace(ctx context.Context, name string, opts ...SuspendRequest) (Workspace, error) {
	var w Workspace
	err := c.call(ctx, http.MethodPost, workspacePath(name)+"/suspend", suspendBody(opts), &w)
	return w, err
}

// ResumeWorkspace brings a suspended workspace back.
func (c *Client) ResumeWorkspace(ctx context.Context, name string) (Workspace, error) {
	var w Workspace
	err := c.call(ctx, http.MethodPost, workspacePath(name)+"/resume", nil, &w)
	return w, err
}

func workspacePath(name string) string { return "/v1/workspaces/" + url.PathEscape(name) }
