package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/forkd/forkd/client"
	"github.com/forkd/forkd/internal/audit"
	"github.com/forkd/forkd/internal/confine"
	"github.com/forkd/forkd/internal/failpoint"
	"github.com/forkd/forkd/internal/filelock"
	"github.com/forkd/forkd/internal/hostnet"
	"github.com/forkd/forkd/internal/image"
	"github.com/forkd/forkd/internal/image/agentbin"
	"github.com/forkd/forkd/internal/keys"
	"github.com/forkd/forkd/internal/limits"
	"github.com/forkd/forkd/internal/memory"
	"github.com/forkd/forkd/internal/sandbox"
	"github.com/forkd/forkd/internal/server"
	"github.com/forkd/forkd/internal/snapshot"
	"github.com/forkd/forkd/internal/store"
	"github.com/forkd/forkd/internal/transfer"
	"github.com/forkd/forkd/internal/vmm"
	"github.com/forkd/forkd/internal/vmm/choice"
	"github.com/forkd/forkd/internal/vmm/firecracker"
	"github.com/forkd/forkd/internal/vmm/qemu"
)

// parts are what a daemon is made of and tests replace.
type parts struct {
	engine func(f *daemonFlags, users *confine.Users, log *slog.Logger) vmm.Engine
	agent  func() ([]byte, error) // the guest's agent, for images

	networks bool // the host's may be touched
}

func productParts() parts {
	return parts{
		engine: newEngine,
		agent:  agentbin.Agent,

		networks: true,
	}
}

// newEngine is the engine that was asked for, or the best that this host can run.
func newEngine(f *daemonFlags, users *confine.Users, log *slog.Logger) vmm.Engine {
	emulator := qemu.New(qemu.Options{Binary: f.QEMU, Accel: f.Accel, Users: users, Log: log})
	fire := firecracker.New(firecracker.Options{Binary: f.Firecracker, CPUTemplate: f.CPUTemplate, Jailer: f.Jailer,
		Users: users, Trials: sandbox.TrialsDir(f.RunDir), Log: log})
	switch f.Engine {
	case engineQEMU:
		return emulator
	case engineFirecracker:
		return fire
	}
	if f.Accel == qemu.AccelTCG { // emulation was asked for
		return emulator
	}
	return choice.New(log, choice.Candidate{Name: engineFirecracker, Engine: fire}, choice.Candidate{Name: engineQEMU, Engine: emulator})
}

// Values of --engine but auto.
const (
	engineQEMU        = "qemu"
	engineFirecracker = "firecracker"
)

// auditDir is the record of requests, below the data directory.
const auditDir = "audit"

// daemonFlags say where a daemon keeps things and what it may use.
type daemonFlags struct {
	Data            string   `placeholder:"DIR" help:"Images, snapshots and state. Default: /var/lib/forkd, or below $$XDG_DATA_HOME."`
	RunDir          string   `name:"run" placeholder:"DIR" help:"Sockets and records of running machines. Default: /run/forkd, or below $$XDG_RUNTIME_DIR."`
	Cache           string   `placeholder:"DIR" help:"What makes builds of images faster and may be deleted. Default: /var/cache/forkd, or below $$XDG_CACHE_HOME."`
	Engine          string   `enum:"auto,qemu,firecracker" default:"auto" help:"What runs machines: ${enum}. auto: Firecracker where it and a working KVM are there, else QEMU."`
	Firecracker     string   `name:"firecracker" env:"FORKD_FIRECRACKER" placeholder:"FILE" help:"The Firecracker binary, 1.12 or newer. Default: the one in $$PATH."`
	Jailer          string   `name:"jailer" env:"FORKD_JAILER" placeholder:"FILE" help:"Start each Firecracker through its jailer, of the same release. Needs --engine firecracker, and root. Default: the daemon confines it itself."`
	PIDsLimit       int      `name:"default-pids-limit" default:"256" placeholder:"N" help:"Processes and threads that a monitor may have, unless a request says otherwise. 0: no limit."`
	CgroupParent    string   `name:"cgroup-parent" placeholder:"GROUP" help:"Control group, of version 2, to make those of machines in. Default: the slice that the daemon is in."`
	Confine         string   `enum:"auto,require,off" default:"auto" help:"Lock each machine's monitor in, as a user of its own that sees nothing of the host: ${enum}. auto: when the daemon is root."`
	UIDBase         uint32   `name:"uid-base" placeholder:"UID" help:"The first of the 65536 user ids that monitors are given; nobody else may have one of them. Default: one above 1900000000 that depends on the run directory."`
	CPUTemplate     string   `name:"cpu-template" placeholder:"NAME" help:"Firecracker's CPU template for new parents (T2, T2S, T2CL, T2A, C3): their snapshots restore on other processors that have it."`
	QEMU            string   `name:"qemu" placeholder:"FILE" help:"The QEMU binary. Default: the one in $$PATH."`
	Accel           string   `enum:"auto,kvm,tcg" default:"auto" help:"KVM, emulation, or KVM if a test guest runs on it: ${enum}."`
	MemoryBudgetMiB int64    `name:"memory-budget-mib" placeholder:"MIB" help:"Memory for machines in all. Default: what the host has to spare."`
	CacheMemoryMiB  int64    `name:"resident-mib" placeholder:"MIB" help:"Memory for snapshots that are loaded and not in use. Default: a quarter of the host's."`
	Compress        bool     `help:"Compress the memory of new snapshots: less disk, more time to freeze and to load."`
	MaxLaunches     int      `placeholder:"N" help:"Machines that are started at the same time; the others wait. Default: the number of CPUs."`
	Networking      string   `enum:"auto,on,off" default:"auto" help:"Networks for machines: auto (where this process may make them), on (or don't start), or off: ${enum}."`
	NetworkRange    string   `default:"10.118.0.0/16" placeholder:"CIDR" help:"A /16 for machines' addresses on this host, which nothing else uses."`
	NetworkPool     int      `default:"32" placeholder:"N" help:"Networks to keep ready: as many as machines may be started in a burst."`
	DNS             []string `name:"dns" placeholder:"SERVER" help:"Name servers that machines' names are asked of. Default: the host's."`
	MaxBranches     int      `placeholder:"N" help:"Running sandboxes that are frozen at the same time; the others wait. Default: twice the number of CPUs."`

	MaxSandboxes       int     `placeholder:"N" help:"Sandboxes that may be there in all, suspended ones too. Default: no limit but memory."`
	MaxTenantSandboxes int     `placeholder:"N" help:"Sandboxes that each tenant may have. Default: no limit of its own."`
	KeyRate            float64 `placeholder:"R" help:"Requests a second that each key may make, unless it was made with a rate of its own. Default: no limit."`
	KeyBurst           int     `placeholder:"N" help:"Requests that it may make at once. Default: two seconds' worth."`
	AuditFiles         int     `placeholder:"N" help:"Files of 64 MiB that the audit record is kept in; then the oldest is deleted for each new one. Default: all are kept."`
}

