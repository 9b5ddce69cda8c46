package sandbox

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/forkd/forkd/internal/snapshot"
	"github.com/forkd/forkd/internal/store"
	"github.com/forkd/forkd/internal/vmm"
)

// Recover makes the records and reality agree, whatever an earlier daemon was doing when it ended, and starts the Manager's background
// work. Sandboxes that live are taken over, with their deadlines; one whose machine is gone is suspended
// again, as it was before, if it ever was. Those that were just being started or ended are ended: nobody was told of
// them, or somebody wanted that. Pool members are ended and made anew. Half-made snapshots are removed; one that was published is finished.
func (m *Manager) Recover(ctx context.Context) (Recovery, error) {
	m.mu.Lock()
	again := m.recovered || m.draining
	m.mu.Unlock()
	if again {
		return Recovery{}, errors.New("recover: the manager was started before")
	}
	var r Recovery
	pools, err := m.recoverSnapshots(ctx, &r)
	if err != nil {
		return r, fmt.Errorf("recover snapshots: %w", err)
	}
	if err := m.recoverSandboxes(ctx, &r); err != nil {
		return r, fmt.Errorf("recover sandboxes: %w", err)
	}
	if err := m.collect(ctx); err != nil {
		return r, fmt.Errorf("recover snapshots: %w", err)
	}
	if err := m.forgetOnce(ctx); err != nil {
		return r, fmt.Errorf("recover: %w", err)
	}
	m.background.Go(func() { m.deadlines.run(m.life) })
	m.background.Go(func() { m.idles.run(m.life) })
	m.background.Go(func() { m.forgetOld(m.life) })
	m.mu.Lock()
	defer m.mu.Unlock()
	m.recovered = true
	for f, size := range pools {
		f.pool = m.newPool(f, size)
	}
	return r, nil
}

// recoverSnapshots reads the snapshots' records and finishes or removes what was under way. It returns the sizes of the pools.
func (m *Manager) recoverSnapshots(ctx context.Context, r *Recovery) (map[*frozen]int, error) {
	recs, err := m.db.Snapshots(ctx)
	if err != nil {
		return nil, err
	}
	needed, err := m.neededStates(ctx)
	if err != nil {
		return nil, err
	}
	pools := map[*frozen]int{}
	known := map[string]bool{}
	for _, rec := range recs {
		known[rec.ID] = true
		man, err := m.snapshots.Get(rec.ID)
		missing := errors.Is(err, snapshot.ErrNotFound)
		switch {
		case rec.Status == store.SnapshotDeleting || rec.Status == store.SnapshotWriting && err != nil || rec.Owner != "" && !needed[rec.ID]:
			if err := m.recoverRemoval(ctx, rec, missing, r); err != nil {
				return nil, err
			}
			continue
		case rec.Status == store.SnapshotWriting:
			// It was published and only its record was not brought up to date. How long the parent took is lost.
			if err := m.db.MarkSnapshotReady(ctx, rec.ID, 0); err != nil {
				return nil, err
			}
			r.Finished++
		}
		f := stored(rec, man)
		if err != nil {
			f.status, f.warning = StatusFailed, err.Error()
		} else if rec.Damage != "" {
			f.status, f.warning, f.damaged = StatusFailed, rec.Damage, true
		} else if f.tag != "" {
			pools[f] = rec.PoolSize
		}
		m.mu.Lock()
		m.listLocked(f)
		m.mu.Unlock()
	}
	r.Unknown, err = m.unknownSnapshots(known)
	return pools, err
}

// neededStates returns the snapshots that sandboxes are suspended to, or were before they ran again. All others that were made for that
// are leftovers.
func (m *Manager) neededStates(ctx context.Context) (map[string]bool, error) {
	recs, err := m.db.Sandboxes(ctx)
	if err != nil {
		return nil, err
	}
	needed := map[string]bool{}
	for _, rec := range recs {
		if rec.EndedAt.IsZero() && State(rec.State) != StateStarting {
			needed[rec.StateID] = true
		}
	}
	return needed, nil
}

// collect removes what nothing rests on any more: a daemon was killed before it came to that.
func (m *Manager) collect(ctx context.Context) error {
	m.mu.Lock()
	litter := m.litterLocked(nil)
	m.mu.Unlock()
	for _, f := range litter {
		if err := m.db.MarkSnapshotsDeleting(ctx, f.id); err != nil {
			return err
		}
		if err := m.remove(ctx, f); err != nil {
			return err
		}
	}
	return nil
}

