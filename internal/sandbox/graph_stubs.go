package sandbox

import (
	"context"
	"errors"
)

var errNotYet = errors.New("not built yet")

// Branch freezes a running sandbox into a new snapshot while it goes on.
func (m *Manager) Branch(ctx context.Context, id string, req BranchRequest) (Snapshot, error) {
	return Snapshot{}, errNotYet
}

// ForkRunning starts children of a running sandbox as it is at one instant.
func (m *Manager) ForkRunning(ctx context.Context, id string, req ForkRunningRequest) (ForkRunningResult, error) {
	return ForkRunningResult{}, errNotYet
}

// SnapshotDiff forks a snapshot, runs steps in the child and freezes the difference.
func (m *Manager) SnapshotDiff(ctx context.Context, req DiffRequest, tell func(Progress)) (Snapshot, error) {
	return Snapshot{}, errNotYet
}

// Compact stores a snapshot anew so that it rests on no other.
func (m *Manager) Compact(ctx context.Context, from, to string) (Snapshot, error) {
	return Snapshot{}, errNotYet
}

// Tree returns all snapshots as a forest, with the sandboxes that came of them.
func (m *Manager) Tree(ctx context.Context) ([]TreeNode, error) { return nil, errNotYet }

// Suspend freezes a sandbox to disk and gives its memory back.
func (m *Manager) Suspend(ctx context.Context, id string) (Sandbox, error) {
	return Sandbox{}, errNotYet
}

// Resume brings a suspended sandbox back.
func (m *Manager) Resume(ctx context.Context, id string) (Sandbox, error) {
	return Sandbox{}, errNotYet
}

// SandboxByName returns the sandbox with a name.
func (m *Manager) SandboxByName(ctx context.Context, name string) (Sandbox, error) {
	return Sandbox{}, errNotYet
}

// AddSnapshot publishes a tag for a snapshot that was just unpacked into the store.
func (m *Manager) AddSnapshot(ctx context.Context, tag, id string) error { return errNotYet }
