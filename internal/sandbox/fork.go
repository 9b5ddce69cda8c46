package sandbox

import (
	"context"
	"errors"
	"sync"
	"time"

	"github.com/forkd/forkd/internal/store"
)

// Fork starts children of a snapshot: from its pool as far as that goes, the others cold. It returns a result for each, in order, when
// all of them are ready or have failed; an error only when nothing was tried. When ctx ends before that, the children are ended
// again: nobody would know of them.
func (m *Manager) Fork(ctx context.Context, req ForkRequest) ([]ForkResult, error) {
	if err := req.check(); err != nil {
		return nil, err
	}
	ctx, done, err := m.enter(ctx)
	if err != nil {
		return nil, err
	}
	defer done()
	f, release, err := m.useLive(ctx, req.Tag)
	if err != nil {
		return nil, err
	}
	defer release()
	return m.forkAll(ctx, f, req)
}

// forkAll starts the children of a snapshot. Preconditions: it is kept from being deleted.
func (m *Manager) forkAll(ctx context.Context, f *frozen, req ForkRequest) (_ []ForkResult, err error) {
	if req.Limits, err = m.limitsOf(f, req.Limits); err != nil {
		return nil, err
	}
	network, err := m.network(callerOf(ctx), f, req.Network)
	if err != nil {
		return nil, err
	}
	req.Network = &network
	who := callerOf(ctx)
	if err := m.census.take(m.limits, who, req.N); err != nil {
		return nil, err
	}
	boxes := make([]*box, req.N)
	defer func() { m.census.add(who.Tenant, who.KeyID, -missing(boxes)) }() // the others give their place back when they end
	starts, err := m.plan(who.Tenant, f, req)
	if err != nil {
		return nil, err
	}
	results := make([]ForkResult, req.N)
	var wg sync.WaitGroup
	for i, s := range starts {
		wg.Go(func() {
			boxes[i], results[i].Err = m.start(ctx, f, req, s)
		})
	}
	wg.Wait()
	if ctx.Err() != nil {
		m.revoke(boxes)
		return nil, fault(context.Cause(ctx), "fork of snapshot %s was given up", f.name())
	}
	for i, b := range boxes {
		if b != nil {
			view := b.view()
			results[i].Sandbox = &view
		}
	}
	return results, nil
}

// missing counts the children that did not come to be.
func missing(boxes []*box) int {
	n := 0
	for _, b := range boxes {
		if b == nil {
			n++
		}
	}
	return n
}

// revoke ends sandboxes that nobody was told of.
func (m *Manager) revoke(boxes []*box) {
	var made []*box
	for _, b := range boxes {
		if b != nil {
			made = append(made, b)
		}
	}
	m.warn(m.finishAll(made, ending{state: StateStopped, reason: "the request that started it was given up"}), "end children of a request", "")
}

// monitorAtMost is the memory in MiB that a monitor takes beside guest memory at most: its own pages and a translation cache.
const monitorAtMost = 64

// start is how one child of a request is to be started.
type start struct {
	member *member // to claim; nil: cold
	grant  *grant  // for a cold start
	ticket *ticket // nil when refused
	refuse error
}

// plan decides for each child where it comes from and takes its place in the queue, in order.
func (m *Manager) plan(owner string, f *frozen, req ForkRequest) ([]start, error) {
	var members []*member
	if req.Path != PathCold && !m.claims.full(owner) {
		members = f.pool.claim(req.N)
	}
	cold := req.N - len(members)
	grants, refuse := m.admit(owner, f, req, cold)
	if len(members)+len(grants) == 0 {
		m.counts.failed.Add(uint64(req.N))
		return nil, refuse
	}
	starts := make([]start, req.N)
	for i := range starts {
		switch {
		case i < len(members):
			starts[i] = start{member: members[i], ticket: m.claims.enqueue(owner)}
		case i < len(members)+len(grants):
			starts[i] = start{grant: grants[i-len(members)], ticket: m.launches.enqueue(owner)}
		default:
			starts[i] = start{refuse: refuse}
		}
	}
	return starts, nil
}

