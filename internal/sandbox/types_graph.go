package sandbox

import (
	"time"

	"github.com/forkd/forkd/internal/limits"
	"github.com/forkd/forkd/internal/netpolicy"
)

// BranchMode says how a running sandbox is frozen.
type BranchMode string

// Branch modes.
const (
	// BranchLive stops the source for a time that does not depend on memory, and takes its memory afterwards. Where the host can't do
	// that it becomes BranchDiff and the snapshot's Warning says why. "" is BranchLive too.
	BranchLive BranchMode = "live"
	// BranchDiff copies the changed pages while the source runs and what was written meanwhile again while it stands still.
	BranchDiff BranchMode = "diff"
	// BranchFull captures as BranchLive does and stores a snapshot that rests on no other.
	BranchFull BranchMode = "full"
)

// BranchRequest asks for a snapshot of a running sandbox.
type BranchRequest struct {
	Tag         string     // "": generated
	Mode        BranchMode // "": BranchLive
	Secrets     bool       // copy them too, when the sandbox holds any: else it is refused
	Wait        bool       // until the snapshot is on disk; else Branch returns when the source runs again
	MeasureDiff bool       // fill in DiffPhysicalBytes and DiffLogicalBytes also where they take extra work (BranchFull)
}

// ForkRunningRequest asks for children of a running sandbox as it is at this instant.
type ForkRunningRequest struct {
	N             int               // 1 to MaxForks
	Tag           string            // keep that instant as a snapshot; "": it lives as long as its children
	Env, Metadata map[string]string // Env on top of the source's
	Timeout       time.Duration     // deadline from now; 0: none
	Limits        limits.Limits
	Network       *netpolicy.Policy // nil: the source's
	Secrets       bool              // copy them too, when the sandbox holds any: else it is refused
}

// ForkRunningResult is what became of a ForkRunningRequest.
type ForkRunningResult struct {
	Results    []ForkResult  // one for each child, in order
	Pause      time.Duration // how long the source stood still
	SnapshotID string        // of that instant
	Tag        string        // "" when it is not kept
}

// DiffRequest asks for a snapshot that is another one with some commands run in it.
type DiffRequest struct {
	From, Tag string
	Steps     []WarmUp
	Timeout   time.Duration     // for the child's start and the steps together; 0: Limits.SnapshotTimeout
	Env       map[string]string // of the steps, inherited by every child
}

// TreeNode is a snapshot and what came of it.
type TreeNode struct {
	Snapshot  Snapshot
	Sandboxes []string // ids of those that live or are suspended and were started from it
	Children  []TreeNode
}
