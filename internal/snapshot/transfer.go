package snapshot

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"io"
)

// Portable is the manifest without what depends on the store that keeps the snapshot: two copies of one snapshot have equal ones.
func (m Manifest) Portable() Manifest {
	m.Memory.PhysicalBytes = 0
	return m
}

// Validate checks what Decode checks of a manifest's values.
func (m Manifest) Validate() error { return m.validate() }

// Reader reads a snapshot in a form that does not depend on how the store keeps it.
type Reader struct {
	Manifest Manifest // portable
	Index    []byte   // which pages there are and the digest of each chunk of them; its SHA-256 is Manifest.Memory.SHA256
	Device   []byte   // device state, verified
	memory   *memoryReader
}

// Read opens a snapshot to copy it elsewhere.
func (s *Store) Read(id string) (*Reader, error) {
	m, err := s.Get(id)
	if err != nil {
		return nil, err
	}
	device, err := s.readDevice(m)
	if err != nil {
		return nil, err
	}
	r, err := s.openMemory(m)
	if err != nil {
		return nil, err
	}
	return &Reader{Manifest: m.Portable(), Index: r.index.content(), Device: device, memory: r}, nil
}

// Close gives up the files.
func (r *Reader) Close() error { return r.memory.Close() }

// WriteMemory writes the stored pages in the index's order: Manifest.Memory.DataBytes of them, each chunk verified before any of it
// is written.
func (r *Reader) WriteMemory(ctx context.Context, w io.Writer) error {
	d := new(chunkDecoder)
	defer d.Close()
	for _, c := range r.memory.index.chunks() {
		if err := ctx.Err(); err != nil {
			return fmt.Errorf("read snapshot %s: %w", r.Manifest.ID, context.Cause(ctx))
		}
		pages, err := r.memory.read(d, c)
		if err != nil {
			return err
		}
		if _, err := w.Write(pages); err != nil {
			return err
		}
	}
	return nil
}

// ReadMemory stores memory that a Reader wrote: index is the Reader's, pages what WriteMemory writes. Each chunk is verified before
// it is stored; the index must be the one that m names. It reads no further than the pages' end.
func (st *Staging) ReadMemory(ctx context.Context, m Manifest, index []byte, pages io.Reader) error {
	return st.do("read memory", func() error {
		if st.index != nil {
			return fmt.Errorf("%w: memory was written already", ErrInvalid)
		}
		x, err := decodeFor(m, index)
		if err != nil {
			return &CorruptError{Snapshot: m.ID, File: indexFile, Offset: -1, Reason: "unusable", Err: err}
		}
		return st.readMemory(ctx, m.ID, x, pages)
	})
}

func (st *Staging) readMemory(ctx context.Context, id string, x *index, pages io.Reader) error {
	if err := st.store.hook(StepMemory); err != nil {
		return err
	}
	f, err := st.create(memoryFile)
	if err != nil {
		return err
	}
	want := x.sums
	w := &memoryWriter{file: f, compress: st.store.compress, hook: st.store.hook}
	w.check = func(j *job) error {
		if j.sum == want[j.index] {
			return nil
		}
		return &CorruptError{Snapshot: id, File: memoryFile, Offset: int64(j.index) * ChunkBytes,
			Reason:   fmt.Sprintf("digest of chunk %d does not match", j.index),
			Expected: hex.EncodeToString(want[j.index][:]), Actual: hex.EncodeToString(j.sum[:])}
	}
	err = w.run(ctx, x, func(emit func(*job) error) error {
		for i := range want {
			j := w.newJob(i)
			j.n = x.chunkBytes(i)
			if n, err := io.ReadFull(pages, (*j.pages)[:j.n]); err != nil {
				return fmt.Errorf("memory of snapshot %s ends after %d bytes of %d: %w", id, i*ChunkBytes+n, x.dataBytes(), err)
			}
			if err := emit(j); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		return err
	}
	return st.writeIndex(x)
}

// decodeFor reads the index that a manifest names.
func decodeFor(m Manifest, content []byte) (*index, error) {
	if sum := sha256.Sum256(content); hex.EncodeToString(sum[:]) != m.Memory.SHA256 {
		return nil, fmt.Errorf("digest does not match the manifest (expected %s, actual %x)", m.Memory.SHA256, sum)
	}
	x, rest, err := decodeContent(content)
	if err != nil {
		return nil, err
	}
	switch {
	case len(rest) > 0:
		return nil, fmt.Errorf("%d bytes behind its end", len(rest))
	case x.logical != m.Memory.LogicalBytes || x.dataBytes() != m.Memory.DataBytes:
		return nil, fmt.Errorf("sizes do not match the manifest (expected %d/%d bytes, actual %d/%d)",
			m.Memory.LogicalBytes, m.Memory.DataBytes, x.logical, x.dataBytes())
	case x.layer != (m.Parent != ""):
		return nil, fmt.Errorf("a layer needs a parent, and nothing else has one (layer: %v, parent: %q)", x.layer, m.Parent)
	}
	return x, nil
}

// ReadDevice stores a device state that must be the one that m names.
func (st *Staging) ReadDevice(ctx context.Context, m Manifest, r io.Reader) error {
	return st.do("read device state", func() error {
		if st.device.SHA256 != "" {
			return fmt.Errorf("%w: device state was written already", ErrInvalid)
		}
		if m.Device.Bytes < 0 || m.Device.Bytes > maxDeviceBytes {
			return fmt.Errorf("%w: device state of %d bytes", ErrInvalid, m.Device.Bytes)
		}
		data, err := io.ReadAll(io.LimitReader(r, m.Device.Bytes+1))
		if err != nil {
			return fmt.Errorf("device state of snapshot %s: %w", m.ID, err)
		}
		sum := sha256.Sum256(data)
		if int64(len(data)) != m.Device.Bytes || hex.EncodeToString(sum[:]) != m.Device.SHA256 {
			return &CorruptError{Snapshot: m.ID, File: deviceFile, Offset: -1, Reason: "is not the one that the manifest names",
				Expected: fmt.Sprintf("%d bytes, %s", m.Device.Bytes, m.Device.SHA256), Actual: fmt.Sprintf("%d bytes, %x", len(data), sum)}
		}
		return st.writeDevice(ctx, data)
	})
}

// MaxIndexBytes is how long a Reader's Index can be.
const MaxIndexBytes = maxIndexBytes