// admit hands out memory for up to n cold starts, and says why the others are refused.
func (m *Manager) admit(owner string, f *frozen, req ForkRequest, n int) ([]*grant, error) {
	if n == 0 {
		return nil, nil
	}
	if req.Path == PathPool {
		return nil, &Error{Code: CodeQueueFull, RetryAfter: retryLater, Message: "the pool of snapshot " + f.name() + " has no more children ready",
			Hint: "make it larger with `forkd pool`, or don't ask for the pool only"}
	}
	if m.launches.full(owner) {
		return nil, queueFull(m.limits.MaxQueue)
	}
	each := m.limits.childNeed(f.manifest.Shape)
	grants, err := m.memory.take(n, each)
	if missing := n - len(grants); err == nil && missing > 0 && m.shed(missing) > 0 {
		var more []*grant
		more, err = m.memory.take(missing, each)
		grants = append(grants, more...)
	}
	if err != nil {
		for _, g := range grants {
			g.release()
		}
		return nil, fault(err, "fork of snapshot %s", f.name())
	}
	if len(grants) < n {
		free, _ := m.memory.free()
		return grants, noMemory(f.name(), each, free)
	}
	return grants, nil
}

// start starts one child as planned. A member that fails is replaced once; then it is a cold start.
func (m *Manager) start(ctx context.Context, f *frozen, req ForkRequest, s start) (_ *box, err error) {
	defer func() {
		if err != nil {
			m.counts.failed.Add(1)
			m.noteCorrupt(f, err)
			err = fault(err, "start a child of snapshot %s", f.name())
		}
	}()
	if s.refuse != nil {
		return nil, s.refuse
	}
	defer s.ticket.release()
	if s.member == nil {
		defer func() {
			if err != nil {
				s.grant.release()
			}
		}()
		if err := s.ticket.wait(ctx); err != nil {
			return nil, err
		}
		return m.startCold(ctx, f, req, s.grant)
	}
	return m.startWarm(ctx, f, req, s)
}

// startWarm claims a member. When it fails another one is tried, then a cold start, unless the pool was asked for.
func (m *Manager) startWarm(ctx context.Context, f *frozen, req ForkRequest, s start) (*box, error) {
	if err := s.ticket.wait(ctx); err != nil {
		f.pool.putBack(s.member)
		return nil, err
	}
	b, err := m.claim(ctx, f, req, s.member)
	if err == nil || ctx.Err() != nil || !membersFault(err) {
		return b, err
	}
	m.log.Warn("a pool member failed when it was claimed", "id", s.member.id, "tag", f.tag, "error", err)
	if again := f.pool.claim(1); len(again) == 1 {
		b, second := m.claim(ctx, f, req, again[0])
		if second == nil || ctx.Err() != nil || !membersFault(second) {
			return b, second
		}
		err = errors.Join(err, second)
	}
	if req.Path == PathPool {
		return nil, err
	}
	s.ticket.release()
	return m.fallBack(ctx, f, req, err)
}

// membersFault says whether another member, or a cold start, may do better than the member that a claim failed with.
func membersFault(err error) bool {
	var e *Error
	return !errors.As(err, &e) || e.Code == CodeIdentityFailed
}

// fallBack starts cold what could not be claimed.
func (m *Manager) fallBack(ctx context.Context, f *frozen, req ForkRequest, why error) (*box, error) {
	owner := callerOf(ctx).Tenant
	grants, refused := m.admit(owner, f, req, 1)
	if refused != nil {
		return nil, errors.Join(refused, why)
	}
	t := m.launches.enqueue(owner)
	defer t.release()
	err := t.wait(ctx)
	if err == nil {
		var b *box
		if b, err = m.startCold(ctx, f, req, grants[0]); err == nil {
			return b, nil
		}
	}
	grants[0].release()
	return nil, err
}

