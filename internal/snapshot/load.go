package snapshot

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"os"
	"path/filepath"
	"sync/atomic"

	"golang.org/x/sync/errgroup"

	"github.com/forkd/forkd/internal/memory"
	"github.com/forkd/forkd/internal/thread"
)

// Load reads a snapshot's whole chain into sealed memfds. Every chunk is verified while it is read. To share what snapshots have
// in common, use Acquire.
func (s *Store) Load(ctx context.Context, id string) (*memory.Image, error) {
	chain, err := s.Chain(id)
	if err != nil {
		return nil, err
	}
	img, err := s.loadOne(ctx, chain[0], nil)
	for _, m := range chain[1:] {
		if err != nil {
			return nil, err
		}
		below := img
		img, err = s.loadOne(ctx, m, below)
		below.Close()
	}
	return img, err
}

// Acquire returns a reference to the resident image of a snapshot, loading what is not in the cache. Snapshots of one family share
// their base and the layers they have in common.
func (s *Store) Acquire(ctx context.Context, cache *memory.Cache, id string) (*memory.Ref, error) {
	return cache.Acquire(ctx, id, func(ctx context.Context) (*memory.Image, error) {
		chain, err := s.Chain(id)
		if err != nil {
			return nil, err
		}
		return s.loadTip(ctx, cache, chain)
	})
}

// loadTip loads the last snapshot of a chain over the image of the one before it, which it takes from the cache.
func (s *Store) loadTip(ctx context.Context, cache *memory.Cache, chain []Manifest) (*memory.Image, error) {
	below, tip := chain[:len(chain)-1], chain[len(chain)-1]
	if len(below) == 0 {
		return s.loadOne(ctx, tip, nil)
	}
	parent, err := cache.Acquire(ctx, tip.Parent, func(ctx context.Context) (*memory.Image, error) {
		return s.loadTip(ctx, cache, below)
	})
	if err != nil {
		return nil, err
	}
	defer parent.Release()
	return s.loadOne(ctx, tip, parent.Image())
}

// loadOne reads the memory of one snapshot over the image it rests on; nil for none. It leaves that image to its owner.
func (s *Store) loadOne(ctx context.Context, m Manifest, below *memory.Image) (*memory.Image, error) {
	f, err := memory.New("snap-"+m.ID, m.Memory.LogicalBytes)
	if err != nil {
		return nil, fmt.Errorf("load snapshot %s: %w", m.ID, err)
	}
	img, err := s.loadInto(ctx, m, f, below)
	if err != nil {
		f.Close()
		return nil, err
	}
	return img, nil
}

func (s *Store) loadInto(ctx context.Context, m Manifest, f *os.File, below *memory.Image) (*memory.Image, error) {
	r, err := s.openMemory(m)
	if err != nil {
		return nil, err
	}
	defer r.Close()
	err = r.each(ctx, func(c chunk, pages []byte) error {
		for _, e := range c.extents {
			if _, err := f.WriteAt(pages[:e.Bytes()], e.Offset()); err != nil {
				return fmt.Errorf("load snapshot %s: %w", m.ID, err)
			}
			pages = pages[e.Bytes():]
		}
		return nil
	})
	if err != nil {
		return nil, err
	}
	if below == nil {
		if err := memory.Seal(f); err != nil {
			return nil, fmt.Errorf("load snapshot %s: %w", m.ID, err)
		}
		return memory.NewImage(f)
	}
	extents, err := memory.FillGaps(f, r.index.extents(), below)
	if err != nil {
		return nil, fmt.Errorf("load snapshot %s: %w", m.ID, err)
	}
	if err := memory.Seal(f); err != nil {
		return nil, fmt.Errorf("load snapshot %s: %w", m.ID, err)
	}
	return below.Derive(memory.Layer{File: f, Extents: extents})
}

// memoryReader reads the memory file of one snapshot.
type memoryReader struct {
	id    string
	file  *os.File
	index *index
}

// openMemory opens a snapshot's memory file after checking its index and its length.
func (s *Store) openMemory(m Manifest) (*memoryReader, error) {
	x, err := s.readIndex(m)
	if err != nil {
		return nil, err
	}
	f, err := os.Open(filepath.Join(s.Dir(m.ID), memoryFile))
	if isNotExist(err) {
		return nil, &CorruptError{Snapshot: m.ID, File: memoryFile, Offset: -1, Reason: "missing"}
	}
	if err != nil {
		return nil, fmt.Errorf("snapshot %s: %w", m.ID, err)
	}
	if err := checkLength(m.ID, memoryFile, f, x.fileBytes()); err != nil {
		f.Close()
		return nil, err
	}
	return &memoryReader{id: m.ID, file: f, index: x}, nil
}

func checkLength(id, name string, f *os.File, want int64) error {
	info, err := f.Stat()
	if err != nil {
		return fmt.Errorf("snapshot %s: %w", id, err)
	}
	if got := info.Size(); got != want {
		reason := "truncated"
		if got > want {
			reason = "has bytes behind its end"
		}
		return &CorruptError{Snapshot: id, File: name, Offset: min(got, want), Reason: reason,
			Expected: fmt.Sprintf("%d bytes", want), Actual: fmt.Sprintf("%d bytes", got)}
	}
	return nil
}