// recoverRemoval finishes the removal of a snapshot.
func (m *Manager) recoverRemoval(ctx context.Context, rec store.Snapshot, missing bool, r *Recovery) error {
	if !missing {
		if err := m.snapshots.Remove(rec.ID); err != nil && !errors.Is(err, snapshot.ErrNotFound) {
			return err
		}
	}
	if err := m.db.RemoveSnapshot(ctx, rec.ID); err != nil {
		return err
	}
	if rec.Status == store.SnapshotDeleting {
		r.Finished++
	} else {
		r.Snapshots++
	}
	return nil
}

// unknownSnapshots returns what is published and has no record. It is left alone: it may be all that is left of somebody's work.
func (m *Manager) unknownSnapshots(known map[string]bool) ([]string, error) {
	found, broken, err := m.snapshots.List()
	if err != nil {
		return nil, err
	}
	var ids []string
	for _, man := range found {
		if !known[man.ID] {
			ids = append(ids, man.ID)
		}
	}
	for _, b := range broken {
		if !known[b.ID] {
			ids = append(ids, b.ID)
		}
	}
	slices.Sort(ids)
	return ids, nil
}

const reasonLost = "lost while the daemon was down"

// recoverSandboxes takes over the sandboxes that live and ends everything else that is ours.
func (m *Manager) recoverSandboxes(ctx context.Context, r *Recovery) error {
	recs, err := m.db.Sandboxes(ctx)
	if err != nil {
		return err
	}
	if err := m.readoptAll(ctx, recs, r); err != nil {
		return err
	}
	if err := m.reap(r); err != nil {
		return err
	}
	for _, rec := range recs {
		switch {
		case State(rec.State) == StateStarting:
			r.Aborted++
		case !rec.EndedAt.IsZero() && rec.Reason == reasonKilled: // Kill was about to forget it
		default:
			continue
		}
		if err := m.forget(ctx, rec.ID); err != nil {
			return err
		}
	}
	return m.removeOrphans(ctx)
}

// readoptAll takes over the sandboxes that run or are suspended. One that can't be is no reason to give up the others.
func (m *Manager) readoptAll(ctx context.Context, recs []store.Sandbox, r *Recovery) error {
	var mu sync.Mutex // guards r
	var jobs errgroup.Group
	jobs.SetLimit(max(4, 2*m.limits.Launches))
	for _, rec := range recs {
		var readopt func(context.Context, store.Sandbox) (State, error)
		switch State(rec.State) {
		case StateSuspended:
			readopt = m.readoptSuspended
		case StateRunning:
			readopt = m.readopt
		default:
			continue
		}
		jobs.Go(func() error {
			state, err := readopt(ctx, rec)
			if err != nil {
				return err
			}
			mu.Lock()
			defer mu.Unlock()
			switch state {
			case StateRunning:
				r.Adopted++
			case StateSuspended:
				r.Suspended++
			default:
				r.Lost++
			}
			return nil
		})
	}
	return jobs.Wait()
}

// removeOrphans removes what sandboxes that were lost had been suspended to.
func (m *Manager) removeOrphans(ctx context.Context) error {
	m.mu.Lock()
	var orphans []*frozen
	for _, f := range m.byID {
		if b := m.boxes[f.owner]; f.owner != "" && (b == nil || b.state.Load() != f) {
			orphans = append(orphans, f)
		}
	}
	m.mu.Unlock()
	for _, f := range orphans {
		if err := m.removeState(ctx, f); err != nil {
			return fmt.Errorf("the state of sandbox %s: %w", f.owner, err)
		}
	}
	return nil
}

