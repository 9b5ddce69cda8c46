package sandbox

import (
	"context"
	"fmt"
	"time"

	"github.com/forkd/forkd/internal/limits"
)

// Resume brings a suspended sandbox back: the same one, with a fresh clock and fresh entropy. Its deadline goes on where it stood.
func (m *Manager) Resume(ctx context.Context, id string) (Sandbox, error) {
	ctx, done, err := m.enter(ctx)
	if err != nil {
		return Sandbox{}, err
	}
	defer done()
	b, err := m.find(ctx, id)
	if err != nil {
		return Sandbox{}, err
	}
	resumed, err := m.resume(ctx, b)
	if err != nil {
		return Sandbox{}, err
	}
	if !resumed {
		return Sandbox{}, newError(CodeInvalidState, nil, "", "sandbox %s is %s: there is nothing to resume", id, b.status())
	}
	return b.view(), nil
}

// wake resumes a sandbox if it is suspended.
func (m *Manager) wake(ctx context.Context, b *box) error {
	_, err := m.resume(ctx, b)
	return err
}

var resumePoints = launchPoints{prepared: pointResumePrepared, loaded: pointResumeLoaded, identified: pointResumeIdentified}

// resume starts a machine from what the sandbox was suspended to. It returns false when the sandbox is not suspended, after whatever others
// were doing with it. On an error it is suspended as before.
func (m *Manager) resume(ctx context.Context, b *box) (bool, error) {
	unlock, err := b.lock(ctx)
	if err != nil {
		return false, err
	}
	defer unlock()
	b.mu.Lock()
	suspended, f := !b.ending && State(b.rec.State) == StateSuspended, b.state.Load()
	b.mu.Unlock()
	if !suspended {
		return false, nil
	}
	m.mu.Lock()
	f.forks++
	m.mu.Unlock()
	defer m.unuse(f)
	if err := m.restart(ctx, b, f); err != nil {
		m.noteCorrupt(f, err)
		return false, fault(err, "resume sandbox %s", b.id)
	}
	return true, nil
}

// restart starts the machine. Preconditions: the sandbox is suspended to f, and nobody else resumes it.
func (m *Manager) restart(ctx context.Context, b *box, f *frozen) (err error) {
	begin := time.Now()
	undo := &cleanup{}
	defer func() {
		if err != nil {
			m.warn(undo.run(), "unwind a resumption", b.id)
		}
	}()
	grants, err := m.admit(b.tenant, f, ForkRequest{}, 1)
	if err != nil {
		return err
	}
	undo.add(func() error { grants[0].release(); return nil })
	turn := m.launches.enqueue(b.tenant)
	defer turn.release()
	if err := turn.wait(ctx); err != nil {
		return err
	}
	// It was that individual before; hooks are for those that were not.
	who := individual{name: b.id, env: f.manifest.Recipe.Env, same: true, network: b.view().Network}
	c, err := m.launch(ctx, f, b.id, grants[0], who, b.limits(), resumePoints)
	if err != nil {
		return err
	}
	undo.add(c.dispose)
	if err := m.rerun(ctx, b, c, time.Since(begin)); err != nil {
		return err
	}
	m.emit(Event{Kind: EventSandboxState, Tenant: b.tenant, SandboxID: b.id, Tag: b.frozen.tag, State: StateRunning})
	m.timed(TimeResume, f, "", time.Since(begin))
	m.warn(m.hit(ctx, pointResumeRunning), "resume a sandbox", b.id)
	m.watch(b, c)
	return nil
}

// limits are those of the sandbox.
func (b *box) limits() limits.Limits {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.rec.Limits
}

// rerun makes a suspended sandbox run in a new machine. When it returns an error the sandbox is as before.
func (m *Manager) rerun(ctx context.Context, b *box, c *child, readyIn time.Duration) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.ending {
		return context.Cause(b.life)
	}
	var deadline time.Time
	if b.rec.Left > 0 {
		deadline = time.Now().Add(b.rec.Left)
	}
	process := c.machine.Process()
	if err := m.db.MarkRunning(context.WithoutCancel(ctx), b.id, process, readyIn, deadline); err != nil {
		return fmt.Errorf("record that it runs: %w", err)
	}
	b.rec.State, b.rec.Process, b.rec.ReadyIn, b.rec.Deadline = string(StateRunning), process, readyIn, deadline
	b.rec.SuspendedAt, b.rec.Left = time.Time{}, 0
	b.child = c
	c.grant.settle()
	return nil
}
