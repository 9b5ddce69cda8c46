package sandbox

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	"github.com/forkd/forkd/internal/memory"
	"github.com/forkd/forkd/internal/snapshot"
	"github.com/forkd/forkd/internal/store"
	"github.com/forkd/forkd/internal/vmm"
)

// freezing is one instant of a running sandbox on its way into a snapshot.
type freezing struct {
	m      *Manager
	box    *box
	frozen *frozen
	begin  time.Time

	turn    *ticket
	instant *instant
	image   *memory.Image // of the instant; the cache's
}

// draft makes the snapshot that a sandbox becomes. It counts as used until unuse, and nobody knows it yet.
func (m *Manager) draft(b *box, id, tag string) (*frozen, error) {
	source := b.view()
	from := b.frozen
	if from.manifest.Shape.MemMiB == 0 {
		return nil, newError(CodeInvalidState, nil, "", "sandbox %s can't be frozen: its snapshot %s is gone, and with it what a restore must know", b.id, from.name())
	}
	f := &frozen{id: id, tag: tag, tenant: b.tenant, secrets: b.holdsSecrets(), image: from.image, imageID: from.imageID, createdAt: time.Now(), under: from, status: StatusWriting, live: newLiveSnapshot(), forks: 1, network: source.Network}
	f.manifest = from.manifest
	f.manifest.ID, f.manifest.CreatedAt, f.manifest.BranchedFrom = id, f.createdAt.UTC().Round(0), b.id
	f.manifest.Memory, f.manifest.Device, f.manifest.Parent = snapshot.MemoryInfo{}, snapshot.Blob{}, ""
	// A child has the environment that its source has: it is in the guest's memory anyway.
	f.manifest.Recipe.Env = environ(from.manifest.Recipe.Env, source.Env)
	if n := len(f.manifest.Recipe.Env); n > maxRecipeEnv {
		return nil, newError(CodeInvalidState, nil, "", "sandbox %s can't be frozen: it has %d environment variables, a snapshot can keep %d", b.id, n, maxRecipeEnv)
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if gone := condemnedLocked(from); gone != nil { // the sandbox is about to be ended, or its snapshot to be pardoned
		return nil, &Error{Code: CodeSnapshotInUse, RetryAfter: retryLater, Hint: "try again when that is done",
			Message: fmt.Sprintf("sandbox %s can't be frozen: snapshot %s, which it rests on, is being deleted", b.id, gone.name())}
	}
	if a := anchorLocked(from); a != nil {
		f.parent = a.id // as far as can be told now; see rest
	}
	return f, nil
}

// maxRecipeEnv is how many variables a manifest takes.
const maxRecipeEnv = 4096

// take captures the instant and makes it resident. It holds a slot of the gate afterwards, which release gives back.
func (z *freezing) take(ctx context.Context, mode memory.Mode, resumed func()) error {
	unlock, err := z.box.lock(ctx)
	if err != nil {
		return err
	}
	defer unlock()
	z.turn = z.m.branches.enqueue(z.box.tenant)
	if err := z.turn.wait(ctx); err != nil {
		return err
	}
	c, err := z.box.running()
	if err != nil {
		return err
	}
	rootfs, err := z.m.openRootfs(ctx, z.frozen) // before the machine is stopped: it may not be restorable here
	if err != nil {
		return err
	}
	// It ends with the sandbox, too.
	ctx, end := context.WithCancelCause(ctx)
	defer end(nil)
	stop := context.AfterFunc(z.box.life, func() { end(context.Cause(z.box.life)) })
	defer stop()
	got, err := z.m.capture(ctx, c, capturing{id: z.frozen.id, mode: mode, disk: z.frozen.kept, resumed: func(pause time.Duration) {
		z.m.mu.Lock()
		z.frozen.measured.Pause = pause
		z.m.mu.Unlock()
		if resumed != nil {
			resumed()
		}
	}})
	if err != nil {
		return errors.Join(z.m.captureFault(ctx, z.box, err), rootfs.Close())
	}
	if err := z.land(got, rootfs); err != nil {
		return errors.Join(err, got.close(), rootfs.Close())
	}
	z.m.countBranch(ctx, z.box)
	return z.m.hit(ctx, pointBranchCaptured)
}

// land makes the instant a snapshot that can be forked; it owns the files then.
func (z *freezing) land(got *instant, rootfs *os.File) error {
	m, f := z.m, z.frozen
	img, err := got.base.Derive(got.Layer)
	if err != nil {
		return err
	}
	f.filesMu.Lock()
	f.files = restoreFiles{device: got.device, rootfs: rootfs}
	f.filesMu.Unlock()
	ref := m.cache.PutRef(f.id, img)
	z.instant, z.image = got, img
	m.mu.Lock()
	f.measured = measure(got, z.begin)
	m.mu.Unlock()
	f.live.land(ref)
	return nil
}

// measure is what is worth knowing of how an instant was taken.
func measure(got *instant, begin time.Time) store.Measured {
	out := store.Measured{Warning: got.Warning, Pause: got.pause, Diff: time.Since(begin), DiffLogical: int64(memory.Pages(got.Layer.Extents)) * memory.PageSize}
	if data, err := memory.DataExtents(got.Layer.File); err == nil {
		out.DiffPhysical = int64(memory.Pages(memory.Intersect(got.Layer.Extents, data))) * memory.PageSize
	}
	return out
}

// release gives the slot back. Releasing twice, or what was never taken, is harmless.
func (z *freezing) release() {
	if z.turn != nil {
		z.turn.release()
	}
}

// captureFault says why a sandbox could not be captured, and ends one that can't go on.
func (m *Manager) captureFault(ctx context.Context, b *box, err error) error {
	var known *Error
	switch cause := context.Cause(ctx); {
	case errors.Is(err, errStuck): // before all others: whatever it was for, nobody may be left with a machine that stands still
		m.warn(m.finish(b, ending{state: StateFailed, reason: "it was frozen and its monitor does not let it go on", keep: true}), "end a sandbox that stands still", b.id)
		return newError(CodeSandboxGone, err, "see `forkd logs "+b.id+"`", "sandbox %s could not be let go on after it was frozen, and was ended", b.id)
	case errors.As(err, &known):
		return err
	case errors.As(cause, &known): // the sandbox ended, or the daemon is stopping
		return known
	case errors.Is(err, vmm.ErrGone):
		return newError(CodeSandboxGone, err, "`forkd ls` shows what lives", "sandbox %s ended while it was being frozen", b.id)
	case errors.Is(err, errLineBusy), errors.Is(err, errSilent):
		return newError(CodeGuestUnreachable, err, "it may be out of memory or busy: see `forkd logs "+b.id+"`", "the guest of sandbox %s does not take what was sent to it, so it can't be frozen between two requests", b.id)
	case cause != nil:
		return cause
	}
	return fmt.Errorf("freeze sandbox %s: %w", b.id, err)
}

func (m *Manager) countBranch(ctx context.Context, b *box) {
	b.mu.Lock()
	b.rec.BranchCount++
	b.mu.Unlock()
	m.warn(m.db.CountBranch(context.WithoutCancel(ctx), b.id), "count a branch", b.id)
}

// lock waits for the others that freeze, suspend or resume a sandbox, in order, and keeps the next one out until unlock.
func (b *box) lock(ctx context.Context) (unlock func(), err error) {
	select {
	case b.freeze <- struct{}{}:
		return func() { <-b.freeze }, nil
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	case <-b.life.Done():
		return nil, context.Cause(b.life)
	}
}

// running returns the machine of a sandbox, or says why there is none.
func (b *box) running() (*child, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.runningLocked()
}

func (b *box) runningLocked() (*child, error) {
	switch {
	case b.ending:
		return nil, newError(CodeSandboxGone, nil, "", "sandbox %s is ending: %s", b.id, b.rec.Reason)
	case State(b.rec.State) == StateSuspended:
		return nil, newError(CodeInvalidState, nil, "`forkd resume "+b.id+"` brings it back", "sandbox %s is suspended", b.id)
	case b.suspending:
		return nil, &Error{Code: CodeInvalidState, Message: "sandbox " + b.id + " is being suspended", Hint: "resume it in a moment", RetryAfter: retryLater}
	case State(b.rec.State) != StateRunning:
		return nil, newError(CodeInvalidState, nil, "wait until it runs", "sandbox %s is %s", b.id, b.rec.State)
	}
	return b.child, nil
}
