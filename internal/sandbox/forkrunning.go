package sandbox

import (
	"cmp"
	"context"
	"time"
)

// request is what every child of the instant is asked for.
func (r ForkRunningRequest) request(tag string) ForkRequest {
	return ForkRequest{Tag: tag, N: r.N, Env: r.Env, Metadata: r.Metadata, Timeout: r.Timeout, Limits: r.Limits, Path: PathCold, Network: r.Network}
}

// ForkRunning starts children of a running sandbox as it is at one instant, from memory: nothing waits for a disk. The sandbox stands still
// for as long as a live branch takes. Without a tag the instant lives as long as its children, and what is branched from them rests on the
// nearest snapshot that is kept; with a tag it is written to disk meanwhile, as Branch without Wait does.
func (m *Manager) ForkRunning(ctx context.Context, id string, req ForkRunningRequest) (ForkRunningResult, error) {
	if err := req.request("any").check(); err != nil {
		return ForkRunningResult{}, err
	}
	if req.Tag != "" {
		if err := checkTag(req.Tag); err != nil {
			return ForkRunningResult{}, err
		}
	}
	ctx, done, err := m.enter(ctx)
	if err != nil {
		return ForkRunningResult{}, err
	}
	defer done()
	b, leave, err := m.engageBranch(ctx, id)
	if err != nil {
		return ForkRunningResult{}, err
	}
	if err := cmp.Or(b.mayKeep(req.Secrets), m.canFork(ctx, b.frozen, req)); err != nil {
		leave()
		return ForkRunningResult{}, err
	}
	if req.Tag != "" {
		return m.forkKept(ctx, b, req, leave)
	}
	defer leave()
	return m.forkUnkept(ctx, b, req)
}

// canFork says why it would be in vain to stop the sandbox.
func (m *Manager) canFork(ctx context.Context, f *frozen, req ForkRunningRequest) error {
	if _, err := m.limitsOf(f, req.Limits); err != nil {
		return err
	}
	if _, err := m.network(callerOf(ctx), f, req.Network); err != nil {
		return err
	}
	grants, err := m.admit(callerOf(ctx).Tenant, f, req.request(f.tag), 1)
	for _, g := range grants {
		g.release()
	}
	return err
}

// forkKept branches the sandbox and forks the branch as soon as it can be.
func (m *Manager) forkKept(ctx context.Context, b *box, req ForkRunningRequest, leave func()) (ForkRunningResult, error) {
	job, err := m.newBranch(ctx, b, BranchRequest{Tag: req.Tag, Secrets: req.Secrets})
	if err != nil {
		leave()
		return ForkRunningResult{}, fault(err, "fork of sandbox %s", b.id)
	}
	f := job.frozen
	m.mu.Lock()
	f.forks++
	m.mu.Unlock()
	defer m.unuse(f)
	if _, err := m.detach(ctx, job, leave); err != nil {
		return ForkRunningResult{}, err
	}
	if err := f.live.await(ctx); err != nil {
		return ForkRunningResult{}, fault(err, "fork of sandbox %s", b.id)
	}
	return m.forkInstant(ctx, f, req)
}

// forkUnkept captures the sandbox and forks that; the instant is gone with its last child.
func (m *Manager) forkUnkept(ctx context.Context, b *box, req ForkRunningRequest) (ForkRunningResult, error) {
	f, err := m.draft(b, newID("sn"), "")
	if err != nil {
		return ForkRunningResult{}, err
	}
	defer m.unuse(f)
	z := freezing{m: m, box: b, frozen: f, begin: time.Now()}
	err = z.take(ctx, "", nil)
	z.release()
	if err != nil {
		f.live.finish(err)
		return ForkRunningResult{}, fault(err, "fork of sandbox %s", b.id)
	}
	return m.forkInstant(ctx, f, req)
}

// forkInstant starts the children.
func (m *Manager) forkInstant(ctx context.Context, f *frozen, req ForkRunningRequest) (ForkRunningResult, error) {
	m.mu.Lock()
	out := ForkRunningResult{Pause: f.measured.Pause, SnapshotID: f.id, Tag: f.tag}
	m.mu.Unlock()
	var err error
	out.Results, err = m.forkAll(ctx, f, req.request(f.tag))
	if err == nil {
		return out, nil
	}
	if req.Tag == "" || ctx.Err() != nil {
		return ForkRunningResult{}, err
	}
	// Nothing could be started, and yet there is something to tell: the snapshot that is kept.
	out.Results = make([]ForkResult, req.N)
	for i := range out.Results {
		out.Results[i].Err = err
	}
	return out, nil
}
