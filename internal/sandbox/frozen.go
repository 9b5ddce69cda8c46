package sandbox

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"sync"
	"time"

	"github.com/forkd/forkd/internal/netpolicy"
	"github.com/forkd/forkd/internal/snapshot"
	"github.com/forkd/forkd/internal/store"
	"github.com/forkd/forkd/internal/vmm"
)

// frozen is a snapshot as the Manager knows it.
type frozen struct {
	id, tag   string
	tenant    string // whose it is; "" would be nobody's
	image     string // as it was asked for
	imageID   string
	owner     string // the sandbox whose suspended state it is; "" for all others
	createdAt time.Time
	under     *frozen       // of a branch: what its source was started from
	live      *liveSnapshot // of a branch that this daemon made; nil for others
	network   netpolicy.Policy

	// Guarded by Manager.mu.
	public   bool // everybody may fork it
	secrets  bool // secrets that a sandbox was given are in its memory
	kept     bool // it has a record and is listed; else it lives as long as machines of it do
	status   Status
	warning  string
	damaged  bool // its data turned out to be; the record says so too
	deleting bool
	forks    int // requests in flight that may start machines of it
	bootWarm time.Duration
	pool     *pool             // nil until it can be forked
	manifest snapshot.Manifest // set before it can be forked, never changed afterwards; what publishing adds is in stored
	parent   string            // id of the snapshot that it rests on
	stored   snapshot.Manifest // as published; zero before
	measured store.Measured

	filesMu sync.Mutex
	files   restoreFiles // opened at the first use
}

// restoreFiles are what every child of a snapshot shares beside its memory.
type restoreFiles struct{ device, rootfs *os.File }

// close gives back what the snapshot holds open.
func (f *frozen) close() error {
	f.filesMu.Lock()
	defer f.filesMu.Unlock()
	var errs []error
	for _, file := range []*os.File{f.files.device, f.files.rootfs} {
		if file != nil {
			errs = append(errs, file.Close())
		}
	}
	f.files = restoreFiles{}
	return errors.Join(errs...)
}

// restoreFiles returns what a restore needs, having checked at the first use that this host can restore the snapshot.
func (m *Manager) restoreFiles(ctx context.Context, f *frozen) (restoreFiles, error) {
	f.filesMu.Lock()
	defer f.filesMu.Unlock()
	if f.files.device != nil {
		return f.files, nil
	}
	rootfs, err := m.openRootfs(ctx, f)
	if err != nil {
		return restoreFiles{}, err
	}
	device, err := m.snapshots.Device(f.id)
	if err != nil {
		return restoreFiles{}, errors.Join(err, rootfs.Close())
	}
	f.files = restoreFiles{device: device, rootfs: rootfs}
	return f.files, nil
}

// openRootfs opens a snapshot's root file system, having checked that this host can restore the snapshot.
func (m *Manager) openRootfs(ctx context.Context, f *frozen) (*os.File, error) {
	path, err := m.restorable(ctx, f.manifest)
	if err != nil {
		return nil, err
	}
	rootfs, err := os.Open(path)
	if err != nil {
		return nil, fmt.Errorf("root file system of snapshot %s: %w", f.name(), err)
	}
	return rootfs, nil
}

// restorable reports why a snapshot can't be restored here, or where its root file system is.
func (m *Manager) restorable(ctx context.Context, man snapshot.Manifest) (rootfs string, err error) {
	info, err := m.engine.Probe(ctx)
	if err != nil {
		return "", err
	}
	if err := snapshot.Compat(man, info); err != nil {
		return "", err
	}
	img, err := m.images.Get(man.Image.ID)
	if err != nil {
		return "", fmt.Errorf("snapshot %s needs image %s (%s): %w", man.ID, man.Image.Name, man.Image.ID, err)
	}
	if img.Rootfs.SHA256 != man.Image.RootfsSHA256 {
		return "", fmt.Errorf("%w: the root file system of image %s is not the one that snapshot %s was made with (SHA-256 %s, want %s)",
			vmm.ErrIncompatible, img.ID, man.ID, img.Rootfs.SHA256, man.Image.RootfsSHA256)
	}
	return img.Rootfs.Path, nil
}

// findLocked returns the caller's snapshot with a tag, or else the shared one. Preconditions: m.mu is held.
func (m *Manager) findLocked(ctx context.Context, tag string) (*frozen, error) {
	own := tagKey(callerOf(ctx).Tenant, tag)
	if f := m.frozen[own]; f != nil && !f.deleting {
		return f, nil
	}
	if f := m.frozen[tagKey(DefaultTenant, tag)]; f != nil && f.public && !f.deleting {
		return f, nil
	}
	if s, ok := m.tombs[own]; ok {
		return nil, newError(CodeSnapshotNotFound, nil, "make it anew", "snapshot %s was never finished: %s", tag, s.Warning)
	}
	return nil, newError(CodeSnapshotNotFound, nil, "`forkd images` lists the snapshots", "no snapshot has the tag %s", tag)
}

// readyLocked returns the snapshot with a tag if it is on disk. Preconditions: m.mu is held.
func (m *Manager) readyLocked(ctx context.Context, tag string) (*frozen, error) {
	f, err := m.findLocked(ctx, tag)
	if err == nil && f.status == StatusWriting {
		return nil, &Error{Code: CodeInvalidState, Message: "snapshot " + tag + " is still being made", Hint: "wait until it is ready", RetryAfter: retryLater}
	}
	return f, err
}

