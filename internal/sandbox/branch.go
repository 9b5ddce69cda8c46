package sandbox

import (
	"cmp"
	"context"
	"errors"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/forkd/forkd/internal/memory"
)

// check is what can be said of the request without looking at anything.
func (r BranchRequest) check() error {
	if r.Mode != "" && r.Mode != BranchLive && r.Mode != BranchDiff && r.Mode != BranchFull {
		return invalid(`use "live", "diff", "full", or nothing for live`, "branch mode %.80q is not known", r.Mode)
	}
	if r.Tag == "" {
		return nil
	}
	return checkTag(r.Tag)
}

// capture is the mode that memory is captured in.
func (r BranchRequest) capture() memory.Mode {
	if r.Mode == BranchDiff {
		return memory.ModeDiff
	}
	return "" // live, or the next best thing with a warning
}

// Branch freezes a running sandbox into a new snapshot while it goes on. With Wait it returns when the snapshot is on disk; else when the
// sandbox runs again: the snapshot is StatusWriting then and can be forked as soon as its memory is captured. If it can't be written, then or
// later, it is removed; children that it already has go on.
func (m *Manager) Branch(ctx context.Context, id string, req BranchRequest) (Snapshot, error) {
	if err := req.check(); err != nil {
		return Snapshot{}, err
	}
	ctx, done, err := m.enter(ctx)
	if err != nil {
		return Snapshot{}, err
	}
	defer done()
	b, leave, err := m.engageBranch(ctx, id)
	if err != nil {
		return Snapshot{}, err
	}
	if err := b.mayKeep(req.Secrets); err != nil {
		leave()
		return Snapshot{}, err
	}
	job, err := m.newBranch(ctx, b, req)
	if err != nil {
		leave()
		return Snapshot{}, fault(err, "branch of sandbox %s", id)
	}
	if req.Wait {
		defer leave()
		if err := job.run(ctx, nil); err != nil {
			return Snapshot{}, err
		}
		return m.Snapshot(ctx, job.frozen.tag)
	}
	resumed, err := m.detach(ctx, job, leave)
	if err != nil {
		return Snapshot{}, err
	}
	select {
	case <-resumed:
	case <-ctx.Done(): // it goes on: it was asked for
	}
	if err := job.failure(); err != nil {
		return Snapshot{}, err
	}
	return m.Snapshot(context.WithoutCancel(ctx), job.frozen.tag)
}

// engageBranch finds the sandbox to branch, and a place among the branches under way. The sandbox counts as used until leave.
func (m *Manager) engageBranch(ctx context.Context, id string) (_ *box, leave func(), err error) {
	if n := m.branching.Add(1); int(n) > m.limits.MaxBranches+m.limits.MaxBranchQueue {
		m.branching.Add(-1)
		return nil, nil, tooManyBranches(m.limits.MaxBranches + m.limits.MaxBranchQueue)
	}
	b, _, idle, err := m.engage(ctx, id)
	if err != nil {
		m.branching.Add(-1)
		return nil, nil, err
	}
	return b, func() { idle(); m.branching.Add(-1) }, nil
}

// branch is a snapshot that is being made of a running sandbox.
type branch struct {
	freezing
	req  BranchRequest
	undo *cleanup
	over chan struct{} // closed at the end
	err  error         // valid when over is closed
}

// newBranch takes the tag and records what is about to be.
func (m *Manager) newBranch(ctx context.Context, b *box, req BranchRequest) (*branch, error) {
	id := newID("sn")
	f, err := m.draft(b, id, cmp.Or(req.Tag, "branch-"+randomHex(6)))
	if err != nil {
		return nil, err
	}
	if req.Mode == BranchFull {
		f.parent = ""
	}
	j := &branch{freezing: freezing{m: m, box: b, frozen: f, begin: time.Now()}, req: req, undo: &cleanup{}, over: make(chan struct{})}
	f.pool = m.newPool(f, 0)
	j.undo.add(func() error { f.pool.close(); return nil })
	err = m.enlist(ctx, f, 0, j.undo)
	if err == nil {
		err = m.hit(ctx, pointBranchRecorded)
	}
	if err != nil {
		j.fail(err)
		return nil, err
	}
	return j, nil
}

// detach runs the job in the background, as a request of its own. resumed is closed when the source runs again after it was held still, or at
// the end of the job.
func (m *Manager) detach(ctx context.Context, j *branch, leave func()) (resumed <-chan struct{}, err error) {
	ctx, done, err := m.enter(context.WithoutCancel(ctx))
	if err != nil {
		leave()
		j.fail(err)
		return nil, err
	}
	runs := make(chan struct{})
	announce := sync.OnceFunc(func() { close(runs) })
	m.background.Go(func() {
		defer done()
		defer leave()
		defer announce()
		goesOn := false
		err := j.run(ctx, func() { goesOn = true; j.box.owe(j.frozen.live); announce() })
		if err == nil {
			return
		}
		m.log.Warn("a branch failed", "id", j.box.id, "tag", j.frozen.tag, "error", err)
		if goesOn {
			m.entomb(j.frozen, err)
		}
	})
	return runs, nil
}