// readopt takes over one sandbox, and returns what has become of it: it runs, it is suspended again as it was before, or it was lost, which is
// recorded. An error says that none of that can be done.
func (m *Manager) readopt(ctx context.Context, rec store.Sandbox) (State, error) {
	c, err := m.attach(ctx, rec)
	switch {
	case err == nil:
		m.adopt(rec, c)
		return StateRunning, nil
	case ctx.Err() != nil:
		return "", context.Cause(ctx)
	case errors.Is(err, vmm.ErrUnavailable):
		// Not a reason to end it: the daemon was started with another engine than before, or without what the engine needs.
		return "", fault(err, "sandbox %s of the last run can't be taken over", rec.ID)
	}
	if again, ok := m.fallBackTo(rec); ok {
		m.log.Warn("the machine of a sandbox was lost: it is as it was when it was last suspended", "id", rec.ID, "suspended", again.SuspendedAt, "error", err)
		if err := m.db.MarkSuspended(ctx, again.ID, again.StateID, again.SuspendedAt, again.Left); err != nil {
			return "", err
		}
		return m.readoptSuspended(ctx, again)
	}
	m.log.Warn("a sandbox was lost", "id", rec.ID, "error", err)
	m.counts.lost.Add(1)
	state, reason := StateFailed, reasonLost
	var meanwhile *endedMeanwhile
	if errors.As(err, &meanwhile) {
		state, reason = endOf(meanwhile.exit)
		reason += ", while no daemon ran"
	} else if why := limited(m.cfg.Groups.Adopt(rec.ID, rec.Limits)); why != "" {
		reason += ": " + why
	} else if !errors.Is(err, vmm.ErrGone) {
		reason += ": " + err.Error()
	}
	return StateFailed, m.db.EndSandbox(ctx, rec.ID, string(state), reason, time.Now())
}

// endedMeanwhile is the error of a machine whose guest has ended while no daemon ran.
type endedMeanwhile struct{ exit vmm.Exit }

func (e *endedMeanwhile) Error() string { return "its guest has ended: " + e.exit.Detail }
func (*endedMeanwhile) Unwrap() error   { return vmm.ErrGone }

// fallBackTo is the record of a sandbox that ran and is lost, as one that is suspended to what it was suspended to before it ran: decision 0007.
// It returns false when there is nothing like that, or when its time is up.
func (m *Manager) fallBackTo(rec store.Sandbox) (store.Sandbox, bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	state := m.byID[rec.StateID]
	if state == nil || state.owner != rec.ID || state.status != StatusReady {
		return rec, false
	}
	if !rec.Deadline.IsZero() {
		if rec.Left = time.Until(rec.Deadline); rec.Left <= 0 {
			return rec, false
		}
	}
	rec.State, rec.SuspendedAt, rec.Deadline, rec.Process = string(StateSuspended), state.createdAt, time.Time{}, vmm.Process{}
	return rec, true
}

// attach finds the sandbox's machine again and has its agent answer.
func (m *Manager) attach(ctx context.Context, rec store.Sandbox) (_ *child, err error) {
	if rec.Process.PID == 0 || rec.Process.Dir != m.machineDir(rec.ID) {
		return nil, fmt.Errorf("%w: its record has no process of this run directory", vmm.ErrGone)
	}
	asked := ctx
	ctx, cancel := context.WithTimeout(ctx, m.limits.RecoverTimeout)
	defer cancel()
	machine, err := m.engine.Attach(ctx, rec.Process)
	if err != nil {
		return nil, err
	}
	c := newChild(rec.ID, rec.Process.Dir, nil)
	c.group = m.cfg.Groups.Adopt(rec.ID, rec.Limits)
	c.machine = machine
	m.newAgent(c, true)
	defer func() {
		switch {
		case err == nil:
		case asked.Err() != nil || errors.Is(err, vmm.ErrUnavailable):
			// It says nothing about the machine that the daemon is stopping, or can't use its engine: the next one takes it over.
			err = errors.Join(err, ignoreClosed(c.agent.Close()))
			c.giveBack()
		default:
			m.warn(m.saveConsole(context.WithoutCancel(ctx), c), "save the console of a sandbox", rec.ID)
			err = errors.Join(err, machine.Kill(), ignoreClosed(c.agent.Close()))
			c.disconnect()
			c.giveBack()
		}
	}()
	select {
	case <-machine.Done():
		return nil, &endedMeanwhile{exit: machine.Exit()}
	default:
	}
	if err := m.reconnect(c, rec.Network); err != nil { // before it can send anything
		return nil, err
	}
	if err := machine.Resume(ctx); err != nil { // a daemon that was killed may have left it paused
		return nil, err
	}
	if _, err := c.agent.Ping(ctx); err != nil {
		return nil, fmt.Errorf("its guest does not answer: %w", err)
	}
	if err := m.adoptImage(ctx, c, rec); err != nil {
		m.log.Warn("what a sandbox was started from can't be told: it can't be branched or suspended", "id", rec.ID, "error", err)
	}
	return c, nil
}

