package snapshot

import (
	"errors"
	"fmt"
	"io"
	"os"

	"golang.org/x/sys/unix"

	"github.com/forkd/forkd/internal/memory"
)

// source is guest memory to be stored.
type source struct {
	io.ReaderAt
	bytes  int64
	wanted []memory.Extent // pages to be stored
	data   []memory.Extent // those of them that may hold something: the rest are holes
	ram    *os.File        // where zero pages may be given back; nil: nowhere
}

// fromFile reads a memfd: all of it, or the pages of extents.
func fromFile(ram *os.File, extents []memory.Extent) (*source, error) {
	info, err := ram.Stat()
	if err != nil {
		return nil, err
	}
	pages := uint64(info.Size() / memory.PageSize)
	wanted := []memory.Extent{{First: 0, N: pages}}
	if extents != nil {
		wanted = memory.Normalize(extents)
	}
	if n := len(wanted); n > 0 && (wanted[n-1].End() > pages || !memory.IsNormal(wanted)) {
		return nil, fmt.Errorf("%w: extents reach page %d of %d", ErrInvalid, wanted[n-1].End(), pages)
	}
	data, err := memory.DataExtents(ram)
	if err != nil {
		return nil, err
	}
	return &source{ReaderAt: ram, bytes: info.Size(), wanted: wanted, data: memory.Intersect(wanted, data), ram: ram}, nil
}

// fromImage reads a resident image.
func fromImage(img *memory.Image) (*source, error) {
	data, err := memory.DataExtents(img.Base())
	if err != nil {
		return nil, err
	}
	for _, l := range img.Layers() {
		data = memory.Union(data, l.Extents)
	}
	wanted := []memory.Extent{{First: 0, N: uint64(img.Bytes() / memory.PageSize)}}
	return &source{ReaderAt: img, bytes: img.Bytes(), wanted: wanted, data: data}, nil
}

// punch gives back the memory of the pages that turned out to be zeros: all but those stored.
func (s *source) punch(stored []memory.Extent) error {
	if s.ram == nil {
		return nil
	}
	err := memory.Punch(s.ram, memory.Subtract(s.data, stored))
	if errors.Is(err, unix.EPERM) { // sealed
		return nil
	}
	return err
}