// owe notes that a snapshot of the sandbox was promised.
func (b *box) owe(l *liveSnapshot) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.owed = append(slices.DeleteFunc(b.owed, (*liveSnapshot).isCaptured), l)
}

// oweLimit bounds how long a sandbox that is to end lives on for a snapshot that was promised.
const oweLimit = 10 * time.Second

// settle waits until what was promised of a sandbox is captured: whoever was told that it is being made may end the sandbox at once.
func (b *box) settle(ctx context.Context) {
	b.mu.Lock()
	owed := slices.Clone(b.owed)
	b.mu.Unlock()
	ctx, cancel := context.WithTimeout(ctx, oweLimit)
	defer cancel()
	for _, l := range owed {
		_ = l.await(ctx) // it tells others why it failed
	}
}

// failure is why the job failed, if it is over.
func (j *branch) failure() error {
	select {
	case <-j.over:
		return j.err
	default:
		return nil
	}
}

// run makes the snapshot. When it fails nothing is left of it.
func (j *branch) run(ctx context.Context, resumed func()) error {
	defer close(j.over)
	defer j.release()
	err := j.take(ctx, j.req.capture(), resumed)
	if err == nil {
		err = j.write(ctx)
	}
	if err != nil {
		err = fault(err, "branch of sandbox %s", j.box.id)
		j.fail(err)
		j.err = err
		return err
	}
	mode := string(cmp.Or(j.req.Mode, BranchLive))
	j.m.timed(TimeBranchPause, j.frozen, mode, j.frozen.measured.Pause)
	j.m.timed(TimeBranch, j.frozen, mode, time.Since(j.begin))
	j.m.unuse(j.frozen)
	j.m.emit(Event{Kind: EventSnapshotReady, Tenant: j.frozen.tenant, Tag: j.frozen.tag, SandboxID: j.box.id})
	return nil
}

// write brings the snapshot to disk.
func (j *branch) write(ctx context.Context) error {
	m, f := j.m, j.frozen
	man, err := m.persist(ctx, persisting{frozen: f, layer: j.instant.Layer, image: j.image, base: j.instant.base, device: j.instant.device,
		full: j.req.Mode == BranchFull, gently: true, staged: pointBranchStaged, publish: pointBranchPublished}, j.undo)
	if err != nil {
		return err
	}
	detached := context.WithoutCancel(ctx)
	m.warn(m.db.SetMeasured(detached, f.id, f.measured), "record the figures of a branch", f.id)
	if err := m.db.MarkSnapshotReady(detached, f.id, 0); err != nil {
		return err
	}
	if err := m.hit(ctx, pointBranchReady); err != nil {
		return err
	}
	j.undo.release()
	m.mu.Lock()
	f.status, f.stored, f.parent = StatusReady, man, man.Parent
	m.mu.Unlock()
	f.live.finish(nil)
	return nil
}

// fail takes everything back. Children that run from it already go on.
func (j *branch) fail(why error) {
	m, f := j.m, j.frozen
	m.warn(j.undo.run(), "unwind a branch", f.tag)
	f.live.finish(why)
	m.unuse(f)
	m.emit(Event{Kind: EventSnapshotFailed, Tenant: f.tenant, Tag: f.tag, SandboxID: j.box.id, Reason: why.Error()})
}

// finish says that the snapshot is on disk, or why it never will be.
func (l *liveSnapshot) finish(why error) {
	if why != nil && !l.isCaptured() {
		l.err = why
		close(l.captured)
	}
	close(l.written)
	l.releaseImage()
}

// maxTombs bounds what is remembered of branches that failed when nobody waited for them any more.
const maxTombs = 100

// entomb remembers why a branch failed whose request was answered before.
func (m *Manager) entomb(f *frozen, why error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.frozen[f.key()] != nil {
		return // the tag is in use again
	}
	if _, again := m.tombs[f.key()]; !again && len(m.tombs) >= maxTombs {
		oldest := slices.MinFunc(slices.Collect(maps.Values(m.tombs)), func(a, b Snapshot) int { return a.CreatedAt.Compare(b.CreatedAt) })
		delete(m.tombs, tagKey(oldest.Tenant, oldest.Tag))
	}
	s := m.viewLocked(Caller{Tenant: f.tenant}, f)
	s.Status, s.Warning = StatusFailed, errorText(why)
	m.tombs[f.key()] = s
}

// errorText is an error with its hint.
func errorText(err error) string {
	var e *Error
	if errors.As(err, &e) && e.Hint != "" {
		return err.Error() + ": " + e.Hint
	}
	return err.Error()
}
