package sandbox

import (
	"time"

	"github.com/forkd/forkd/internal/limits"
	"github.com/forkd/forkd/internal/netpolicy"
)

// State is where a sandbox is in its life.
type State string

// States. The moves are starting → running ⇄ suspended; starting → failed; running → stopped | failed; suspended → stopped | failed.
const (
	StateStarting  State = "starting"  // persisted, not yet handed out
	StateRunning   State = "running"   // its agent acknowledged its identity
	StateSuspended State = "suspended" // frozen to disk, no process
	StateStopped   State = "stopped"   // ended on purpose: killed, deadline, guest shut down
	StateFailed    State = "failed"    // ended by a fault
)

// Path says which ways a fork may take.
type Path string

// Paths.
const (
	PathAny  Path = ""     // from the pool when it has a child ready, else cold
	PathCold Path = "cold" // a new monitor loads the snapshot
	PathPool Path = "pool" // from the pool only
)

// How a sandbox came to be: Sandbox.Path.
const (
	StartedCold    = "cold"  // a new monitor loaded the snapshot
	StartedByClaim = "claim" // taken from the pool
)

// Sandbox is one child machine.
type Sandbox struct {
	ID             string
	SnapshotID     string
	SnapshotTag    string
	State          State
	CreatedAt      time.Time
	Deadline       time.Time // zero: lives until it is killed
	EndedAt        time.Time // zero while it lives
	Env, Metadata  map[string]string
	PID            int           // of the monitor; 0 when there is none
	GuestAddr      string        // in its own network; "" without one
	Netns          string        // the file of its network namespace; "" without a network, and while it is suspended
	MemoryLimitMiB int           // as asked for; 0: not
	Limits         limits.Limits // that are kept: asked for, the snapshot's, or the daemon's
	Confinement    string        // of the monitor: "full", "user" or "none"; "" when there is none
	Path           string        // StartedCold or StartedByClaim
	BranchCount    int
	Reason         string        // why it stopped or failed
	ReadyIn        time.Duration // from the fork's turn to the acknowledged identity
	Name           string        // unique among those of its tenant that live; "" for none
	AutoSuspend    time.Duration // suspended after so long without a request; 0: never
	AutoResume     bool          // a request resumes it when it is suspended
	SuspendedAt    time.Time     // zero unless it is suspended
	Tenant         string        // whose it is
	Secrets        []string      // names of the secrets it was given
	Network        netpolicy.Policy
	Conditions     []Condition // what is the matter with it; the daemon forgets it when it is started again, and asks the guest
}

// Snapshot is an immutable frozen machine and its name.
type Snapshot struct {
	Tag, ID, Dir        string
	CreatedAt           time.Time
	Image               string // name or id of the image it was booted from
	MemMiB, VCPUs       int
	Engine              string
	EngineVersion       string
	Accel               string
	LogicalBytes        int64 // guest memory
	PhysicalBytes       int64 // what it takes on disk
	DeviceBytes         int64
	ParentID, ParentTag string   // "" for a base
	ContentHash         string   // of the memory's chunk list
	Ancestors           []string // tags (ids when untagged), root first
	Dependents          []string // tags (ids when untagged)
	BranchedFrom        string   // sandbox id
	Status              Status
	Warning             string // why it can't be restored, when it is not Bootable; or why its branch was not live
	Bootable            bool   // this daemon's engine can restore it
	Python              bool   // has a resident interpreter
	Resident            bool   // its memory is in RAM
	ResidentBytes       int64  // what it takes there, what it shares with others included
	Pool                PoolStatus
	BootWarm            time.Duration // boot, readiness and warm-up of the parent
	Recipe              Recipe
	Limits              limits.Limits // of children that are asked for without
	HasNetwork          bool          // its machines have a network device
	Network             netpolicy.Policy
	Tenant              string // whose it is
	Public              bool   // everybody may fork it
	Secrets             bool   // secrets that a sandbox was given are in its memory

	// Of a branch; zero for others.
	Pause             time.Duration // how long the source stood still
	DiffTime          time.Duration // from the request to the captured difference
	DiffPhysicalBytes int64         // of the pages that differ from what the source was started from, without those of zeros
	DiffLogicalBytes  int64         // of all pages that differ
}

