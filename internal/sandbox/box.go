package sandbox

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/forkd/forkd/internal/store"
	"github.com/forkd/forkd/internal/vmm"
)

// moves are the legal moves between states.
var moves = map[State][]State{
	StateStarting:  {StateRunning, StateFailed},
	StateRunning:   {StateSuspended, StateStopped, StateFailed},
	StateSuspended: {StateRunning, StateStopped, StateFailed},
}

func (s State) canBecome(to State) bool { return slices.Contains(moves[s], to) }

// box is a sandbox that lives.
type box struct {
	id     string
	tenant string // whose it is
	frozen *frozen

	life context.Context // ends when the sandbox starts to end; its cause is an *Error
	end  context.CancelCauseFunc
	gone chan struct{} // closed when it has ended

	freeze chan struct{} // holds a token while it is frozen, suspended or resumed

	mu         sync.Mutex
	rec        store.Sandbox // what is persisted
	child      *child        // nil until it runs, and while it is suspended
	ending     bool
	suspending bool            // a suspension is under way: no new requests
	active     int             // requests under way
	owed       []*liveSnapshot // promised to somebody, and being captured still

	// What it was last suspended to; nil: never. Set with mu held, and read without where Manager.mu is.
	state atomic.Pointer[frozen]

	conditions conditions
}

func newBox(f *frozen, rec store.Sandbox) *box {
	b := &box{id: rec.ID, tenant: rec.Tenant, frozen: f, rec: rec, gone: make(chan struct{}), freeze: make(chan struct{}, 1)}
	b.life, b.end = context.WithCancelCause(context.Background())
	return b
}

func (b *box) status() State {
	b.mu.Lock()
	defer b.mu.Unlock()
	return State(b.rec.State)
}

// view is the sandbox as users see it.
func (b *box) view() Sandbox {
	b.mu.Lock()
	defer b.mu.Unlock()
	s := viewOf(b.rec)
	s.Conditions = b.conditions.list()
	if b.child != nil && b.child.network != nil {
		s.GuestAddr, s.Netns = b.child.network.GuestAddr(), fmt.Sprintf("/proc/%d/ns/net", s.PID)
	}
	return s
}

func viewOf(r store.Sandbox) Sandbox {
	s := Sandbox{
		ID: r.ID, SnapshotID: r.SnapshotID, SnapshotTag: r.SnapshotTag, State: State(r.State),
		CreatedAt: r.CreatedAt, Deadline: r.Deadline, EndedAt: r.EndedAt,
		Env: maps.Clone(r.Env), Metadata: maps.Clone(r.Metadata),
		Network: r.Network, MemoryLimitMiB: r.MemoryLimitMiB, Limits: r.Limits, Path: r.Path, BranchCount: r.BranchCount,
		Reason: r.Reason, ReadyIn: r.ReadyIn,
		Name: r.Name, AutoSuspend: r.AutoSuspend, AutoResume: r.AutoResume, SuspendedAt: r.SuspendedAt,
		Tenant: r.Tenant, Secrets: slices.Clone(r.Secrets),
	}
	if r.EndedAt.IsZero() {
		s.PID, s.Confinement = r.Process.PID, r.Process.Confinement
	}
	return s
}

// letGo closes our side of the sandbox and leaves it alone.
func (b *box) letGo() error {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.child == nil {
		return nil
	}
	return b.child.letGo()
}

// record persists a sandbox that is about to be started and makes it visible.
func (m *Manager) record(ctx context.Context, f *frozen, rec store.Sandbox) (*box, error) {
	who := callerOf(ctx)
	rec.Tenant, rec.KeyID = who.Tenant, who.KeyID
	rec.SnapshotID, rec.SnapshotTag, rec.State, rec.CreatedAt = f.id, f.tag, string(StateStarting), time.Now()
	m.mu.Lock()
	if a := anchorLocked(f); a != nil {
		rec.AnchorID, rec.SnapshotTag = a.id, cmp.Or(f.tag, a.tag)
	}
	m.mu.Unlock()
	if err := m.db.AddSandbox(context.WithoutCancel(ctx), rec); err != nil {
		if rec.Name != "" && errors.Is(err, store.ErrExists) {
			return nil, nameTaken(rec.Name)
		}
		return nil, err
	}
	b := newBox(f, rec)
	m.mu.Lock()
	defer m.mu.Unlock()
	m.boxes[b.id] = b
	return b, nil
}

// erase undoes record.
func (m *Manager) erase(b *box) error {
	m.mu.Lock()
	delete(m.boxes, b.id)
	m.mu.Unlock()
	b.end(newError(CodeSandboxGone, nil, "", "sandbox %s was never ready", b.id))
	m.dropUnkept(b.frozen)
	return m.db.RemoveSandbox(context.Background(), b.id)
}

