package snapshot

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/forkd/forkd/internal/memory"
)

// Staging is a snapshot being written. Any operation that fails removes it: what remains to do then is to report the error.
type Staging struct {
	store *Store
	id    string
	dir   string

	mu     sync.Mutex // held for the whole of each operation
	lock   *os.File   // tells other processes that the directory is alive; nil: published or aborted
	open   []*os.File // written, not yet synced
	index  *index     // nil: no memory yet
	device Blob       // without a digest: no device state yet

	gently   bool
	prepared bool // all is durable
}

// Stage begins a snapshot. It refuses an id that is taken with ErrExists.
func (s *Store) Stage(id string) (*Staging, error) {
	if !ValidID(id) {
		return nil, fmt.Errorf("stage snapshot: %w: id %.80q: want %s", ErrInvalid, id, idPattern)
	}
	if _, err := os.Lstat(s.Dir(id)); err == nil {
		return nil, fmt.Errorf("stage snapshot %s: %w", id, ErrExists)
	}
	if err := s.hook(StepStage); err != nil {
		return nil, fmt.Errorf("stage snapshot %s: %w", id, diskError(err))
	}
	st := &Staging{store: s, id: id}
	for { // another process's sweep may take the directory between the two calls
		st.dir = filepath.Join(s.dir, uniqueName(stagingPrefix))
		if err := os.Mkdir(st.dir, 0o700); err != nil {
			return nil, fmt.Errorf("stage snapshot %s: %w", id, diskError(err))
		}
		lock, err := lockDir(st.dir)
		if err == nil {
			st.lock = lock
			return st, nil
		}
		if !errors.Is(err, unix.EWOULDBLOCK) && !isNotExist(err) {
			return nil, fmt.Errorf("stage snapshot %s: %w", id, errors.Join(err, os.RemoveAll(st.dir)))
		}
	}
}

// Gently has memory written with at most about half a processor, whatever else is free: a guest that goes on meanwhile is not to notice. Where
// all of a host's processors are busy they are often taken away: for tens of milliseconds at a time, by a quota (bench/README.md).
func (st *Staging) Gently() { st.gently = true }

// ID is the snapshot's id.
func (st *Staging) ID() string { return st.id }

// WriteMemory stores guest memory: with nil extents all pages that are not zero, else exactly the extents' pages, as a layer. It
// also gives back the memory of the zero pages it comes across, unless ram is sealed.
//
// Preconditions: nobody writes to ram.
func (st *Staging) WriteMemory(ctx context.Context, ram *os.File, extents []memory.Extent) error {
	return st.do("write memory", func() error {
		src, err := fromFile(ram, extents)
		if err != nil {
			return err
		}
		return st.writeMemory(ctx, src, extents != nil)
	})
}

// WriteImage stores the memory of a resident image, all layers merged: a self-contained snapshot.
func (st *Staging) WriteImage(ctx context.Context, img *memory.Image) error {
	return st.do("write memory", func() error {
		src, err := fromImage(img)
		if err != nil {
			return err
		}
		return st.writeMemory(ctx, src, false)
	})
}

func (st *Staging) writeMemory(ctx context.Context, src *source, layer bool) error {
	if st.index != nil {
		return fmt.Errorf("%w: memory was written already", ErrInvalid)
	}
	if err := st.store.hook(StepMemory); err != nil {
		return err
	}
	f, err := st.create(memoryFile)
	if err != nil {
		return err
	}
	w := &memoryWriter{file: f, compress: st.store.compress, hook: st.store.hook, gently: st.gently}
	x, err := w.write(ctx, src)
	if err != nil {
		return err
	}
	if x.layer = layer; layer {
		x.zero = memory.Subtract(src.wanted, x.data)
	}
	if err := src.punch(x.data); err != nil {
		return err
	}
	return st.writeIndex(x)
}

func (st *Staging) writeIndex(x *index) error {
	file := x.encode()
	if len(file) > maxIndexBytes {
		return fmt.Errorf("%w: its pages are in too many runs (%d)", ErrInvalid, len(x.data)+len(x.zero))
	}
	if err := st.store.hook(StepIndex); err != nil {
		return err
	}
	if err := st.writeFile(indexFile, file); err != nil {
		return err
	}
	st.index = x
	return nil
}

// WriteDevice stores the device state: all of the file, from its start.
func (st *Staging) WriteDevice(ctx context.Context, state *os.File) error {
	return st.do("write device state", func() error {
		if st.device.SHA256 != "" {
			return fmt.Errorf("%w: device state was written already", ErrInvalid)
		}
		data, err := io.ReadAll(io.NewSectionReader(state, 0, maxDeviceBytes+1))
		if err != nil {
			return err
		}
		if len(data) > maxDeviceBytes {
			return fmt.Errorf("%w: device state has more than %d bytes", ErrInvalid, maxDeviceBytes)
		}
		return st.writeDevice(ctx, data)
	})
}

func (st *Staging) writeDevice(ctx context.Context, data []byte) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	if err := st.store.hook(StepDevice); err != nil {
		return err
	}
	if err := st.writeFile(deviceFile, data); err != nil {
		return err
	}
	sum := sha256.Sum256(data)
	st.device = Blob{Bytes: int64(len(data)), SHA256: hex.EncodeToString(sum[:])}
	return nil
}

