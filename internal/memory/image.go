package memory

import (
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"sync"
	"sync/atomic"
)

// Image is a resident image: the memory of one snapshot in sealed memfds. It is immutable and safe for concurrent use.
type Image struct {
	base   *sharedFile
	layers []Layer       // as given, oldest first
	shared []*sharedFile // of layers, in the same order
	merged []Layer
	plan   []Layer
	bytes  int64
	close  sync.Once
}

// NewImage makes an image of a sealed base and the layers over it, oldest first. The image owns the files from then on; when it
// returns an error they stay the caller's.
func NewImage(base *os.File, layers ...Layer) (*Image, error) {
	info, err := base.Stat()
	if err != nil {
		return nil, fmt.Errorf("image: %w", err)
	}
	if !Sealed(base) {
		return nil, fmt.Errorf("image: base %s is not sealed", base.Name())
	}
	root := &Image{base: newSharedFile(base), bytes: info.Size()}
	img, err := root.Derive(layers...)
	if err != nil {
		return nil, err
	}
	img.base.release() // root's own share; the file is still held by img
	return img, nil
}

// Derive makes an image that has more layers over i, oldest first. Both hold the files they have in common; each may be closed
// without regard to the other. The new image owns the layers' files; when Derive returns an error they stay the caller's.
func (i *Image) Derive(layers ...Layer) (*Image, error) {
	for n, l := range layers {
		if err := i.checkLayer(l); err != nil {
			return nil, fmt.Errorf("image: layer %d: %w", n, err)
		}
	}
	child := &Image{base: i.base.share(), bytes: i.bytes}
	for n, l := range i.layers {
		child.layers = append(child.layers, l)
		child.shared = append(child.shared, i.shared[n].share())
	}
	for _, l := range layers {
		child.layers = append(child.layers, Layer{l.File, slices.Clone(l.Extents)})
		child.shared = append(child.shared, newSharedFile(l.File))
	}
	child.merged, child.plan = MergeLayers(child.layers), PlanMappings(child.layers)
	return child, nil
}

func (i *Image) checkLayer(l Layer) error {
	info, err := l.File.Stat()
	if err != nil {
		return err
	}
	switch {
	case info.Size() != i.bytes:
		return fmt.Errorf("%s has %d bytes, its base has %d", l.File.Name(), info.Size(), i.bytes)
	case !IsNormal(l.Extents):
		return errors.New("extents are not sorted and disjoint")
	case len(l.Extents) > 0 && l.Extents[len(l.Extents)-1].End() > uint64(i.bytes/PageSize):
		return fmt.Errorf("extents reach page %d of %d", l.Extents[len(l.Extents)-1].End(), i.bytes/PageSize)
	case !Sealed(l.File):
		return fmt.Errorf("%s is not sealed", l.File.Name())
	}
	return nil
}

// Base is the memfd that a child maps first, whole. It stays the image's: do not close it.
func (i *Image) Base() *os.File { return i.base.file }

// Bytes is the size of guest memory.
func (i *Image) Bytes() int64 { return i.bytes }

// Layers are what a child maps over the base: the chain merged, oldest first, with disjoint extents. Layers of which nothing can
// be seen any more are left out. The files stay the image's.
func (i *Image) Layers() []Layer { return i.merged }

// Plan is the same with as few mappings as possible: they overlap, so they must be made in the order given.
func (i *Image) Plan() []Layer { return i.plan }

// Mappings is how many mappings a child of the image ends up with: a system's limit (vm.max_map_count) and the monitor's own
// mappings say when an image must be flattened instead.
func (i *Image) Mappings() int {
	n := 1
	for _, l := range i.merged {
		n += len(l.Extents)
	}
	return n
}

// Resident is how many bytes of memory the image's files take, those shared with other images included.
func (i *Image) Resident() int64 {
	var n int64
	for _, f := range i.files() {
		n += residentBytes(f.file)
	}
	return n
}

func (i *Image) files() []*sharedFile { return append([]*sharedFile{i.base}, i.shared...) }

// ReadAt reads guest memory as a child of the image sees it before it runs.
func (i *Image) ReadAt(p []byte, off int64) (int, error) {
	if off < 0 {
		return 0, fmt.Errorf("image: read at negative offset %d", off)
	}
	if off >= i.bytes {
		return 0, io.EOF
	}
	short := int64(len(p)) > i.bytes-off
	if short {
		p = p[:i.bytes-off]
	}
	if n, err := i.base.file.ReadAt(p, off); err != nil {
		return n, fmt.Errorf("image: read base: %w", err)
	}
	for _, l := range i.merged {
		if err := l.overlay(p, off); err != nil {
			return 0, fmt.Errorf("image: read layer: %w", err)
		}
	}
	if short {
		return len(p), io.EOF
	}
	return len(p), nil
}

// overlay puts the layer's bytes of [off, off+len(p)) over p.
func (l Layer) overlay(p []byte, off int64) error {
	end := off + int64(len(p))
	first, _ := slices.BinarySearchFunc(l.Extents, off, func(e Extent, off int64) int {
		if e.Offset()+e.Bytes() <= off {
			return -1
		}
		return 1
	})
	for _, e := range l.Extents[first:] {
		from, to := max(off, e.Offset()), min(end, e.Offset()+e.Bytes())
		if from >= to {
			return nil
		}
		if _, err := l.File.ReadAt(p[from-off:to-off], from); err != nil {
			return err
		}
	}
	return nil
}

// Close gives up the image. Its files are closed with the last image that holds them; children keep their mappings. Closing
// twice is harmless.
func (i *Image) Close() error {
	var errs []error
	i.close.Do(func() {
		errs = append(errs, i.base.release())
		for _, f := range i.shared {
			errs = append(errs, f.release())
		}
	})
	return errors.Join(errs...)
}

// sharedFile closes its file with the last image that holds it.
type sharedFile struct {
	file *os.File
	refs atomic.Int64
}

func newSharedFile(f *os.File) *sharedFile {
	s := &sharedFile{file: f}
	s.refs.Store(1)
	return s
}

func (s *sharedFile) share() *sharedFile {
	s.refs.Add(1)
	return s
}

func (s *sharedFile) release() error {
	if s.refs.Add(-1) > 0 {
		return nil
	}
	return s.file.Close()
}