// commit makes a started sandbox run: from here on it is its owner's. When it returns an error the sandbox is as before.
func (m *Manager) commit(ctx context.Context, b *box, c *child, readyIn, timeout time.Duration, point string) error {
	var deadline time.Time
	if timeout > 0 {
		deadline = time.Now().Add(timeout)
	}
	process := c.machine.Process()
	if err := m.db.MarkRunning(context.WithoutCancel(ctx), b.id, process, readyIn, deadline); err != nil {
		return err
	}
	if err := m.hit(ctx, point); err != nil {
		return err
	}
	b.mu.Lock()
	b.rec.State, b.rec.Process, b.rec.ReadyIn, b.rec.Deadline = string(StateRunning), process, readyIn, deadline
	b.child = c
	b.mu.Unlock()
	c.grant.settle()
	m.timed(TimeReady, b.frozen, b.view().Path, readyIn)
	m.emit(Event{Kind: EventSandboxState, Tenant: b.tenant, SandboxID: b.id, Tag: b.frozen.tag, State: StateRunning})
	m.watch(b, c) // from here on it may end at any moment
	return nil
}

// watch ends a sandbox whose machine ended, and arms its timers.
func (m *Manager) watch(b *box, c *child) {
	m.background.Go(func() {
		news := c.heard.news
		var again <-chan time.Time
		for {
			select {
			case <-news:
				m.notice(b, c)
				news, again = nil, time.After(noticePause)
			case <-again:
				news = c.heard.news
			case <-c.machine.Done():
				m.notice(b, c) // the last thing it said may be why
				m.machineEnded(b, c)
				return
			case <-c.life.Done():
				return
			case <-b.life.Done():
				return
			case <-m.life.Done():
				return
			}
		}
	})
	m.deadlines.set(b.id, b.view().Deadline)
	m.rearm(b)
}

// machineEnded ends a sandbox whose machine has ended.
func (m *Manager) machineEnded(b *box, c *child) {
	state, reason := c.ended()
	// Else it was suspended, and its machine was ended for that.
	stillIts := func(store.Sandbox) bool { return b.child == c }
	group := c.group.Events() // of a group that goes with the machine
	err := m.finish(b, ending{state: state, reason: reason, keep: true, onlyIf: stillIts})
	if !errors.Is(err, errSpared) {
		m.countEnd(c, group.OOMKills > 0)
		m.warn(err, "end a sandbox whose machine is gone", b.id)
	}
}

// countEnd counts the end of a machine by its reason; oom says that the host killed it for want of memory.
func (m *Manager) countEnd(c *child, oom bool) {
	switch c.machine.Exit().Reason {
	case vmm.ExitShutdown:
		m.counts.shutdowns.Add(1)
	case vmm.ExitPanicked:
		m.counts.panicked.Add(1)
	default:
		m.counts.lost.Add(1)
	}
	switch {
	case !oom:
	case c.group.Limits().MemoryMiB > 0:
		m.counts.oomCgroup.Add(1)
	default:
		m.counts.oomHost.Add(1)
	}
}

// endOf turns the end of a machine into that of its sandbox.
func endOf(exit vmm.Exit) (State, string) {
	switch exit.Reason {
	case vmm.ExitPanicked:
		return StateFailed, "the guest's kernel panicked: " + exit.Detail
	case vmm.ExitShutdown:
		return StateStopped, "the guest shut down: " + exit.Detail
	case vmm.ExitKilled:
		return StateStopped, "killed"
	default:
		return StateFailed, "the monitor ended by itself: " + exit.Detail
	}
}

// ending is how a sandbox ends.
type ending struct {
	state  State
	reason string
	keep   bool // its record and console, for a while; else it is forgotten at once

	// onlyIf is asked, when it is set, at the moment that decides, with the sandbox's lock held. A sandbox for which it says no is left alone
	// with errSpared.
	onlyIf func(store.Sandbox) bool
}

var (
	errEnded  = errors.New("sandbox was ended by somebody else") // and is gone now
	errSpared = errors.New("sandbox is not to be ended")
)

// finish ends a sandbox: the one way for all of them. What can't be persisted doesn't keep the machine alive.
func (m *Manager) finish(b *box, how ending) error {
	b.mu.Lock()
	from := State(b.rec.State)
	if b.ending {
		b.mu.Unlock()
		<-b.gone
		return errEnded
	}
	if how.onlyIf != nil && !how.onlyIf(b.rec) {
		b.mu.Unlock()
		return errSpared
	}
	if !from.canBecome(how.state) || b.child == nil && from != StateSuspended {
		b.mu.Unlock()
		return newError(CodeInvalidState, nil, "", "sandbox %s is %s: it can't become %s", b.id, from, how.state)
	}
	b.ending = true
	now := time.Now()
	b.rec.State, b.rec.Reason, b.rec.EndedAt = string(how.state), how.reason, now
	c, state := b.child, b.state.Load()
	// Under the lock: who sees that it is ending finds the cause in its life.
	b.end(newError(CodeSandboxGone, nil, "`forkd ls` shows what lives", "sandbox %s has ended: %s", b.id, how.reason))
	b.mu.Unlock()
	defer close(b.gone)
	m.deadlines.set(b.id, time.Time{})
	m.idles.set(b.id, time.Time{})

	err := m.takeDown(b, c, state, how, now)
	m.mu.Lock()
	delete(m.boxes, b.id)
	m.mu.Unlock()
	m.census.add(b.tenant, b.rec.KeyID, -1)
	m.emit(Event{Kind: EventSandboxState, Tenant: b.tenant, SandboxID: b.id, Tag: b.frozen.tag, State: how.state, Reason: how.reason})
	return err
}