// Status is where a snapshot is in its life.
type Status string

// Statuses.
const (
	StatusWriting Status = "writing"
	StatusReady   Status = "ready"
	StatusFailed  Status = "failed" // what is on disk can't be used; Warning says why
)

// WarmUpKind says how a warm-up runs.
type WarmUpKind string

// Warm-up kinds.
const (
	WarmUpExec WarmUpKind = "exec" // a shell command
	WarmUpEval WarmUpKind = "eval" // code in the resident Python interpreter
)

// WarmUp is work done in the parent before it is frozen.
type WarmUp struct {
	Kind WarmUpKind
	Code string
}

// Recipe is what a snapshot was made by. It does not have what the programs of a sandbox did that was branched.
type Recipe struct {
	Image  string
	WarmUp []WarmUp
	Probe  string
	Env    []string // K=V
}

// SnapshotRequest asks for a snapshot of a parent booted from an image.
type SnapshotRequest struct {
	Tag      string
	Image    string // name or id
	MemMiB   int    // 0: Limits.DefaultMemMiB
	VCPUs    int    // 0: 1
	WarmUp   []WarmUp
	Probe    string            // a shell command that must exit 0 before the warm-up; "": the agent's answer is enough
	Timeout  time.Duration     // for boot, readiness and warm-up together; 0: Limits.DefaultSnapshotTimeout
	Env      map[string]string // of the parent's commands, inherited by every child
	Limits   limits.Limits     // of children that are asked for without
	PoolSize int
	Network  netpolicy.Policy // of the parent, and of every child that asks for no other
}

// Progress is a step of long work, for people.
type Progress struct {
	Step   string // "boot", "ready", "probe", "warm_up", "exercise", "freeze", "store"
	Detail string
	Done   int64 // in Total
	Total  int64 // 0: unknown
}

// DeleteMode says what a snapshot's removal may take with it.
type DeleteMode string

// Delete modes.
const (
	DeleteSafe    DeleteMode = ""        // refuse when anything uses it; its own pool is drained
	DeleteCascade DeleteMode = "cascade" // its dependents too; refuse when a sandbox of any of them lives
	DeleteForce   DeleteMode = "force"   // kill its sandboxes first; refuse when it has dependents
)

// PoolStatus is a snapshot's pool.
type PoolStatus struct {
	Tag     string
	Size    int    // wanted
	Ready   int    // may be claimed
	Filling int    // being made
	Problem string // why the last refill failed; "" when it didn't
}

// MaxForks is the most children one request may ask for.
const MaxForks = 1000

// ForkRequest asks for children of a snapshot.
type ForkRequest struct {
	Tag         string
	N           int // 1 to MaxForks
	Env         map[string]string
	Metadata    map[string]string
	Timeout     time.Duration // deadline from now; 0: none
	Limits      limits.Limits
	Path        Path
	Name        string        // of a sandbox to be found by it; only with N 1
	AutoSuspend time.Duration // see Sandbox
	AutoResume  bool
	Network     *netpolicy.Policy // nil: the snapshot's
	Secrets     map[string]string // files below /run/forkd/secrets of the guest; kept nowhere else
	SecretEnv   bool              // have them in the environment of commands and code too
}

// ForkResult is one child of a request: a sandbox that is ready, or why there is none.
type ForkResult struct {
	Sandbox *Sandbox
	Err     error
}

// PingResult is an answer of the agent.
type PingResult struct {
	PID       int           // of the agent in the guest
	RoundTrip time.Duration // seen from the host
	GuestTime time.Time     // the guest's clock
	Uptime    time.Duration // of the guest
	Version   string        // of the agent
	Python    bool          // has a resident interpreter
}

