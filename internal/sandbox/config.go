package sandbox

import (
	"cmp"
	"errors"
	"fmt"
	"log/slog"
	"path/filepath"
	"runtime"
	"time"

	"github.com/forkd/forkd/internal/failpoint"
	"github.com/forkd/forkd/internal/guest/agentclient"
	"github.com/forkd/forkd/internal/image"
	"github.com/forkd/forkd/internal/limits"
	"github.com/forkd/forkd/internal/memory"
	"github.com/forkd/forkd/internal/snapshot"
	"github.com/forkd/forkd/internal/store"
	"github.com/forkd/forkd/internal/vmm"
)

// Images finds images. *image.Store has it.
type Images interface {
	// Get returns an error that wraps image.ErrNotFound when there is none.
	Get(nameOrID string) (image.Image, error)
}

// Config is what a Manager works with. It takes none of it over: who opened the stores closes them, after Shutdown.
type Config struct {
	Engine    vmm.Engine
	Images    Images
	Snapshots *snapshot.Store
	Memory    *memory.Cache
	DB        *store.DB
	RunDir    string // exists, ours alone, short: socket paths below it must stay under 108 bytes
	Limits    Limits
	Groups    *limits.Root // that machines are limited by; nil: none
	Log       *slog.Logger // nil: none
	Events    func(Event)  // is called in order of what happened to one thing and must not block; nil: none

	// Networks makes networks; nil: machines have none, for the reason NoNetworks.
	Networks   Networks
	NoNetworks error

	Timings func(Timing) // is told how long things took, and must not block; nil: nobody is

	// Agent returns the client of a machine's agent; nil: one over vmm.PortControl.
	Agent func(vmm.Machine) *agentclient.Client
	// Failpoints are for tests; nil: none.
	Failpoints *failpoint.Set
	// KillOnShutdown makes Shutdown end running sandboxes as well.
	KillOnShutdown bool
}

// Limits bound what a Manager does. Zero values stand for the defaults.
type Limits struct {
	Launches int // machines started at the same time; default: the number of CPUs
	Claims   int // pool members woken at the same time; default: twice the number of CPUs
	MaxQueue int // forks that may wait for their turn before new requests are refused; default 1000

	MaxBranches    int // running sandboxes frozen at the same time, until they are on disk; default: twice the number of CPUs, at least 4
	MaxBranchQueue int // branches and forks of running sandboxes that may wait for that before new ones are refused; default 64

	MemoryBudget    int64 // bytes for machines; default: what the host has available, less MemoryReserve
	MemoryReserve   int64 // bytes left to the rest of the host; default 256 MiB
	MonitorOverhead int64 // bytes a monitor takes beside guest memory once its guest has answered; default 24 MiB (measured: QEMU 7.2 with TCG)
	GuestPrivate    int64 // bytes a child is expected to make private of its guest memory; default 16 MiB

	DefaultMemMiB int // of a parent; default 512
	MinMemMiB     int // of a parent; default 16
	MaxMemMiB     int // of a parent; default 32768
	MaxVCPUs      int // of a parent; default 8
	MaxPoolSize   int // default 1000

	MaxSandboxes       int // that live or are suspended; 0: no limit
	MaxTenantSandboxes int // of one tenant; 0: no limit

	SnapshotTimeout time.Duration // for boot, readiness and warm-up, unless a request says; default 10 min
	LaunchTimeout   time.Duration // for a child from its turn to its acknowledged identity; default 60 s
	RecoverTimeout  time.Duration // for a sandbox found at start to answer; default 30 s
	PingTimeout     time.Duration // default 5 s
	ExecTimeout     time.Duration // for exec and eval, unless a request says; default 30 s
	MaxExecTimeout  time.Duration // default 24 h
	DrainTimeout    time.Duration // how long Shutdown lets requests in flight go on; default 30 s

	Default limits.Limits // of sandboxes that are asked for without, as far as this host can keep them

	KeepEnded    int           // records of ended sandboxes kept; default 1000
	KeepEndedFor time.Duration // how long; default 1 h
}

func (l Limits) withDefaults() Limits {
	cpus := runtime.NumCPU()
	l.Launches = cmp.Or(l.Launches, cpus)
	l.Claims = cmp.Or(l.Claims, 2*cpus)
	l.MaxQueue = cmp.Or(l.MaxQueue, 1000)
	l.MaxBranches = cmp.Or(l.MaxBranches, max(4, 2*cpus))
	l.MaxBranchQueue = cmp.Or(l.MaxBranchQueue, 64)
	l.MemoryReserve = cmp.Or(l.MemoryReserve, 256<<20)
	l.MonitorOverhead = cmp.Or(l.MonitorOverhead, 24<<20)
	l.GuestPrivate = cmp.Or(l.GuestPrivate, 16<<20)
	l.DefaultMemMiB = cmp.Or(l.DefaultMemMiB, 512)
	l.MinMemMiB = cmp.Or(l.MinMemMiB, 16)
	l.MaxMemMiB = cmp.Or(l.MaxMemMiB, 32<<10)
	l.MaxVCPUs = cmp.Or(l.MaxVCPUs, 8)
	l.MaxPoolSize = cmp.Or(l.MaxPoolSize, 1000)
	l.SnapshotTimeout = cmp.Or(l.SnapshotTimeout, 10*time.Minute)
	l.LaunchTimeout = cmp.Or(l.LaunchTimeout, time.Minute)
	l.RecoverTimeout = cmp.Or(l.RecoverTimeout, 30*time.Second)
	l.PingTimeout = cmp.Or(l.PingTimeout, 5*time.Second)
	l.ExecTimeout = cmp.Or(l.ExecTimeout, 30*time.Second)
	l.MaxExecTimeout = cmp.Or(l.MaxExecTimeout, 24*time.Hour)
	l.DrainTimeout = cmp.Or(l.DrainTimeout, 30*time.Second)
	l.KeepEnded = cmp.Or(l.KeepEnded, 1000)
	l.KeepEndedFor = cmp.Or(l.KeepEndedFor, time.Hour)
	return l
}

// childNeed is what a child of a machine with that much memory is expected to take.
func (l Limits) childNeed(shape vmm.Shape) need {
	return need{start: l.MonitorOverhead, growth: min(l.GuestPrivate, int64(shape.MemMiB)<<20)}
}

// parentNeed is what a parent takes: all of its memory is its own.
func (l Limits) parentNeed(shape vmm.Shape) need {
	return need{start: l.MonitorOverhead + int64(shape.MemMiB)<<20}
}

// socketPathRoom is what the longest path below the run directory needs of the 107 bytes that a socket's path may have:
// "/vm/", 18 of an id, "/control.sock" and some to spare.
const socketPathRoom = 45

func (c Config) check() error {
	switch {
	case c.Engine == nil, c.Images == nil, c.Snapshots == nil, c.Memory == nil, c.DB == nil:
		return errors.New("sandbox manager: engine, images, snapshots, memory and database are all needed")
	case !filepath.IsAbs(c.RunDir):
		return fmt.Errorf("run directory %q: must be an absolute path", c.RunDir)
	case len(c.RunDir) > 107-socketPathRoom:
		return fmt.Errorf("run directory %s has %d bytes: choose one of at most %d, a socket's path may have 107 in all", c.RunDir, len(c.RunDir), 107-socketPathRoom)
	}
	return nil
}
