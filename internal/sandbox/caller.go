package sandbox

import (
	"cmp"
	"context"
	"fmt"
	"slices"

	"github.com/forkd/forkd/internal/image"
	"github.com/forkd/forkd/internal/store"
)

// DefaultTenant is whose things are that no key made: those of a daemon without keys. Its administrators are the host's, and what it shares all
// tenants may use.
const DefaultTenant = "default"

// Caller is who a method of Manager is called for. It sees and touches what is its tenant's, and what the default tenant shares; anything else
// does not exist for it.
type Caller struct {
	Tenant       string // "": DefaultTenant
	KeyID        string // "": none
	MaxSandboxes int    // that may live that were started with this key; 0: as many as the tenant may have
}

type callerKey struct{}

// WithCaller returns a context in which methods of Manager are called for c. Without one they are called for the default tenant: the daemon
// itself.
func WithCaller(ctx context.Context, c Caller) context.Context {
	return context.WithValue(ctx, callerKey{}, c)
}

func callerOf(ctx context.Context) Caller {
	c, _ := ctx.Value(callerKey{}).(Caller)
	c.Tenant = cmp.Or(c.Tenant, DefaultTenant)
	return c
}

// tagKey is what a tag is known by among those of all tenants: neither has a slash.
func tagKey(tenant, tag string) string {
	if tenant == DefaultTenant {
		return tag
	}
	return tenant + "/" + tag
}

// sees says whether a caller may know of a snapshot. Preconditions: Manager.mu is held.
func (c Caller) sees(f *frozen) bool { return f.tenant == c.Tenant || f.public }

// mine returns a sandbox of the caller that has not ended.
func (m *Manager) mine(ctx context.Context, id string) (*box, bool) {
	if b, ok := m.live(id); ok && b.tenant == callerOf(ctx).Tenant {
		return b, true
	}
	return nil, false
}

// ownLocked returns the caller's own snapshot with a tag if it is on disk. Preconditions: m.mu is held.
func (m *Manager) ownLocked(ctx context.Context, tag string) (*frozen, error) {
	f, err := m.readyLocked(ctx, tag)
	if err == nil && f.tenant != callerOf(ctx).Tenant {
		return nil, newError(CodeForbidden, nil, "you may fork it, and make snapshots of your own from it", "snapshot %s is shared by another tenant: only that one may change it", tag)
	}
	return f, err
}

// notShared stands in for the name of a snapshot that a caller may not know.
const notShared = "(another tenant's)"

// others says whether any of the snapshots is not the tenant's.
func others(tenant string, all []*frozen) bool {
	return slices.ContainsFunc(all, func(f *frozen) bool { return f.tenant != tenant })
}

// ShareSnapshot says whether other tenants may fork a snapshot of the default tenant, and make snapshots that rest on it. What was started or
// made from it stays when it is not shared any more.
func (m *Manager) ShareSnapshot(ctx context.Context, tag string, public bool) (Snapshot, error) {
	if err := checkTag(tag); err != nil {
		return Snapshot{}, err
	}
	ctx, done, err := m.enter(ctx)
	if err != nil {
		return Snapshot{}, err
	}
	defer done()
	if callerOf(ctx).Tenant != DefaultTenant {
		return Snapshot{}, newError(CodeForbidden, nil, "", "only the default tenant shares snapshots")
	}
	f, release, err := m.use(ctx, tag)
	if err != nil {
		return Snapshot{}, err
	}
	defer release()
	if public && f.secrets {
		return Snapshot{}, newError(CodeInvalidState, nil, "make one without secrets", "snapshot %s has secrets in its memory: it can't be shared", tag)
	}
	if err := m.db.SetPublic(context.WithoutCancel(ctx), f.id, public); err != nil {
		return Snapshot{}, fault(err, "share snapshot %s", tag)
	}
	m.mu.Lock()
	f.public = public
	m.mu.Unlock()
	return m.Snapshot(ctx, tag)
}

// mayUseImage returns image.ErrNotFound unless the image is the caller's or shared.
func (m *Manager) mayUseImage(ctx context.Context, img image.Image, asked string) error {
	tenants, err := m.db.ImageTenants(ctx)
	if err != nil {
		return err
	}
	if ImageSeenBy(callerOf(ctx).Tenant, tenants[img.ID]) {
		return nil
	}
	return fmt.Errorf("%w: %q", image.ErrNotFound, asked) // word for word what the store says of one that is not there
}

// ImageSeenBy says whether a tenant has an image, by what is recorded of it.
func ImageSeenBy(tenant string, recorded []string) bool {
	if len(recorded) == 0 {
		return tenant == DefaultTenant
	}
	return slices.Contains(recorded, tenant) || slices.Contains(recorded, store.Everybody)
}

// TakeImage gives the caller an image that came with a snapshot; fresh says that nobody had it before.
func (m *Manager) TakeImage(ctx context.Context, id string, fresh bool) error {
	tenant, first := callerOf(ctx).Tenant, DefaultTenant
	if fresh {
		first = ""
	}
	if tenant == DefaultTenant && fresh {
		return nil // what is recorded of nobody is the default tenant's
	}
	return fault(m.db.ShareImage(context.WithoutCancel(ctx), id, tenant, first), "image %s", id)
}

// TenantOf is the tenant that a context is for.
func TenantOf(ctx context.Context) string { return callerOf(ctx).Tenant }
