package sandbox

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"time"

	"github.com/forkd/forkd/internal/filelock"
	"github.com/forkd/forkd/internal/memory"
	"github.com/forkd/forkd/internal/snapshot"
	"github.com/forkd/forkd/internal/store"
	"github.com/forkd/forkd/internal/vmm"
)

// Manager is the domain. Its methods may be called concurrently, once Recover has returned.
type Manager struct {
	engine    vmm.Engine
	images    Images
	snapshots *snapshot.Store
	cache     *memory.Cache
	db        *store.DB
	cfg       Config
	limits    Limits
	log       *slog.Logger
	lock      *os.File // of the run directory

	launches  *gate // machines being started
	claims    *gate // pool members being woken
	boots     *gate // parents
	branches  *gate // running sandboxes being frozen
	memory    *admission
	looks     looks
	census    *census // sandboxes that there are
	deadlines *deadlines
	idles     *deadlines // when sandboxes that nobody uses are suspended
	counts    counters
	uffd      *os.File                                                       // /dev/userfaultfd, which monitors inherit for live branches; nil where there is none
	noOverlay atomic.Bool                                                    // layers can't be mapped here
	overlay   func(context.Context, vmm.Process, *memory.Image, []int) error // memory.Overlay, but in tests

	branching atomic.Int64 // requests to branch, under way or waiting

	life       context.Context // ends with Shutdown, once requests in flight had their time
	endLife    context.CancelCauseFunc
	background sync.WaitGroup // goroutines that belong to no request
	stopped    chan struct{}  // closed when Shutdown is done

	mu        sync.Mutex
	recovered bool
	draining  bool
	work      sync.WaitGroup      // requests in flight; Add only under mu and while not draining
	frozen    map[string]*frozen  // by tagKey
	byID      map[string]*frozen  // the same, and those without a tag
	tombs     map[string]Snapshot // branches that failed after their request was answered, by tagKey
	boxes     map[string]*box
}

type counters struct {
	cold, claim, failed                       atomic.Uint64 // forks
	kills, expired, shutdowns, panicked, lost atomic.Uint64 // ends
	oomCgroup, oomHost, guestOOM, diskFull    atomic.Uint64
}

var errStopped = &Error{Code: CodeShuttingDown, Message: "the daemon is shutting down", Hint: "try again when it is back", RetryAfter: 5 * time.Second}

// New returns a Manager that owns the run directory: a second one of the same directory is refused. Call Recover before anything else.
func New(cfg Config) (*Manager, error) {
	if err := cfg.check(); err != nil {
		return nil, err
	}
	m := &Manager{
		engine: cfg.Engine, images: cfg.Images, snapshots: cfg.Snapshots, cache: cfg.Memory, db: cfg.DB,
		cfg: cfg, limits: cfg.Limits.withDefaults(), log: cfg.Log,
		overlay: memory.Overlay, frozen: map[string]*frozen{}, byID: map[string]*frozen{}, tombs: map[string]Snapshot{}, boxes: map[string]*box{}, stopped: make(chan struct{}),
	}
	if m.log == nil {
		m.log = slog.New(slog.DiscardHandler)
	}
	m.launches = newGate(m.limits.Launches, m.limits.MaxQueue)
	m.claims = newGate(m.limits.Claims, m.limits.MaxQueue)
	m.boots = newGate(m.limits.Launches, m.limits.MaxQueue)
	m.branches = newGate(m.limits.MaxBranches, math.MaxInt)
	m.census = newCensus()
	m.memory = &admission{budget: m.limits.MemoryBudget, reserve: m.limits.MemoryReserve, available: memAvailable}
	m.deadlines = newDeadlines(m.expire)
	m.idles = newDeadlines(m.idle)
	m.life, m.endLife = context.WithCancelCause(context.Background())
	if err := m.lockRunDir(); err != nil {
		return nil, err
	}
	err := m.endTrials()
	if err != nil {
		return nil, errors.Join(err, m.lock.Close())
	}
	if m.uffd, err = memory.OpenUFFD(); err != nil {
		m.log.Warn("branches will not be live", "error", err)
	}
	return m, nil
}

// lockRunDir makes the run directory ours. The lock goes with the process: machines don't inherit it. It is on the directory itself, so
// that it leaves no file behind.
func (m *Manager) lockRunDir() error {
	err := os.MkdirAll(m.cfg.RunDir, 0o700)
	if err == nil {
		// One name for it, whichever way it was given: processes are told to be ours by the paths they hold.
		m.cfg.RunDir, err = filepath.EvalSymlinks(m.cfg.RunDir)
	}
	for _, dir := range []string{m.machinesDir(), m.consolesDir()} {
		if err == nil {
			err = os.MkdirAll(dir, 0o700)
		}
	}
	if err != nil {
		return fmt.Errorf("run directory: %w", err)
	}
	f, err := os.Open(m.cfg.RunDir)
	if err != nil {
		return fmt.Errorf("lock run directory: %w", err)
	}
	if err := filelock.Soon(f); err != nil {
		_ = f.Close()
		if errors.Is(err, filelock.ErrHeld) {
			return fmt.Errorf("run directory %s belongs to another forkd daemon that runs: stop that one, or choose another directory", m.cfg.RunDir)
		}
		return fmt.Errorf("lock run directory: %w", err)
	}
	m.lock = f
	return nil
}

// TrialsDir is where, below a run directory, an engine makes the directories of machines that it tries a monitor with. New ends those that are left.
func TrialsDir(runDir string) string { return filepath.Join(runDir, "probe") }