// startedFrom is the snapshot that a running sandbox's machine was started from.
func startedFrom(rec store.Sandbox) string { return cmp.Or(rec.StateID, rec.SnapshotID) }

// adopt makes a sandbox that outlived the daemon one of ours again.
func (m *Manager) adopt(rec store.Sandbox, c *child) {
	m.mu.Lock()
	defer m.mu.Unlock()
	f := m.originLocked(rec)
	c.grant = m.memory.force(m.limits.childNeed(f.manifest.Shape))
	c.grant.settle()
	b := newBox(f, rec)
	b.child = c
	b.conditions.take(c.heard.newest(), time.Now()) // it said so before it answered, and an earlier daemon has told and counted it
	b.state.Store(m.byID[rec.StateID])
	m.boxes[b.id] = b
	m.census.add(rec.Tenant, rec.KeyID, 1)
	m.watch(b, c)
}

// originLocked returns the snapshot that a sandbox was forked from. One that was forked from a running sandbox may have none that is kept: then
// its own one is made up of the nearest that is. Preconditions: m.mu is held.
func (m *Manager) originLocked(rec store.Sandbox) *frozen {
	if f := m.byID[rec.SnapshotID]; f != nil {
		return f
	}
	for _, b := range m.boxes {
		if b.frozen.id == rec.SnapshotID {
			return b.frozen
		}
	}
	f := &frozen{id: rec.SnapshotID, tenant: rec.Tenant, status: StatusFailed, under: m.byID[rec.AnchorID]}
	if f.under == nil {
		f.tag = rec.SnapshotTag // its snapshot is gone; it can do without
		return f
	}
	f.image, f.imageID, f.manifest = f.under.image, f.under.imageID, f.under.manifest
	f.manifest.ID = f.id
	return f
}

// readoptSuspended takes over a suspended sandbox, or records that what it was suspended to is gone.
func (m *Manager) readoptSuspended(ctx context.Context, rec store.Sandbox) (State, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	state := m.byID[rec.StateID]
	if state == nil {
		return StateFailed, m.db.EndSandbox(ctx, rec.ID, string(StateFailed), reasonLost+": what it was suspended to is gone", time.Now())
	}
	b := newBox(m.originLocked(rec), rec)
	b.state.Store(state)
	m.boxes[b.id] = b
	m.census.add(rec.Tenant, rec.KeyID, 1)
	return StateSuspended, nil
}

// reap ends machines that nobody owns, and removes their directories.
func (m *Manager) reap(r *Recovery) error {
	search, err := newSearcher(m.machinesDir())
	if err != nil {
		return err
	}
	found, err := search.find()
	if err != nil {
		return err
	}
	owned := map[string]bool{}
	for id, b := range m.boxes {
		if b.child != nil { // else it is suspended
			owned[m.machineDir(id)] = true
		}
	}
	stuck := map[string]bool{}
	var mu sync.Mutex // guards r and stuck
	var kills errgroup.Group
	kills.SetLimit(16)
	for _, p := range found {
		if owned[p.dir] {
			continue
		}
		kills.Go(func() error {
			err := p.kill()
			mu.Lock()
			defer mu.Unlock()
			r.Reaped++
			if err != nil {
				stuck[p.dir] = true
				m.log.Error("a leftover process can't be ended", "pid", p.pid, "dir", p.dir, "error", err)
			}
			return nil
		})
	}
	_ = kills.Wait() // the functions return no errors
	keep := func(id string) bool { return owned[m.machineDir(id)] || stuck[m.machineDir(id)] }
	m.warn(m.cfg.Groups.Sweep(keep), "remove leftover control groups", "")
	return m.removeDirs(r, owned, stuck)
}

func (m *Manager) removeDirs(r *Recovery, owned, stuck map[string]bool) error {
	entries, err := os.ReadDir(m.machinesDir())
	if err != nil {
		return err
	}
	for _, e := range entries {
		dir := m.machineDir(e.Name())
		if owned[dir] || stuck[dir] {
			continue
		}
		if err := os.RemoveAll(dir); err != nil {
			return fmt.Errorf("remove leftover: %w", err)
		}
		r.Dirs++
	}
	return nil
}
