package sandbox

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"sync"
	"time"

	"github.com/forkd/forkd/internal/guest/agentproto"
	"github.com/forkd/forkd/internal/limits"
)

// pool keeps children of one snapshot ready: forked, given a throw-away identity, exercised, and paused. Members have no record in the
// database: their run directory is what a restarted daemon finds them by, and it ends them and makes new ones. Taking them over would
// save a second of work and cost a second kind of recovery.
type pool struct {
	m      *Manager
	frozen *frozen

	life context.Context
	end  context.CancelCauseFunc
	poke chan struct{} // something changed that may call for work
	work sync.WaitGroup

	mu      sync.Mutex
	size    int
	ready   []*member // the newest last: it is the one whose memory is most likely in the caches
	filling int
	fails   int       // refills that failed in a row
	rest    time.Time // no refill before
	lacking time.Time // since when members are missing; zero: none is
	problem string
	closed  bool
}

// member is a child in a pool.
type member struct {
	*child
	taken chan struct{} // closed when it leaves the pool
}

// Retries of a refill that failed.
const (
	refillRetry    = time.Second
	refillRetryMax = 15 * time.Second
)

// A refill costs a processor what tens of claims do, so it leaves those the field: it waits until none goes on, and for what they are
// followed by, but not longer than patience, for a pool that is never filled is none.
const (
	afterClaim = 150 * time.Millisecond
	patience   = 2 * time.Second
)

// newPool returns a pool of a snapshot that is ready. It works until it is closed or the Manager stops.
func (m *Manager) newPool(f *frozen, size int) *pool {
	p := &pool{m: m, frozen: f, size: size, poke: make(chan struct{}, 1)}
	p.life, p.end = context.WithCancelCause(m.life)
	m.background.Go(p.run)
	return p
}

// run fills the pool until its end, and then empties it.
func (p *pool) run() {
	defer p.drain()
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		wanted, rest := p.wants()
		if wanted && rest <= 0 {
			p.yield()
			if err := p.fillOne(); err != nil && p.life.Err() == nil {
				p.note(err)
			}
			if p.life.Err() != nil {
				return
			}
			continue
		}
		timer.Stop()
		if wanted {
			timer.Reset(rest)
		}
		select {
		case <-p.poke:
		case <-timer.C:
		case <-p.life.Done():
			return
		}
	}
}

// wants reports whether a member is missing, and how long the pool rests after refills that failed.
func (p *pool) wants() (bool, time.Duration) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return !p.closed && len(p.ready)+p.filling < p.size, time.Until(p.rest)
}

// yield waits until no claim goes on, or the pool has waited long enough.
func (p *pool) yield() {
	p.mu.Lock()
	p.lackLocked()
	enough := time.NewTimer(time.Until(p.lacking.Add(patience)))
	p.mu.Unlock()
	defer enough.Stop()
	select {
	case <-p.m.claims.idle():
	case <-enough.C:
	case <-p.life.Done():
	}
}

// lackLocked notes that members are missing.
func (p *pool) lackLocked() {
	if p.lacking.IsZero() {
		p.lacking = time.Now()
	}
}