// keyLimit is the limit of keys that have none of their own.
func (f *daemonFlags) keyLimit() keys.Limit { return keys.Limit{Rate: f.KeyRate, Burst: f.KeyBurst} }

// fillDefaults decides where things are: system directories for root, the user's own for others.
func (f *daemonFlags) fillDefaults(getenv func(string) string) error {
	home := getenv("HOME")
	for _, d := range []struct {
		dir                  *string
		root, variable, user string
	}{
		{&f.Data, "/var/lib/forkd", "XDG_DATA_HOME", ".local/share"},
		{&f.Cache, "/var/cache/forkd", "XDG_CACHE_HOME", ".cache"},
	} {
		switch {
		case *d.dir != "":
		case os.Geteuid() == 0:
			*d.dir = d.root
		case getenv(d.variable) != "":
			*d.dir = filepath.Join(getenv(d.variable), "forkd")
		default:
			*d.dir = filepath.Join(home, d.user, "forkd")
		}
	}
	if f.RunDir == "" {
		f.RunDir = filepath.Dir(client.SocketPath(getenv))
	}
	for _, dir := range []*string{&f.Data, &f.Cache, &f.RunDir} {
		abs, err := filepath.Abs(*dir)
		if err != nil {
			return fmt.Errorf("directory %s: %w", *dir, err)
		}
		*dir = abs
	}
	return nil
}

// daemon is everything that is open while a daemon runs.
type daemon struct {
	engine  vmm.Engine
	images  *imageService
	manager *sandbox.Manager
	packs   *transfer.Service
	events  *server.Events
	timings *server.Timings
	audit   *audit.Log
	keys    *keys.Ring

	networks   *hostnet.Network // nil: none, for that reason
	noNetworks error

	closers []func() error // in the order of opening
}