// takeDown persists the end of a sandbox and carries it out. It may have no machine, and no suspended state.
func (m *Manager) takeDown(b *box, c *child, state *frozen, how ending, now time.Time) error {
	ctx := context.Background() // nobody's patience counts: a process that is to end must end
	errs := []error{m.db.EndSandbox(ctx, b.id, string(how.state), how.reason, now), m.hit(ctx, pointKillRecorded)}
	var killed error
	if c != nil {
		if how.keep {
			errs = append(errs, m.saveConsole(ctx, c))
		}
		killed = c.dispose()
	}
	errs = append(errs, m.hit(ctx, pointKillEnded))
	if state != nil {
		errs = append(errs, m.removeState(ctx, state))
	}
	if !how.keep && killed == nil {
		errs = append(errs, m.db.RemoveSandbox(ctx, b.id), m.hit(ctx, pointKillRemoved))
	}
	m.warn(errors.Join(errs...), "record the end of a sandbox", b.id)
	return fault(killed, "sandbox %s could not be ended; its process is left for the daemon's next start", b.id)
}

// saveConsole keeps the console of a machine that is about to go.
func (m *Manager) saveConsole(ctx context.Context, c *child) error {
	console, ok := c.machine.(vmm.Console)
	if !ok {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, time.Second)
	defer cancel()
	text, err := console.Console(ctx)
	if errors.Is(err, vmm.ErrGone) || err == nil && len(text) == 0 {
		return nil
	}
	if err != nil {
		return err
	}
	return os.WriteFile(m.consoleFile(c.id), text, 0o600)
}

func (m *Manager) consoleFile(id string) string { return filepath.Join(m.consolesDir(), id) }

// expire ends a sandbox whose deadline has passed.
func (m *Manager) expire(id string) {
	m.mu.Lock()
	b := m.boxes[id]
	m.mu.Unlock()
	if b == nil {
		return
	}
	b.settle(m.life)
	passed := func(r store.Sandbox) bool { return !r.Deadline.IsZero() && !r.Deadline.After(time.Now()) }
	err := m.finish(b, ending{state: StateStopped, reason: "its deadline passed", keep: true, onlyIf: passed})
	switch {
	case err == nil:
		m.counts.expired.Add(1)
	case errors.Is(err, errSpared): // the deadline was moved meanwhile
		m.deadlines.set(id, b.view().Deadline)
	case !errors.Is(err, errEnded):
		m.warn(err, "end a sandbox at its deadline", id)
	}
}

// killAll ends every sandbox that runs. Those that are suspended stay so.
func (m *Manager) killAll(reason string) error {
	boxes := slices.DeleteFunc(m.allBoxes(), func(b *box) bool { return b.status() == StateSuspended })
	return m.finishAll(boxes, ending{state: StateStopped, reason: reason})
}

// finishAll ends sandboxes side by side.
func (m *Manager) finishAll(boxes []*box, how ending) error {
	errs := make([]error, len(boxes))
	var wg sync.WaitGroup
	slots := make(chan struct{}, max(m.limits.Launches*2, 4))
	for i, b := range boxes {
		slots <- struct{}{}
		wg.Go(func() {
			defer func() { <-slots }()
			if err := m.finish(b, how); !errors.Is(err, errEnded) {
				errs[i] = err
			}
		})
	}
	wg.Wait()
	return errors.Join(errs...)
}

// allBoxes are the sandboxes that have not ended. Who wants to know more of them asks each, without m.mu: a sandbox's own lock is held over writes
// to the database.
func (m *Manager) allBoxes() []*box {
	m.mu.Lock()
	defer m.mu.Unlock()
	return slices.Collect(maps.Values(m.boxes))
}

// live returns a sandbox that has not ended.
func (m *Manager) live(id string) (*box, bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	b, ok := m.boxes[id]
	return b, ok
}

func notFound(id string) error {
	return newError(CodeSandboxNotFound, nil, "`forkd ls` lists the sandboxes", "no sandbox has the id %s", fmt.Sprintf("%.80s", id))
}
