package sandbox

import (
	"cmp"
	"context"
	"errors"
	"os"
	"slices"
	"time"

	"github.com/forkd/forkd/internal/store"
)

// Sandboxes returns those that live, oldest first.
func (m *Manager) Sandboxes(ctx context.Context) ([]Sandbox, error) {
	who := callerOf(ctx)
	all := []Sandbox{}
	for _, b := range m.allBoxes() {
		if b.tenant == who.Tenant {
			all = append(all, b.view())
		}
	}
	slices.SortFunc(all, func(a, b Sandbox) int {
		return cmp.Or(a.CreatedAt.Compare(b.CreatedAt), cmp.Compare(a.ID, b.ID))
	})
	return all, nil
}

// Ended returns sandboxes that ended otherwise than by Kill, newest end first: as many and for as long as Limits say.
func (m *Manager) Ended(ctx context.Context) ([]Sandbox, error) {
	recs, err := m.db.EndedSandboxes(ctx)
	if err != nil {
		return nil, fault(err, "list sandboxes that ended")
	}
	var all []Sandbox
	for _, r := range recs {
		if _, lives := m.live(r.ID); !lives && r.Tenant == callerOf(ctx).Tenant {
			all = append(all, viewOf(r))
		}
	}
	return all, nil
}

// Sandbox returns one sandbox; one that ended is found for a while and says why.
func (m *Manager) Sandbox(ctx context.Context, id string) (Sandbox, error) {
	if b, ok := m.mine(ctx, id); ok {
		return b.view(), nil
	}
	rec, err := m.ended(ctx, id)
	if err != nil {
		return Sandbox{}, err
	}
	return viewOf(rec), nil
}

// ended returns the record of a sandbox that doesn't live any more.
func (m *Manager) ended(ctx context.Context, id string) (store.Sandbox, error) {
	rec, err := m.db.Sandbox(ctx, id)
	if errors.Is(err, store.ErrNotFound) || err == nil && rec.Tenant != callerOf(ctx).Tenant {
		return store.Sandbox{}, notFound(id)
	}
	return rec, fault(err, "look up sandbox %.80s", id)
}

// Kill ends a sandbox and forgets it. One that has ended already is just forgotten; one that is unknown is CodeSandboxNotFound.
func (m *Manager) Kill(ctx context.Context, id string) error {
	ctx, done, err := m.enter(ctx)
	if err != nil {
		return err
	}
	defer done()
	if b, ok := m.mine(ctx, id); ok {
		b.settle(ctx)
		err := m.finish(b, ending{state: StateStopped, reason: reasonKilled})
		if err == nil {
			m.counts.kills.Add(1)
		}
		if !errors.Is(err, errEnded) {
			return err
		}
	}
	if _, err := m.ended(ctx, id); err != nil {
		return err
	}
	return m.forget(context.WithoutCancel(ctx), id)
}

// reasonKilled marks a record that Kill was about to remove.
const reasonKilled = "killed"

// forget removes the record and the console of a sandbox that ended.
func (m *Manager) forget(ctx context.Context, id string) error {
	if err := m.db.RemoveSandbox(ctx, id); err != nil && !errors.Is(err, store.ErrNotFound) {
		return fault(err, "forget sandbox %s", id)
	}
	if err := os.Remove(m.consoleFile(id)); err != nil && !errors.Is(err, os.ErrNotExist) {
		return fault(err, "remove the console of sandbox %s", id)
	}
	return nil
}

// Extend sets the deadline of a running sandbox to timeout from now, sooner or later than it was; 0 removes it. That of a suspended one will be
// as far from its resumption.
func (m *Manager) Extend(ctx context.Context, id string, timeout time.Duration) (Sandbox, error) {
	if timeout < 0 {
		return Sandbox{}, invalid("0 is for none", "timeout of %v is negative", timeout)
	}
	ctx, done, err := m.enter(ctx)
	if err != nil {
		return Sandbox{}, err
	}
	defer done()
	b, err := m.find(ctx, id)
	if err != nil {
		return Sandbox{}, err
	}
	if err := m.moveDeadline(ctx, b, timeout); err != nil {
		return Sandbox{}, err
	}
	return b.view(), nil
}

// moveDeadline holds the sandbox's lock all the while, so that of two calls one is last everywhere, and no expiry comes between.
func (m *Manager) moveDeadline(ctx context.Context, b *box, timeout time.Duration) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.ending {
		return context.Cause(b.life)
	}
	if State(b.rec.State) == StateSuspended {
		if err := m.db.SetLeft(context.WithoutCancel(ctx), b.id, timeout); err != nil {
			return fault(err, "deadline of sandbox %s", b.id)
		}
		b.rec.Left = timeout
		return nil
	}
	if _, err := b.runningLocked(); err != nil {
		return err
	}
	var deadline time.Time
	if timeout > 0 {
		deadline = time.Now().Add(timeout)
	}
	if err := m.db.SetDeadline(context.WithoutCancel(ctx), b.id, deadline); err != nil {
		return fault(err, "deadline of sandbox %s", b.id)
	}
	b.rec.Deadline = deadline
	m.deadlines.set(b.id, deadline)
	return nil
}

// find returns a sandbox that has not ended, or says why there is none: unknown, or ended.
func (m *Manager) find(ctx context.Context, id string) (*box, error) {
	if b, ok := m.mine(ctx, id); ok {
		return b, nil
	}
	rec, err := m.ended(ctx, id)
	if err != nil {
		return nil, err
	}
	return nil, newError(CodeSandboxGone, nil, "`forkd ls` shows what lives", "sandbox %s has ended: %s", id, rec.Reason)
}

// running returns a sandbox that runs and its child, or says why there is none: unknown, ended, suspended, or not running yet.
func (m *Manager) running(ctx context.Context, id string) (*box, *child, error) {
	b, err := m.find(ctx, id)
	if err != nil {
		return nil, nil, err
	}
	c, err := b.running()
	return b, c, err
}

// forgetOld removes records of sandboxes that ended a while ago. It runs until ctx ends.
func (m *Manager) forgetOld(ctx context.Context) {
	tick := time.NewTicker(time.Minute)
	defer tick.Stop()
	for {
		m.warn(m.forgetOnce(ctx), "forget sandboxes that ended", "")
		select {
		case <-tick.C:
		case <-ctx.Done():
			return
		}
	}
}

func (m *Manager) forgetOnce(ctx context.Context) error {
	if _, err := m.db.ForgetEnded(ctx, time.Now().Add(-m.limits.KeepEndedFor), m.limits.KeepEnded); err != nil {
		return err
	}
	return m.removeStrayConsoles(ctx)
}

// removeStrayConsoles removes saved consoles of sandboxes that have no record.
func (m *Manager) removeStrayConsoles(ctx context.Context) error {
	entries, err := os.ReadDir(m.consolesDir())
	if err != nil || len(entries) == 0 {
		return err
	}
	recs, err := m.db.Sandboxes(ctx)
	if err != nil {
		return err
	}
	known := make(map[string]bool, len(recs))
	for _, r := range recs {
		known[r.ID] = true
	}
	var errs []error
	for _, e := range entries {
		if !known[e.Name()] {
			errs = append(errs, os.Remove(m.consoleFile(e.Name())))
		}
	}
	return errors.Join(errs...)
}