// Publish makes the snapshot durable and gives it its name, at once and for good. It completes the manifest (format, id, memory,
// device; the time if it is zero) and returns it. ErrExists: the id was taken meanwhile.
func (st *Staging) Publish(ctx context.Context, m Manifest) (Manifest, error) {
	m, err := st.Prepare(ctx, m)
	if err != nil {
		return Manifest{}, err
	}
	if err := st.Commit(); err != nil {
		return Manifest{}, err
	}
	return m, nil
}

// Prepare is the first part of Publish: all is durable, and nothing has its name yet.
func (st *Staging) Prepare(ctx context.Context, m Manifest) (Manifest, error) {
	err := st.do("prepare", func() error {
		if err := st.complete(&m); err != nil {
			return err
		}
		if err := st.prepare(m); err != nil {
			return err
		}
		return ctx.Err()
	})
	return m, err
}

// Commit is the second part of Publish: the snapshot gets its name.
func (st *Staging) Commit() error {
	return st.do("publish", func() error {
		if !st.prepared {
			return fmt.Errorf("%w: it was not prepared", ErrInvalid)
		}
		return st.rename()
	})
}

// complete fills in what the staging knows.
func (st *Staging) complete(m *Manifest) error {
	if st.index == nil || st.device.SHA256 == "" {
		return fmt.Errorf("%w: memory or device state was not written", ErrInvalid)
	}
	if st.index.layer != (m.Parent != "") {
		return fmt.Errorf("%w: a layer needs a parent and a self-contained snapshot has none (parent %q)", ErrInvalid, m.Parent)
	}
	if m.CreatedAt.IsZero() {
		m.CreatedAt = time.Now()
	}
	m.FormatVersion, m.ID, m.CreatedAt = FormatVersion, st.id, m.CreatedAt.UTC().Round(0)
	m.Memory = MemoryInfo{
		LogicalBytes:  st.index.logical,
		DataBytes:     st.index.dataBytes(),
		PhysicalBytes: st.index.fileBytes(),
		ChunkBytes:    ChunkBytes,
		SHA256:        st.index.contentSHA256(),
	}
	m.Device = st.device
	return nil
}

func (st *Staging) prepare(m Manifest) error {
	file, err := m.Encode()
	if err != nil {
		return err
	}
	if err := st.store.hook(StepManifest); err != nil {
		return err
	}
	if err := st.writeFile(manifestFile, file); err != nil {
		return err
	}
	if err := st.syncFiles(); err != nil {
		return err
	}
	if err := st.store.hook(StepSyncStaging); err != nil {
		return err
	}
	st.prepared = true
	return syncDir(st.dir)
}

func (st *Staging) syncFiles() error {
	if err := st.store.hook(StepSyncFiles); err != nil {
		return err
	}
	for _, f := range st.open {
		if err := f.Sync(); err != nil {
			return err
		}
	}
	return st.closeFiles()
}

// rename gives the snapshot its name. If that can't be made durable it is taken back.
func (st *Staging) rename() error {
	if err := st.store.hook(StepRename); err != nil {
		return err
	}
	final := st.store.Dir(st.id)
	if err := renameNew(st.dir, final); err != nil {
		return err
	}
	err := st.store.hook(StepSyncStore)
	if err == nil {
		err = syncDir(st.store.dir)
	}
	if err != nil {
		return errors.Join(err, os.Rename(final, st.dir))
	}
	st.finish()
	return nil
}

// Abort removes what was written. After Publish, and when called again, it does nothing.
func (st *Staging) Abort() error {
	st.mu.Lock()
	defer st.mu.Unlock()
	return st.discard()
}

// do runs an operation; when it fails the staging is removed.
func (st *Staging) do(what string, op func() error) error {
	st.mu.Lock()
	defer st.mu.Unlock()
	if st.lock == nil {
		return fmt.Errorf("snapshot %s: %s: %w", st.id, what, ErrFinished)
	}
	err := op()
	if err != nil {
		err = errors.Join(err, st.discard())
		return fmt.Errorf("snapshot %s: %s: %w", st.id, what, diskError(err))
	}
	return nil
}

func (st *Staging) discard() error {
	if st.lock == nil {
		return nil
	}
	err := os.RemoveAll(st.dir)
	st.finish()
	return err
}

func (st *Staging) finish() {
	st.closeFiles()
	st.lock.Close()
	st.lock = nil
}

// create makes a file that Publish will sync.
func (st *Staging) create(name string) (*os.File, error) {
	f, err := os.OpenFile(filepath.Join(st.dir, name), os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return nil, err
	}
	st.open = append(st.open, f)
	return f, nil
}

func (st *Staging) writeFile(name string, data []byte) error {
	f, err := st.create(name)
	if err != nil {
		return err
	}
	_, err = f.Write(data)
	return err
}

func (st *Staging) closeFiles() error {
	var errs []error
	for _, f := range st.open {
		errs = append(errs, f.Close())
	}
	st.open = nil
	return errors.Join(errs...)
}