func (s *Store) readIndex(m Manifest) (*index, error) {
	corrupt := func(reason, want, got string, err error) error {
		return &CorruptError{Snapshot: m.ID, File: indexFile, Offset: -1, Reason: reason, Expected: want, Actual: got, Err: err}
	}
	file, err := readLimited(filepath.Join(s.Dir(m.ID), indexFile), maxIndexBytes)
	if isNotExist(err) {
		return nil, corrupt("missing", "", "", nil)
	}
	if err != nil {
		return nil, fmt.Errorf("snapshot %s: %w", m.ID, err)
	}
	x, err := decodeIndex(file)
	if err != nil {
		return nil, corrupt("unreadable", "", "", err)
	}
	switch got := x.contentSHA256(); {
	case got != m.Memory.SHA256:
		return nil, corrupt("digest does not match the manifest", m.Memory.SHA256, got, nil)
	case x.logical != m.Memory.LogicalBytes || x.dataBytes() != m.Memory.DataBytes || x.fileBytes() != m.Memory.PhysicalBytes:
		return nil, corrupt("sizes do not match the manifest",
			fmt.Sprintf("%d/%d/%d bytes", m.Memory.LogicalBytes, m.Memory.DataBytes, m.Memory.PhysicalBytes),
			fmt.Sprintf("%d/%d/%d bytes", x.logical, x.dataBytes(), x.fileBytes()), nil)
	case x.layer != (m.Parent != ""):
		return nil, corrupt("a layer needs a parent, and nothing else has one", fmt.Sprintf("layer: %v", x.layer), fmt.Sprintf("parent: %q", m.Parent), nil)
	}
	return x, nil
}

func (r *memoryReader) Close() error { return r.file.Close() }

// each verifies all chunks, on all cores, and calls fn with each chunk's pages. fn may be called by several goroutines at a time
// and must not keep the pages.
func (r *memoryReader) each(ctx context.Context, fn func(c chunk, pages []byte) error) error {
	chunks := r.index.chunks()
	var next atomic.Int64
	group, ctx := errgroup.WithContext(ctx)
	for range min(thread.Cores(), len(chunks)) {
		group.Go(func() error {
			d := new(chunkDecoder)
			defer d.Close()
			for {
				n := int(next.Add(1)) - 1
				if n >= len(chunks) {
					return nil
				}
				if err := ctx.Err(); err != nil {
					return fmt.Errorf("read snapshot %s: %w", r.id, context.Cause(ctx))
				}
				pages, err := r.read(d, chunks[n])
				if err != nil {
					return err
				}
				if err := fn(chunks[n], pages); err != nil {
					return err
				}
			}
		})
	}
	return group.Wait()
}

// read returns a chunk's pages, verified, in d's buffer.
func (r *memoryReader) read(d *chunkDecoder, c chunk) ([]byte, error) {
	corrupt := func(reason, want, got string, err error) error {
		return &CorruptError{Snapshot: r.id, File: memoryFile, Offset: c.offset, Reason: reason, Expected: want, Actual: got, Err: err}
	}
	stored := d.stored[:c.stored]
	if n, err := r.file.ReadAt(stored, c.offset); err != nil {
		return nil, corrupt("unreadable", fmt.Sprintf("%d bytes", c.stored), fmt.Sprintf("%d bytes", n), err)
	}
	pages, err := d.decode(stored, c.bytes)
	if err != nil {
		return nil, corrupt(fmt.Sprintf("chunk %d can't be decompressed", c.n), "", "", err)
	}
	if got := sha256.Sum256(pages); got != c.sum {
		return nil, corrupt(fmt.Sprintf("digest of chunk %d does not match", c.n), hex.EncodeToString(c.sum[:]), hex.EncodeToString(got[:]), nil)
	}
	return pages, nil
}

// Device returns a sealed memfd that holds the device state, verified.
func (s *Store) Device(id string) (*os.File, error) {
	m, err := s.Get(id)
	if err != nil {
		return nil, err
	}
	data, err := s.readDevice(m)
	if err != nil {
		return nil, err
	}
	f, err := memory.SealedCopy("device-"+id, data)
	if err != nil {
		return nil, fmt.Errorf("snapshot %s: device state: %w", id, err)
	}
	return f, nil
}

func (s *Store) readDevice(m Manifest) ([]byte, error) {
	f, err := os.Open(filepath.Join(s.Dir(m.ID), deviceFile))
	if isNotExist(err) {
		return nil, &CorruptError{Snapshot: m.ID, File: deviceFile, Offset: -1, Reason: "missing"}
	}
	if err != nil {
		return nil, fmt.Errorf("snapshot %s: %w", m.ID, err)
	}
	defer f.Close()
	if err := checkLength(m.ID, deviceFile, f, m.Device.Bytes); err != nil {
		return nil, err
	}
	data := make([]byte, m.Device.Bytes)
	if n, err := f.ReadAt(data, 0); err != nil {
		return nil, &CorruptError{Snapshot: m.ID, File: deviceFile, Offset: int64(n), Reason: "unreadable", Err: err}
	}
	if sum := sha256.Sum256(data); hex.EncodeToString(sum[:]) != m.Device.SHA256 {
		return nil, &CorruptError{Snapshot: m.ID, File: deviceFile, Offset: 0, Reason: "digest does not match",
			Expected: m.Device.SHA256, Actual: hex.EncodeToString(sum[:])}
	}
	return data, nil
}

// Verify reads everything that restoring a snapshot needs, its chain included, and checks it against its digests.
func (s *Store) Verify(ctx context.Context, id string) error {
	chain, err := s.Chain(id)
	if err != nil {
		return err
	}
	for _, m := range chain {
		if err := s.verifyOne(ctx, m); err != nil {
			return fmt.Errorf("verify snapshot %s: %w", id, err)
		}
	}
	return nil
}

func (s *Store) verifyOne(ctx context.Context, m Manifest) error {
	if _, err := s.readDevice(m); err != nil {
		return err
	}
	r, err := s.openMemory(m)
	if err != nil {
		return err
	}
	defer r.Close()
	return r.each(ctx, func(chunk, []byte) error { return nil })
}