// use returns the snapshot with a tag and keeps it from being deleted until release. It is on disk.
func (m *Manager) use(ctx context.Context, tag string) (_ *frozen, release func(), err error) {
	return m.useOf(ctx, tag, m.readyLocked)
}

// useLive is use that takes a branch which is not on disk yet as well.
func (m *Manager) useLive(ctx context.Context, tag string) (_ *frozen, release func(), err error) {
	return m.useOf(ctx, tag, func(ctx context.Context, tag string) (*frozen, error) {
		if f, err := m.findLocked(ctx, tag); err == nil && f.live != nil {
			return f, nil
		}
		return m.readyLocked(ctx, tag)
	})
}

func (m *Manager) useOf(ctx context.Context, tag string, find func(ctx context.Context, tag string) (*frozen, error)) (_ *frozen, release func(), err error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	f, err := find(ctx, tag)
	if err != nil {
		return nil, nil, err
	}
	if f.status == StatusFailed {
		return nil, nil, newError(CodeSnapshotCorrupt, nil, "delete it and make it anew", "snapshot %s can't be used: %s", tag, f.warning)
	}
	f.forks++
	return f, func() { m.unuse(f) }, nil
}

// unuse gives back what useOf, or another place that counts in forks, took.
func (m *Manager) unuse(f *frozen) {
	m.mu.Lock()
	f.forks--
	forget := f.forks == 0 && !f.kept
	m.mu.Unlock()
	if forget {
		m.warn(f.close(), "close what an unkept snapshot held open", f.id)
		m.dropUnkept(f)
	}
}

// dropUnkept gives back the memory of a snapshot that is not kept, if no machine and no request uses it any more.
func (m *Manager) dropUnkept(f *frozen) {
	m.mu.Lock()
	idle := !f.kept && f.forks == 0
	m.mu.Unlock()
	if idle {
		f.live.releaseImage()
		for _, id := range []string{f.id, f.id + flatSuffix} {
			_ = m.cache.Drop(id) // in use: the last machine's end comes here again
		}
	}
}

// name is what people know the snapshot by.
func (f *frozen) name() string { return cmp.Or(f.tag, f.id) }

// key is what its tag is known by among those of all tenants.
func (f *frozen) key() string { return tagKey(f.tenant, f.tag) }

// listLocked makes a snapshot visible. Preconditions: m.mu is held, nothing has its tag.
func (m *Manager) listLocked(f *frozen) {
	f.kept = true
	m.byID[f.id] = f
	if f.tag != "" {
		m.frozen[f.key()] = f
		delete(m.tombs, f.key())
	}
}

// unlistLocked undoes listLocked. Preconditions: m.mu is held.
func (m *Manager) unlistLocked(f *frozen) {
	f.kept = false
	delete(m.byID, f.id)
	if m.frozen[f.key()] == f {
		delete(m.frozen, f.key())
	}
}

// anchorLocked returns the nearest snapshot at or below f that is on disk and may be rested on; nil when there is none. One that is being
// deleted may not: it would be gone before what rests on it. Preconditions: m.mu is held.
func anchorLocked(f *frozen) *frozen {
	for ; f != nil; f = f.under {
		if f.onDisk() && !f.deleting {
			return f
		}
	}
	return nil
}

// condemnedLocked returns the nearest snapshot at or below f that is on disk if it is being deleted, else nil. Preconditions: m.mu is held.
func condemnedLocked(f *frozen) *frozen {
	for ; f != nil; f = f.under {
		if f.onDisk() {
			if f.deleting {
				return f
			}
			return nil
		}
	}
	return nil
}

// onDisk says whether a snapshot is complete and everybody's. Preconditions: Manager.mu is held.
func (f *frozen) onDisk() bool { return f.kept && f.status == StatusReady && f.owner == "" }

// noteCorrupt makes a snapshot whose data turned out to be damaged show as such, for later daemons too.
func (m *Manager) noteCorrupt(f *frozen, err error) {
	if !errors.Is(err, snapshot.ErrCorrupt) {
		return
	}
	m.mu.Lock()
	f.status, f.warning, f.damaged = StatusFailed, err.Error(), true
	m.mu.Unlock()
	m.warn(m.db.SetDamage(context.Background(), f.id, err.Error()), "record that a snapshot is damaged", f.name())
}

// noteSound takes back that a snapshot's data is damaged: whoever repaired it had it verified.
func (m *Manager) noteSound(ctx context.Context, f *frozen) error {
	m.mu.Lock()
	damaged := f.damaged
	m.mu.Unlock()
	if !damaged {
		return nil
	}
	if err := m.db.SetDamage(ctx, f.id, ""); err != nil {
		return err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	f.status, f.warning, f.damaged = StatusReady, "", false
	if f.pool == nil && f.tag != "" {
		f.pool = m.newPool(f, 0)
	}
	return nil
}

// useToVerify is use for who looks at a snapshot's data: it may be damaged.
func (m *Manager) useToVerify(ctx context.Context, tag string) (_ *frozen, release func(), err error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	f, err := m.readyLocked(ctx, tag)
	if err != nil {
		return nil, nil, err
	}
	f.forks++
	return f, func() { m.unuse(f) }, nil
}
