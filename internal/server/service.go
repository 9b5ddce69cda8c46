package server

import (
	"context"
	"io"
	"net"
	"time"

	"github.com/forkd/forkd/internal/image"
	"github.com/forkd/forkd/internal/netpolicy"
	"github.com/forkd/forkd/internal/sandbox"
	"github.com/forkd/forkd/internal/transfer"
)

// Service is what the handlers need of the domain. *sandbox.Manager has it.
type Service interface {
	Snapshots
	Pools
	Sandboxes
	Guests
	Graph
	Networks
	Stats() sandbox.Stats
}

// Snapshots makes and keeps frozen machines.
type Snapshots interface {
	CreateSnapshot(context.Context, sandbox.SnapshotRequest, func(sandbox.Progress)) (sandbox.Snapshot, error)
	Snapshots(context.Context) ([]sandbox.Snapshot, error)
	Snapshot(ctx context.Context, tag string) (sandbox.Snapshot, error)
	DeleteSnapshot(ctx context.Context, tag string, mode sandbox.DeleteMode) error
	VerifySnapshot(ctx context.Context, tag string) error
	ShareSnapshot(ctx context.Context, tag string, public bool) (sandbox.Snapshot, error)
}

// Pools keeps children ready.
type Pools interface {
	SetPool(ctx context.Context, tag string, size int) (sandbox.PoolStatus, error)
	Pool(ctx context.Context, tag string) (sandbox.PoolStatus, error)
}

// Sandboxes starts and ends children.
type Sandboxes interface {
	Fork(context.Context, sandbox.ForkRequest) ([]sandbox.ForkResult, error)
	Sandboxes(context.Context) ([]sandbox.Sandbox, error) // those that live
	Ended(context.Context) ([]sandbox.Sandbox, error)     // those that ended and are still remembered
	Sandbox(ctx context.Context, id string) (sandbox.Sandbox, error)
	Kill(ctx context.Context, id string) error
	Extend(ctx context.Context, id string, timeout time.Duration) (sandbox.Sandbox, error)
}

// Guests reaches into a running child.
type Guests interface {
	Ping(ctx context.Context, id string) (sandbox.PingResult, error)
	Exec(ctx context.Context, id string, req sandbox.ExecRequest) (sandbox.ExecResult, error)
	Eval(ctx context.Context, id string, req sandbox.EvalRequest) (sandbox.EvalResult, error)
	Logs(ctx context.Context, id string) ([]byte, error)
	Usage(ctx context.Context, id string) (sandbox.Usage, error)
}

// Networks says what sandboxes may reach, and reaches them.
type Networks interface {
	SetNetwork(ctx context.Context, id string, p netpolicy.Policy) (sandbox.Sandbox, error)
	NetworkStatus(ctx context.Context, id string) (netpolicy.Status, error)
	DialGuest(ctx context.Context, id string, port int) (net.Conn, error)
}

// Graph makes snapshots of what runs, and of other snapshots.
type Graph interface {
	Branch(ctx context.Context, id string, req sandbox.BranchRequest) (sandbox.Snapshot, error)
	ForkRunning(ctx context.Context, id string, req sandbox.ForkRunningRequest) (sandbox.ForkRunningResult, error)
	SnapshotDiff(context.Context, sandbox.DiffRequest, func(sandbox.Progress)) (sandbox.Snapshot, error)
	Compact(ctx context.Context, from, to string) (sandbox.Snapshot, error)
	Tree(context.Context) ([]sandbox.TreeNode, error)
	Suspend(ctx context.Context, id string, secrets bool) (sandbox.Sandbox, error)
	Resume(ctx context.Context, id string) (sandbox.Sandbox, error)
	SandboxByName(ctx context.Context, name string) (sandbox.Sandbox, error)
}

// Packs moves snapshots out and in. *transfer.Service has it.
type Packs interface {
	Head(ctx context.Context, tag string) (transfer.Head, error)
	Pack(ctx context.Context, tag string, w io.Writer, signature []byte) error
	Unpack(ctx context.Context, r io.Reader, req transfer.UnpackRequest, progress func(sandbox.Progress)) (transfer.Unpacked, error)
}

// Image is an image as a caller sees it.
type Image struct {
	image.Image
	Public bool // all tenants may use it
}

// Images builds and keeps root file systems. *image.Store has most of it; Remove must know who uses an image, and Get and List show a caller
// (sandbox.TenantOf) what is its own or shared.
type Images interface {
	Build(context.Context, image.BuildSpec, func(image.Progress)) (image.Image, error)
	Get(ctx context.Context, nameOrID string) (Image, error)
	List(context.Context) ([]Image, error)
	Share(ctx context.Context, nameOrID string, public bool) (Image, error)
	Remove(ctx context.Context, nameOrID string) error
	Prune(context.Context) ([]image.Image, error)
}