// ExecRequest runs a command in a sandbox.
type ExecRequest struct {
	Args      []string // no shell in between
	Env       map[string]string
	Cwd, User string
	Timeout   time.Duration // 0: Limits.DefaultExecTimeout
	MaxOutput int           // bytes kept of each of stdout and stderr; 0: 1 MiB
	Stdin     []byte
}

// ExecResult is the end of a command.
type ExecResult struct {
	Stdout, Stderr []byte
	ExitCode       int
	Signal         string // that ended it, or ""
	TimedOut       bool
	Truncated      bool
	OOMKilled      bool // the guest's kernel killed it, or a process that it had started, for want of memory
	DiskFull       bool // it failed, and the guest's disk was full
	Duration       time.Duration
}

// EvalRequest runs code in the resident interpreter of a sandbox.
type EvalRequest struct {
	Code      string
	Timeout   time.Duration // 0: Limits.DefaultExecTimeout
	MaxOutput int
}

// EvalResult is the end of an evaluation.
type EvalResult struct {
	Result         string // repr of the last expression; "" for none
	Stdout, Stderr []byte
	Error          string // traceback; "" when it went well
	TimedOut       bool
	Truncated      bool
	OOMKilled      bool // as of an ExecResult
	DiskFull       bool
	Duration       time.Duration
}

// Event tells that something changed.
type Event struct {
	Time      time.Time
	Kind      EventKind
	Tenant    string // whose it is: nobody else is told
	SandboxID string
	Tag       string
	State     State
	Condition ConditionKind // of EventCondition and EventConditionOver
	Reason    string
}

// EventKind classifies events.
type EventKind string

// Event kinds.
const (
	EventSandboxState    EventKind = "sandbox_state"
	EventCondition       EventKind = "sandbox_condition"      // one begins, or goes on: another program was killed
	EventConditionOver   EventKind = "sandbox_condition_over" // the sandbox lives on without it
	EventSnapshotReady   EventKind = "snapshot_ready"
	EventSnapshotFailed  EventKind = "snapshot_failed"
	EventSnapshotDeleted EventKind = "snapshot_deleted"
	EventPool            EventKind = "pool"
)

// Stats are figures of the daemon, for metrics.
type Stats struct {
	Running, Starting     int
	Suspended             int
	BranchesActive        int // slots in use by branches, forks of running sandboxes, and suspensions
	BranchesQueued        int
	PoolReady, PoolFills  int
	Snapshots             int
	LaunchesActive        int   // launch slots in use
	LaunchesQueued        int   // requests waiting for one
	MemoryBudgetBytes     int64 // what admission may hand out in all
	MemoryReservedBytes   int64 // what it has handed out
	ForksCold, ForksClaim uint64
	ForksFailed           uint64
	Kills, Expired, Lost  uint64
	ResidentImages        int
	ResidentBytes         int64
	AnonymousBytes        int64  // memory that is the sandboxes' own, at most 15 s old
	DeniedAttempts        uint64 // connections that network policies did not let through, likewise
	Shutdowns             uint64 // sandboxes whose guests shut down
	Panics                uint64 // sandboxes whose guests' kernels panicked
	OOMCgroup, OOMHost    uint64 // sandboxes whose monitor was killed for want of memory: at its limit, and because the host had none left
	OOMGuest              uint64 // programs that guests' kernels killed for want of memory
	DiskFull              uint64 // how often the disk of a guest became full
}

// Recovery is what Recover found and did.
type Recovery struct {
	Adopted   int      // sandboxes that live on
	Suspended int      // sandboxes that are suspended
	Lost      int      // sandboxes that ended while the daemon was down
	Aborted   int      // sandboxes that were being started, now ended
	Reaped    int      // processes of ours without a record, killed
	Snapshots int      // half-made snapshots removed
	Finished  int      // snapshots that were complete but for their record, or half deleted: finished
	Dirs      int      // leftover run directories removed
	Unknown   []string // published snapshots that have no record: left alone
}