// openDaemon opens the stores and builds the domain over them. killAll makes its shutdown end the sandboxes as well.
func (p *program) openDaemon(f *daemonFlags, log *slog.Logger, killAll bool) (_ *daemon, err error) {
	d := &daemon{}
	defer func() {
		if err != nil {
			err = errors.Join(err, d.close())
		}
	}()
	if f.AuditFiles < 0 {
		return nil, &codedError{code: exitUsage, err: fmt.Errorf("--audit-files %d: give how many files the audit record keeps, or leave it out to keep all", f.AuditFiles)}
	}
	for _, dir := range []string{f.Data, f.RunDir, f.Cache} {
		if err := os.MkdirAll(dir, 0o700); err != nil {
			return nil, fmt.Errorf("make the daemon's directory: %w", err)
		}
	}
	if err := d.lock(filepath.Join(f.Data, "lock")); err != nil {
		return nil, err
	}
	points, err := failpoints(p.getenv)
	if err != nil {
		return nil, err
	}
	agent, agentErr := p.parts.agent()
	st, err := d.openStores(p.ctx, f, agent)
	if err != nil {
		return nil, err
	}
	users, err := f.confinement(log)
	if err != nil {
		return nil, err
	}
	if err := f.checkJailer(p.ctx, users, log); err != nil {
		return nil, err
	}
	d.engine = p.parts.engine(f, users, log.With("part", "engine"))
	d.events, d.timings = server.NewEvents(), server.NewTimings()
	if d.audit, err = audit.Open(filepath.Join(f.Data, auditDir), audit.Options{Files: f.AuditFiles}); err != nil {
		return nil, err
	}
	d.closers = append(d.closers, d.audit.Close)
	groups, err := f.groups(log)
	if err != nil {
		return nil, err
	}
	d.closers = append(d.closers, groups.Close)
	networks, err := d.openNetworks(f, p.parts.networks, log.With("part", "network"))
	if err != nil {
		return nil, err
	}
	d.manager, err = sandbox.New(sandbox.Config{
		Networks: networks, NoNetworks: d.noNetworks,
		Engine: d.engine, Images: st.images, Snapshots: st.snapshots, Memory: memory.NewCache(residentBudget(f)), DB: st.db, RunDir: f.RunDir, Groups: groups,
		Limits: sandbox.Limits{Launches: f.MaxLaunches, MaxBranches: f.MaxBranches, MemoryBudget: f.MemoryBudgetMiB << 20, Default: limits.Limits{PIDs: f.PIDsLimit},
			MaxSandboxes: f.MaxSandboxes, MaxTenantSandboxes: f.MaxTenantSandboxes},
		Log: log.With("part", "sandbox"), Events: d.events.Publish, Timings: d.timings.Observe, KillOnShutdown: killAll, Failpoints: points,
	})
	if err != nil {
		return nil, err
	}
	d.packs = transfer.New(transfer.Config{Snapshots: st.snapshots, Images: st.images, Domain: d.manager, Failpoints: points})
	d.images = &imageService{store: st.images, db: st.db, packs: d.packs, agentErr: agentErr}
	d.keys, err = keys.Open(p.ctx, st.db, f.keyLimit())
	if err != nil {
		return nil, err
	}
	return d, nil
}

// stores are what a daemon keeps on disk.
type stores struct {
	db        *store.DB
	snapshots *snapshot.Store
	images    *image.Store
}

// openStores opens the stores and takes back what an unpacking that crashed left half.
func (d *daemon) openStores(ctx context.Context, f *daemonFlags, agent []byte) (s stores, err error) {
	if s.db, err = store.Open(filepath.Join(f.Data, "forkd.db")); err != nil {
		return s, err
	}
	d.closers = append(d.closers, s.db.Close)
	var options []snapshot.Option
	if f.Compress {
		options = append(options, snapshot.WithCompression())
	}
	if s.snapshots, err = snapshot.Open(filepath.Join(f.Data, "snapshots"), options...); err != nil {
		return s, err
	}
	if s.images, err = image.Open(filepath.Join(f.Data, "images"), f.Cache, agent); err != nil {
		return s, err
	}
	records, err := s.db.Snapshots(ctx)
	if err != nil {
		return s, err
	}
	return s, transfer.Recover(ctx, s.snapshots, s.images, func(id string) bool {
		return slices.ContainsFunc(records, func(r store.Snapshot) bool { return r.ID == id })
	})
}

// failpoints are the faults that a test asked for in the environment; nil for none.
func failpoints(getenv func(string) string) (*failpoint.Set, error) {
	points, err := failpoint.Parse(getenv(failpoint.Variable))
	if err == nil {
		err = points.Check(slices.Concat(sandbox.Points(), transfer.Points())...)
	}
	if err != nil {
		return nil, fmt.Errorf("%s: %w", failpoint.Variable, err)
	}
	return points, nil
}

// residentBudget is the memory for images that nothing uses at the moment.
func residentBudget(f *daemonFlags) int64 {
	if f.CacheMemoryMiB > 0 {
		return f.CacheMemoryMiB << 20
	}
	var info unix.Sysinfo_t
	if unix.Sysinfo(&info) != nil {
		return 1 << 30
	}
	return int64(info.Totalram) * int64(info.Unit) / 4
}

// lock keeps a second daemon away from the same data.
func (d *daemon) lock(path string) error {
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return fmt.Errorf("lock the data directory: %w", err)
	}
	d.closers = append(d.closers, f.Close)
	err = filelock.Soon(f)
	if errors.Is(err, filelock.ErrHeld) {
		return &codedError{code: exitError, err: fmt.Errorf("the data in %s is in use by another daemon", filepath.Dir(path)),
			hint: "use that daemon, stop it, or give this one a --data and a --run of its own"}
	}
	if err != nil {
		return fmt.Errorf("lock the data directory: %w", err)
	}
	return nil
}

// close closes what was opened, the last first.
func (d *daemon) close() error {
	var errs []error
	for i := len(d.closers) - 1; i >= 0; i-- {
		errs = append(errs, d.closers[i]())
	}
	d.closers = nil
	return errors.Join(errs...)
}
