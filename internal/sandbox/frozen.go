package sandbox

import (
	"context"
	"errors"
	"fmt"
	"os"
	"sync"
	"time"

	"github.com/forkd/forkd/internal/snapshot"
	"github.com/forkd/forkd/internal/vmm"
)

// frozen is a snapshot as the Manager knows it.
type frozen struct {
	id, tag   string
	image     string // as it was asked for
	imageID   string
	createdAt time.Time

	// Guarded by Manager.mu.
	status   Status
	warning  string
	deleting bool
	forks    int // requests in flight that may start machines of it
	bootWarm time.Duration
	pool     *pool             // nil until ready
	manifest snapshot.Manifest // set before it is ready, never changed afterwards

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
	rootfsPath, err := m.restorable(ctx, f.manifest)
	if err != nil {
		return restoreFiles{}, err
	}
	rootfs, err := os.Open(rootfsPath)
	if err != nil {
		return restoreFiles{}, fmt.Errorf("root file system of snapshot %s: %w", f.tag, err)
	}
	device, err := m.snapshots.Device(f.id)
	if err != nil {
		return restoreFiles{}, errors.Join(err, rootfs.Close())
	}
	f.files = restoreFiles{device: device, rootfs: rootfs}
	return f.files, nil
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

// findLocked returns the snapshot with a tag that may be used. Preconditions: m.mu is held.
func (m *Manager) findLocked(tag string) (*frozen, error) {
	f := m.frozen[tag]
	switch {
	case f == nil || f.deleting:
		return nil, newError(CodeSnapshotNotFound, nil, "`forkd images` lists the snapshots", "no snapshot has the tag %s", tag)
	case f.status == StatusWriting:
		return nil, &Error{Code: CodeInvalidState, Message: "snapshot " + tag + " is still being made", Hint: "wait until it is ready", RetryAfter: retryLater}
	}
	return f, nil
}

// use returns the snapshot with a tag and keeps it from being deleted until release.
func (m *Manager) use(tag string) (_ *frozen, release func(), err error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	f, err := m.findLocked(tag)
	if err != nil {
		return nil, nil, err
	}
	if f.status == StatusFailed {
		return nil, nil, newError(CodeSnapshotCorrupt, nil, "delete it and make it anew", "snapshot %s can't be used: %s", tag, f.warning)
	}
	f.forks++
	return f, func() {
		m.mu.Lock()
		defer m.mu.Unlock()
		f.forks--
	}, nil
}

// noteCorrupt makes a snapshot whose data turned out to be damaged show as such.
func (m *Manager) noteCorrupt(f *frozen, err error) {
	if !errors.Is(err, snapshot.ErrCorrupt) {
		return
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	f.status, f.warning = StatusFailed, err.Error()
}
