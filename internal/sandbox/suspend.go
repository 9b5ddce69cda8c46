package sandbox

import (
	"context"
	"errors"
	"time"

	"github.com/forkd/forkd/internal/memory"
	"github.com/forkd/forkd/internal/snapshot"
)

// Suspend freezes a sandbox to disk and gives its memory back. Its deadline stands still. Requests that are under way in its guest end with
// an error; what they started goes on when the sandbox is resumed. One that holds secrets is suspended only when secrets says so: they are on disk then. On an error the sandbox runs on as if nothing had been.
func (m *Manager) Suspend(ctx context.Context, id string, secrets bool) (Sandbox, error) {
	ctx, done, err := m.enter(ctx)
	if err != nil {
		return Sandbox{}, err
	}
	defer done()
	b, err := m.find(ctx, id)
	if err != nil {
		return Sandbox{}, err
	}
	if err := b.mayKeep(secrets); err != nil {
		return Sandbox{}, err
	}
	if err := m.suspend(ctx, b, nil); err != nil {
		return Sandbox{}, err
	}
	return b.view(), nil
}

// suspension is a sandbox on its way to disk.
type suspension struct {
	m     *Manager
	box   *box
	child *child
	still bool    // the machine stands still
	state *frozen // what it is suspended to
	old   *frozen // what it was suspended to before; nil: nothing
	undo  *cleanup
}

// suspend suspends a sandbox. onlyIf, when it is set, is asked with the sandbox's lock held whether it is to be; errSpared when it says no.
func (m *Manager) suspend(ctx context.Context, b *box, onlyIf func() bool) (err error) {
	unlock, err := b.lock(ctx)
	if err != nil {
		return err
	}
	defer unlock()
	begin := time.Now()
	z := &suspension{m: m, box: b, undo: &cleanup{}}
	if err := z.begin(onlyIf); err != nil {
		return err
	}
	defer func() {
		if err != nil {
			z.abort(ctx)
		}
	}()
	if err := z.run(ctx); err != nil {
		return fault(m.captureFault(ctx, b, err), "suspend sandbox %s", b.id)
	}
	z.finish(context.WithoutCancel(ctx))
	m.timed(TimeSuspend, b.frozen, "", time.Since(begin))
	return nil
}

// begin keeps new requests away.
func (z *suspension) begin(onlyIf func() bool) error {
	b := z.box
	b.mu.Lock()
	defer b.mu.Unlock()
	c, err := b.runningLocked()
	if err != nil {
		return err
	}
	if onlyIf != nil && !onlyIf() {
		return errSpared
	}
	z.child, z.old = c, b.state.Load()
	b.suspending = true
	return nil
}

// run brings the sandbox to disk and says so: until then nothing is lost when it fails.
func (z *suspension) run(ctx context.Context) error {
	m := z.m
	turn := m.branches.enqueue(z.box.tenant)
	defer turn.release()
	if err := turn.wait(ctx); err != nil {
		return err
	}
	if err := z.prepare(ctx); err != nil {
		return err
	}
	got, err := m.capture(ctx, z.child, capturing{id: z.state.id, mode: memory.ModeStop, disk: true, stay: true})
	if err != nil {
		return err
	}
	z.still = true
	defer func() { _ = got.close() }() // memfds: nothing can be lost
	if err := m.hit(ctx, pointSuspendCaptured); err != nil {
		return err
	}
	man, err := z.write(ctx, got)
	if err != nil {
		return err
	}
	return z.commit(ctx, man)
}

// abort lets the sandbox run on as if nothing had been.
func (z *suspension) abort(ctx context.Context) {
	m, b := z.m, z.box
	if z.still {
		if err := m.revive(ctx, z.child, true, nil); err != nil {
			_ = m.captureFault(ctx, b, err) // ends it
		}
	}
	m.warn(z.undo.run(), "unwind a suspension", b.id)
	b.mu.Lock()
	b.suspending = false
	b.mu.Unlock()
	m.rearm(b)
}

// prepare records what is about to be, and finds out what would be in the way of it or of coming back.
func (z *suspension) prepare(ctx context.Context) error {
	m := z.m
	f, err := m.draft(z.box, newID("sn"), "")
	if err != nil {
		return err
	}
	f.owner, f.live = z.box.id, nil
	z.state = f
	z.undo.add(func() error { m.unuse(f); return nil })
	rootfs, err := m.openRootfs(ctx, f)
	if err != nil {
		return err
	}
	if err := rootfs.Close(); err != nil {
		return err
	}
	if err := m.enlist(ctx, f, 0, z.undo); err != nil {
		return err
	}
	return m.hit(ctx, pointSuspendRecorded)
}

func (z *suspension) write(ctx context.Context, got *instant) (snapshot.Manifest, error) {
	img, err := got.base.Derive(memory.Layer{File: got.Layer.File, Extents: got.Layer.Extents})
	if err != nil {
		return snapshot.Manifest{}, err
	}
	defer func() { _ = img.Close() }() // memfds: nothing can be lost
	return z.m.persist(ctx, persisting{frozen: z.state, layer: got.Layer, image: img, base: got.base, device: got.device,
		staged: pointSuspendStaged, publish: pointSuspendPublished}, z.undo)
}

// commit makes the sandbox a suspended one, for good: its machine is not its any more.
func (z *suspension) commit(ctx context.Context, man snapshot.Manifest) error {
	m, b, f := z.m, z.box, z.state
	m.mu.Lock()
	f.status, f.stored, f.manifest, f.parent = StatusReady, man, man, man.Parent
	m.mu.Unlock()
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.ending {
		return context.Cause(b.life)
	}
	now := time.Now()
	left := time.Duration(0)
	if !b.rec.Deadline.IsZero() {
		left = max(b.rec.Deadline.Sub(now), time.Millisecond)
	}
	if err := m.db.MarkSuspended(context.WithoutCancel(ctx), b.id, f.id, now, left); err != nil {
		return err
	}
	b.rec.State, b.rec.StateID, b.rec.SuspendedAt, b.rec.Left, b.rec.Deadline = string(StateSuspended), f.id, now, left, time.Time{}
	b.rec.Process.PID = 0
	b.child, b.suspending = nil, false
	b.state.Store(f)
	z.undo.release()
	m.deadlines.set(b.id, time.Time{})
	z.child.end(newError(CodeInvalidState, nil, "what it started goes on when the sandbox is resumed", "sandbox %s was suspended while the request was under way", b.id))
	return nil
}

// finish ends the machine and removes what the sandbox was suspended to before. The next Recover does what fails here.
func (z *suspension) finish(ctx context.Context) {
	m, b := z.m, z.box
	m.emit(Event{Kind: EventSandboxState, Tenant: b.tenant, SandboxID: b.id, Tag: b.frozen.tag, State: StateSuspended})
	m.unuse(z.state)
	errs := []error{m.hit(ctx, pointSuspendMarked), z.child.dispose(), m.hit(ctx, pointSuspendEnded)}
	if z.old != nil {
		errs = append(errs, m.removeState(ctx, z.old))
	}
	m.warn(errors.Join(errs...), "tidy up after a suspension", b.id)
}

// removeState removes what a sandbox was suspended to.
func (m *Manager) removeState(ctx context.Context, f *frozen) error {
	m.mu.Lock()
	f.deleting = true
	m.mu.Unlock()
	if err := m.db.MarkSnapshotsDeleting(ctx, f.id); err != nil {
		return err
	}
	if err := m.removeFiles(ctx, f); err != nil {
		return err
	}
	if err := m.db.RemoveSnapshot(ctx, f.id); err != nil {
		return err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	m.unlistLocked(f)
	return nil
}
