package sandbox

import (
	"context"
	"errors"
	"time"

	"github.com/forkd/forkd/internal/store"
)

// engage returns a sandbox that runs and its child for a request, and resumes it first when it is suspended and wants that. The sandbox
// counts as used until idle.
func (m *Manager) engage(ctx context.Context, id string) (_ *box, _ *child, idle func(), err error) {
	b, err := m.find(ctx, id)
	if err != nil {
		return nil, nil, nil, err
	}
	for {
		b.mu.Lock()
		asleep := !b.ending && (b.suspending || State(b.rec.State) == StateSuspended)
		if !asleep || !b.rec.AutoResume {
			c, err := b.runningLocked()
			if err == nil {
				m.useLocked(b)
			}
			b.mu.Unlock()
			return b, c, func() { m.leave(b) }, err
		}
		b.mu.Unlock()
		if err := m.wake(ctx, b); err != nil {
			return nil, nil, nil, err
		}
	}
}

// useLocked counts a request. Preconditions: b.mu is held.
func (m *Manager) useLocked(b *box) {
	if b.active++; b.active == 1 && b.rec.AutoSuspend > 0 {
		m.idles.set(b.id, time.Time{})
	}
}

// leave is the end of a request.
func (m *Manager) leave(b *box) {
	b.mu.Lock()
	b.active--
	b.mu.Unlock()
	m.rearm(b)
}

// rearm starts to wait for a sandbox to be unused for as long as it says, if it wants that and is unused now.
func (m *Manager) rearm(b *box) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.idleLocked() {
		m.idles.set(b.id, time.Now().Add(b.rec.AutoSuspend))
	}
}

// idleLocked says whether a sandbox is to be suspended if nobody uses it. Preconditions: b.mu is held.
func (b *box) idleLocked() bool {
	return b.rec.AutoSuspend > 0 && b.active == 0 && !b.ending && !b.suspending && State(b.rec.State) == StateRunning
}

// idle suspends a sandbox that was not used for as long as it said.
func (m *Manager) idle(id string) {
	b, ok := m.live(id)
	if !ok {
		return
	}
	ctx, done, err := m.enter(context.Background())
	if err != nil {
		return // the daemon is stopping
	}
	defer done()
	err = m.suspend(ctx, b, func() bool { return b.active == 0 })
	if err == nil || errors.Is(err, errSpared) || CodeOf(err) == CodeSandboxGone || CodeOf(err) == CodeInvalidState {
		return
	}
	m.log.Warn("an idle sandbox can't be suspended", "id", id, "error", err)
	m.rearm(b)
}

// nameTaken is the error of a second sandbox with a name.
func nameTaken(name string) error {
	return newError(CodeSandboxExists, nil, "choose another name, or kill the sandbox that has it", "a sandbox with the name %s exists", name)
}

// SandboxByName returns the sandbox with a name: the one that lives, or else the one that ended last, as long as it is remembered.
func (m *Manager) SandboxByName(ctx context.Context, name string) (Sandbox, error) {
	who := callerOf(ctx)
	for _, b := range m.allBoxes() {
		if s := b.view(); b.tenant == who.Tenant && s.Name == name && name != "" && s.EndedAt.IsZero() {
			return s, nil
		}
	}
	rec, err := m.db.EndedByName(ctx, who.Tenant, name)
	if errors.Is(err, store.ErrNotFound) || name == "" {
		return Sandbox{}, newError(CodeSandboxNotFound, nil, "`forkd ls` lists the sandboxes", "no sandbox has the name %.80q", name)
	}
	if err != nil {
		return Sandbox{}, fault(err, "look up the sandbox named %s", name)
	}
	return viewOf(rec), nil
}