// sandbox is the record of a child.
func (r ForkRequest) sandbox(id, path string) store.Sandbox {
	return store.Sandbox{ID: id, Path: path, Env: r.Env, Metadata: r.Metadata, MemoryLimitMiB: r.Limits.MemoryMiB, Limits: r.Limits,
		Name: r.Name, AutoSuspend: r.AutoSuspend, AutoResume: r.AutoResume, Network: *r.Network}
}

var forkPoints = launchPoints{prepared: pointForkPrepared, loaded: pointForkLoaded, identified: pointForkIdentified}

// startCold starts one child in a new monitor. The grant is the child's when it succeeds. Preconditions: its turn has come.
func (m *Manager) startCold(ctx context.Context, f *frozen, req ForkRequest, g *grant) (_ *box, err error) {
	begin := time.Now()
	undo := &cleanup{}
	defer func() {
		if err != nil {
			m.warn(undo.run(), "unwind a fork", f.name())
		}
	}()
	rec := req.sandbox(newID("sb"), StartedCold)
	rec.Secrets = secretNames(f, req.Secrets)
	b, err := m.record(ctx, f, rec)
	if err != nil {
		return nil, err
	}
	undo.add(func() error { return m.erase(b) })
	if err := m.hit(ctx, pointForkRecorded); err != nil {
		return nil, err
	}
	who := individual{name: b.id, env: environ(f.manifest.Recipe.Env, req.Env), hooks: true, network: *req.Network}
	c, err := m.launch(ctx, f, b.id, g, who, req.Limits, forkPoints)
	if err != nil {
		return nil, err
	}
	undo.add(c.dispose)
	if err := giveSecrets(ctx, c, req); err != nil {
		return nil, err
	}
	if err := m.commit(ctx, b, c, time.Since(begin), req.Timeout, pointForkRunning); err != nil {
		return nil, err
	}
	m.counts.cold.Add(1)
	return b, nil
}

// claim makes a pool member a sandbox. A member that fails is ended: it may have taken on half an identity. Preconditions: its turn
// has come.
func (m *Manager) claim(ctx context.Context, f *frozen, req ForkRequest, mem *member) (_ *box, err error) {
	begin := time.Now()
	undo := &cleanup{}
	defer func() {
		if err != nil {
			m.warn(undo.run(), "unwind a claim", mem.id)
		}
	}()
	rec := req.sandbox(mem.id, StartedByClaim)
	rec.Process = mem.machine.Process()
	rec.Secrets = secretNames(f, req.Secrets)
	b, err := m.record(ctx, f, rec)
	if err != nil {
		f.pool.putBack(mem) // nothing was done to it
		return nil, err
	}
	undo.add(func() error { return m.erase(b) })
	undo.add(mem.dispose)
	if err := m.hit(ctx, pointClaimRecorded); err != nil {
		return nil, err
	}
	if err := mem.group.Set(m.toSet(f, req.Limits)); err != nil {
		return nil, newError(CodeLimitsUnavailable, err, "", "sandbox %s can't be limited", mem.id)
	}
	limited, cancel := context.WithTimeout(ctx, m.limits.LaunchTimeout)
	defer cancel()
	who := individual{name: b.id, env: environ(f.manifest.Recipe.Env, req.Env), hooks: true}
	if mem.network != nil { // before hooks run
		if err := mem.network.SetPolicy(limited, *req.Network); err != nil {
			return nil, err
		}
	}
	if err := m.awaken(limited, mem.child, who); err != nil {
		return nil, mem.blame(err)
	}
	if err := m.hit(ctx, pointClaimIdentified); err != nil {
		return nil, err
	}
	if err := giveSecrets(limited, mem.child, req); err != nil {
		return nil, err
	}
	if err := m.commit(ctx, b, mem.child, time.Since(begin), req.Timeout, pointClaimRunning); err != nil {
		return nil, err
	}
	m.counts.claim.Add(1)
	return b, nil
}