// endTrials ends what a daemon that was killed left of a trial: before there are other machines, since it has a user id that nobody keeps for it.
func (m *Manager) endTrials() error {
	dir := TrialsDir(m.cfg.RunDir)
	search, err := newSearcher(dir)
	if err != nil {
		return err
	}
	found, err := search.find()
	if err != nil {
		return err
	}
	for _, p := range found {
		if err := p.kill(); err != nil {
			m.log.Error("what is left of a monitor's trial can't be ended", "pid", p.pid, "dir", p.dir, "error", err)
		}
	}
	if err := os.RemoveAll(dir); err != nil {
		return fmt.Errorf("remove what is left of a monitor's trial: %w", err)
	}
	return nil
}

// machinesDir has a directory for each machine.
func (m *Manager) machinesDir() string { return filepath.Join(m.cfg.RunDir, "vm") }

// consolesDir has the consoles of sandboxes that ended.
func (m *Manager) consolesDir() string { return filepath.Join(m.cfg.RunDir, "console") }

func (m *Manager) machineDir(id string) string { return filepath.Join(m.machinesDir(), id) }

// enter begins a request. Its context ends when Shutdown loses patience; done must be called at the end.
func (m *Manager) enter(ctx context.Context) (_ context.Context, done func(), err error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.draining {
		return nil, nil, errStopped
	}
	if !m.recovered {
		return nil, nil, newError(CodeShuttingDown, nil, "try again in a moment", "the daemon is still starting")
	}
	m.work.Add(1)
	ctx, cancel := context.WithCancelCause(ctx)
	stop := context.AfterFunc(m.life, func() { cancel(errStopped) })
	return ctx, func() {
		stop()
		cancel(nil)
		m.work.Done()
	}, nil
}

// hit is a failpoint.
func (m *Manager) hit(ctx context.Context, point string) error {
	return m.cfg.Failpoints.Hit(ctx, point)
}

func (m *Manager) emit(e Event) {
	if m.cfg.Events != nil {
		e.Time = time.Now()
		m.cfg.Events(e)
	}
}

// Stats returns figures of this moment.
func (m *Manager) Stats() Stats {
	var s Stats
	m.mu.Lock()
	s.Snapshots = len(m.frozen)
	pools := make([]*pool, 0, len(m.frozen))
	for _, f := range m.frozen {
		if f.pool != nil {
			pools = append(pools, f.pool)
		}
	}
	m.mu.Unlock()
	for _, p := range pools {
		st := p.status()
		s.PoolReady += st.Ready
		s.PoolFills += st.Filling
	}
	for _, b := range m.allBoxes() {
		switch b.status() {
		case StateStarting:
			s.Starting++
		case StateSuspended:
			s.Suspended++
		default:
			s.Running++
		}
	}
	s.BranchesActive, s.BranchesQueued = m.branches.load()
	s.LaunchesActive, s.LaunchesQueued = m.launches.load()
	s.MemoryBudgetBytes, s.MemoryReservedBytes = m.memory.stats()
	s.ForksCold, s.ForksClaim, s.ForksFailed = m.counts.cold.Load(), m.counts.claim.Load(), m.counts.failed.Load()
	s.Kills, s.Expired, s.Lost = m.counts.kills.Load(), m.counts.expired.Load(), m.counts.lost.Load()
	s.AnonymousBytes, s.DeniedAttempts = m.look()
	s.Shutdowns, s.Panics = m.counts.shutdowns.Load(), m.counts.panicked.Load()
	s.OOMCgroup, s.OOMHost, s.OOMGuest = m.counts.oomCgroup.Load(), m.counts.oomHost.Load(), m.counts.guestOOM.Load()
	s.DiskFull = m.counts.diskFull.Load()
	cache := m.cache.Stats()
	s.ResidentImages, s.ResidentBytes = cache.Images, cache.Bytes
	return s
}

// Shutdown refuses new work, lets requests in flight go on for a bounded time and then ends them, kills pool members, and lets go of the
// running sandboxes: they live on and the next Recover finds them. With KillOnShutdown they are ended too. The Manager can't be
// used afterwards; a second call waits for the first to be done and returns nil.
func (m *Manager) Shutdown(ctx context.Context) error {
	m.mu.Lock()
	first := !m.draining
	m.draining = true
	m.mu.Unlock()
	if !first {
		<-m.stopped
		return nil
	}
	defer close(m.stopped)
	idle := make(chan struct{})
	go func() { // ends with the requests, which end with m.life at the latest
		m.work.Wait()
		close(idle)
	}()
	drain, cancel := context.WithTimeout(ctx, m.limits.DrainTimeout)
	defer cancel()
	select {
	case <-idle:
	case <-drain.Done():
		m.log.Warn("requests are still in flight: ending them")
	}
	m.endLife(errStopped)
	<-idle
	var errs []error
	if m.cfg.KillOnShutdown { // not before: a request in flight may start one more
		errs = append(errs, m.killAll("the daemon was shut down"))
	}
	m.background.Wait()
	errs = append(errs, m.letGo())
	return errors.Join(errs...)
}

// letGo closes what the Manager holds and ends nothing. Preconditions: nothing runs any more.
func (m *Manager) letGo() error {
	m.mu.Lock()
	defer m.mu.Unlock()
	var errs []error
	for _, b := range m.boxes {
		errs = append(errs, b.letGo())
	}
	for _, f := range m.byID {
		errs = append(errs, f.close())
	}
	errs = append(errs, m.lock.Close())
	if m.uffd != nil {
		errs = append(errs, m.uffd.Close())
	}
	return errors.Join(errs...)
}