// fillOne waits for a slot that no user wants and has a member made with it. It returns when that has begun, or why it can't.
func (p *pool) fillOne() error {
	t := p.m.launches.enqueueLow()
	if err := t.wait(p.life); err != nil {
		t.release()
		return err
	}
	if wanted, _ := p.wants(); !wanted { // while it waited the pool was shrunk
		t.release()
		return nil
	}
	grants, err := p.m.memory.take(1, p.m.limits.childNeed(p.frozen.manifest.Shape))
	if err == nil && len(grants) == 0 {
		err = errors.New("there is no memory for more members")
	}
	if err != nil {
		t.release()
		return err
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed {
		t.release()
		grants[0].release()
		return nil
	}
	p.filling++
	p.work.Go(func() {
		err := p.make(grants[0])
		t.release()
		p.mu.Lock()
		p.filling--
		p.mu.Unlock()
		p.note(err)
		p.nudge()
	})
	return nil
}

// note remembers how the last refill went, and makes the pool rest after one that failed.
func (p *pool) note(err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if err == nil || p.life.Err() != nil {
		p.fails, p.problem = 0, ""
		return
	}
	rest := min(refillRetry<<min(p.fails, 10), refillRetryMax)
	p.fails++
	p.rest = time.Now().Add(rest)
	if p.problem != err.Error() {
		p.m.log.Warn("a pool can't be filled", "tag", p.frozen.tag, "error", err, "again_in", rest)
	}
	p.problem = err.Error()
}

func (p *pool) nudge() {
	select {
	case p.poke <- struct{}{}:
	default:
	}
}

var poolPoints = launchPoints{prepared: pointPoolPrepared, loaded: pointPoolLoaded, identified: pointPoolIdentified}

// make makes one member. The grant is the member's when it succeeds.
func (p *pool) make(g *grant) (err error) {
	ctx := p.life
	undo := &cleanup{}
	defer func() {
		if err != nil {
			p.m.noteCorrupt(p.frozen, err)
			p.m.warn(undo.run(), "unwind a pool member", p.frozen.tag)
		}
	}()
	undo.add(func() error { g.release(); return nil })
	id := newID("sb") // it becomes the sandbox's
	// A throw-away identity: hooks run when it is claimed.
	who := individual{name: id, env: p.frozen.manifest.Recipe.Env}
	l, err := p.m.limitsOf(p.frozen, limits.Limits{})
	if err != nil {
		return err
	}
	c, err := p.m.launch(ctx, p.frozen, id, g, who, l, poolPoints)
	if err != nil {
		return err
	}
	undo.add(c.dispose)
	ctx, cancel := context.WithTimeout(ctx, p.m.limits.LaunchTimeout)
	defer cancel()
	if err := exercise(ctx, c, p.frozen.manifest.Python); err != nil {
		return err
	}
	if err := c.agent.Quiesce(ctx); err != nil {
		return fmt.Errorf("quiesce: %w", err)
	}
	if err := c.machine.Pause(ctx); err != nil {
		return err
	}
	if err := p.m.hit(ctx, pointPoolReady); err != nil {
		return err
	}
	g.settle()
	p.putBack(&member{child: c})
	return nil
}

// exercise goes the ways that a user will go, so that their first time is not the user's.
func exercise(ctx context.Context, c *child, python bool) error {
	if _, err := c.agent.Ping(ctx); err != nil {
		return fmt.Errorf("exercise ping: %w", err)
	}
	res, err := c.agent.Exec(ctx, agentproto.ExecRequest{Args: []string{"true"}, TimeoutMS: millis(exerciseTimeout)})
	if err != nil && !isAgentCode(err, agentproto.CodeNotFound) { // an image without it is a legal one
		return fmt.Errorf("exercise exec: %w", err)
	}
	if res.TimedOut {
		return fmt.Errorf("exercise exec: true did not end within %v", exerciseTimeout)
	}
	if !python {
		return nil
	}
	if _, err := c.agent.Eval(ctx, agentproto.EvalRequest{Code: "None", TimeoutMS: millis(exerciseTimeout)}); err != nil {
		return fmt.Errorf("exercise eval: %w", err)
	}
	return nil
}

const exerciseTimeout = 20 * time.Second

// take removes up to n members from the pool, without waiting for any. There are none in a nil pool.
func (p *pool) take(n int) []*member {
	if p == nil {
		return nil
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.takeLocked(n)
}

// claim is take for somebody who waits for the members.
func (p *pool) claim(n int) []*member {
	if p == nil {
		return nil
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.lackLocked()
	if soon := time.Now().Add(afterClaim); p.rest.Before(soon) && soon.Before(p.lacking.Add(patience)) {
		p.rest = soon
	}
	return p.takeLocked(n)
}

func (p *pool) takeLocked(n int) []*member {
	n = min(n, len(p.ready))
	taken := slices.Clone(p.ready[len(p.ready)-n:])
	p.ready = slices.Delete(p.ready, len(p.ready)-n, len(p.ready))
	for _, mem := range taken {
		close(mem.taken)
	}
	p.nudge()
	return taken
}

// putBack puts a paused child into the pool, and watches it there. It is ended when the pool doesn't want it.
func (p *pool) putBack(mem *member) {
	mem = &member{child: mem.child, taken: make(chan struct{})}
	p.mu.Lock()
	if p.closed || len(p.ready) >= p.size {
		p.mu.Unlock()
		p.m.warn(mem.dispose(), "end a pool member", mem.id)
		return
	}
	p.ready = append(p.ready, mem)
	if len(p.ready) == p.size {
		p.lacking = time.Time{}
	}
	p.work.Go(func() { p.guard(mem) })
	p.mu.Unlock()
	p.m.emit(Event{Kind: EventPool, Tenant: p.frozen.tenant, Tag: p.frozen.tag})
}

// guard notices that a member died in the pool.
func (p *pool) guard(mem *member) {
	select {
	case <-mem.taken:
		return
	case <-mem.machine.Done():
	}
	p.mu.Lock()
	i := slices.Index(p.ready, mem)
	if i >= 0 {
		p.ready = slices.Delete(p.ready, i, i+1)
	}
	p.mu.Unlock()
	if i < 0 {
		return // it was taken a moment ago
	}
	p.m.log.Warn("a pool member died", "id", mem.id, "tag", p.frozen.tag, "how", exitText(mem.machine))
	p.m.warn(mem.dispose(), "end a pool member", mem.id)
	p.nudge()
}

// resize sets how many members the pool is to hold, and ends those that are too many.
func (p *pool) resize(size int) {
	p.mu.Lock()
	p.size = size
	p.fails, p.rest, p.lacking, p.problem = 0, time.Time{}, time.Time{}, ""
	extra := len(p.ready) - size
	p.mu.Unlock()
	if extra > 0 {
		p.discard(p.take(extra))
	}
	p.nudge()
}

// shed ends up to n pool members, of the fullest pools first, and returns how many: what somebody wants now goes before what is kept
// ready. The pools fill up again when there is room.
func (m *Manager) shed(n int) int {
	m.mu.Lock()
	var pools []*pool
	for _, f := range m.frozen {
		if f.pool != nil {
			pools = append(pools, f.pool)
		}
	}
	m.mu.Unlock()
	slices.SortFunc(pools, func(a, b *pool) int { return cmp.Compare(b.status().Ready, a.status().Ready) })
	ended := 0
	for _, p := range pools {
		p.pause(refillRetry) // lest it takes what is given back here
		members := p.take(n - ended)
		p.discard(members)
		ended += len(members)
	}
	return ended
}

// pause lets the pool rest for a while.
func (p *pool) pause(d time.Duration) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.rest = time.Now().Add(d)
}

func (p *pool) discard(members []*member) {
	var wg sync.WaitGroup
	for _, mem := range members {
		wg.Go(func() { p.m.warn(mem.dispose(), "end a pool member", mem.id) })
	}
	wg.Wait()
}

// close ends the pool's work and its members, and waits for both.
func (p *pool) close() {
	p.end(errStopped)
	p.drain()
}

func (p *pool) drain() {
	p.mu.Lock()
	p.closed = true
	p.mu.Unlock()
	p.discard(p.take(math.MaxInt))
	p.work.Wait()
}

func (p *pool) status() PoolStatus {
	p.mu.Lock()
	defer p.mu.Unlock()
	return PoolStatus{Tag: p.frozen.tag, Size: p.size, Ready: len(p.ready), Filling: p.filling, Problem: p.problem}
}

// SetPool sets how many children of a snapshot are kept ready.
func (m *Manager) SetPool(ctx context.Context, tag string, size int) (PoolStatus, error) {
	if err := checkTag(tag); err != nil {
		return PoolStatus{}, err
	}
	if err := checkPoolSize(size, m.limits); err != nil {
		return PoolStatus{}, err
	}
	ctx, done, err := m.enter(ctx)
	if err != nil {
		return PoolStatus{}, err
	}
	defer done()
	f, release, err := m.useOf(ctx, tag, m.ownLocked)
	if err != nil {
		return PoolStatus{}, err
	}
	defer release()
	if err := m.db.SetPoolSize(context.WithoutCancel(ctx), f.id, size); err != nil {
		return PoolStatus{}, fault(err, "pool of snapshot %s", tag)
	}
	f.pool.resize(size)
	m.emit(Event{Kind: EventPool, Tenant: f.tenant, Tag: tag})
	return f.pool.status(), nil
}

// Pool returns the state of a snapshot's pool.
func (m *Manager) Pool(ctx context.Context, tag string) (PoolStatus, error) {
	if err := checkTag(tag); err != nil {
		return PoolStatus{}, err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	f, err := m.readyLocked(ctx, tag)
	if err != nil {
		return PoolStatus{}, err
	}
	return f.poolStatus(), nil
}

// poolStatus is empty while the snapshot is not ready. Preconditions: Manager.mu is held.
func (f *frozen) poolStatus() PoolStatus {
	if f.pool == nil {
		return PoolStatus{Tag: f.tag}
	}
	return f.pool.status()
}
