package memory

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

const sealAll = unix.F_SEAL_WRITE | unix.F_SEAL_SHRINK | unix.F_SEAL_GROW | unix.F_SEAL_SEAL

// New returns an empty memfd of the given size that can be sealed. Its pages take memory only once they are written.
func New(name string, bytes int64) (*os.File, error) {
	if bytes <= 0 || bytes%PageSize != 0 {
		return nil, fmt.Errorf("memory %s: size of %d bytes is not a positive multiple of the page size %d", name, bytes, PageSize)
	}
	fd, err := unix.MemfdCreate("forkd-"+name, unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	if err != nil {
		return nil, fmt.Errorf("memory %s: create memfd: %w", name, err)
	}
	f := os.NewFile(uintptr(fd), "memfd:forkd-"+name)
	if err := f.Truncate(bytes); err != nil {
		return nil, fmt.Errorf("memory %s: size memfd to %d bytes: %w", name, bytes, closeAfter(f, err))
	}
	return f, nil
}

// Seal makes a memfd immutable for good. It fails with EBUSY while any process maps the memfd shared and writable: end the
// monitor that booted the parent first.
func Seal(f *os.File) error {
	if _, err := unix.FcntlInt(f.Fd(), unix.F_ADD_SEALS, sealAll); err != nil {
		return fmt.Errorf("seal %s: %w", f.Name(), err)
	}
	return nil
}

// Sealed reports whether f is a memfd that can't change any more.
func Sealed(f *os.File) bool {
	seals, err := unix.FcntlInt(f.Fd(), unix.F_GET_SEALS, 0)
	const immutable = unix.F_SEAL_WRITE | unix.F_SEAL_SHRINK | unix.F_SEAL_GROW
	return err == nil && seals&immutable == immutable
}

// SealedCopy returns a sealed memfd that holds data, of any length, with its offset at zero.
func SealedCopy(name string, data []byte) (*os.File, error) {
	fd, err := unix.MemfdCreate("forkd-"+name, unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	if err != nil {
		return nil, fmt.Errorf("%s: create memfd: %w", name, err)
	}
	f := os.NewFile(uintptr(fd), "memfd:forkd-"+name)
	if _, err := f.WriteAt(data, 0); err != nil {
		return nil, fmt.Errorf("%s: write memfd: %w", name, closeAfter(f, err))
	}
	if err := Seal(f); err != nil {
		return nil, closeAfter(f, err)
	}
	return f, nil
}

// DataExtents returns the pages that a memfd holds. The rest are holes, which read as zeros.
func DataExtents(f *os.File) ([]Extent, error) {
	info, err := f.Stat()
	if err != nil {
		return nil, err
	}
	var out []Extent
	for off := int64(0); off < info.Size(); {
		data, err := unix.Seek(int(f.Fd()), off, unix.SEEK_DATA)
		if errors.Is(err, unix.ENXIO) { // a hole to the end
			break
		}
		if err != nil {
			return nil, fmt.Errorf("%s: find data from %d: %w", f.Name(), off, err)
		}
		hole, err := unix.Seek(int(f.Fd()), data, unix.SEEK_HOLE)
		if err != nil {
			return nil, fmt.Errorf("%s: find hole from %d: %w", f.Name(), data, err)
		}
		first := uint64(data / PageSize)
		out = append(out, Extent{first, uint64((hole+PageSize-1)/PageSize) - first})
		off = hole
	}
	return out, nil
}

// Punch gives back the memory of pages, which read as zeros from then on. A sealed memfd is refused with EPERM.
func Punch(f *os.File, extents []Extent) error {
	const mode = unix.FALLOC_FL_PUNCH_HOLE | unix.FALLOC_FL_KEEP_SIZE
	for _, e := range extents {
		if err := unix.Fallocate(int(f.Fd()), mode, e.Offset(), e.Bytes()); err != nil {
			return fmt.Errorf("%s: punch %d pages at %d: %w", f.Name(), e.N, e.First, err)
		}
	}
	return nil
}

// Trim gives back the memory of pages that hold only zeros and returns how many bytes that were. Call it between the end of the
// parent's monitor and Seal: a guest leaves tens of MiB of zeroed pages.
//
// Preconditions: nobody writes to the memfd, and it is not sealed.
func Trim(ctx context.Context, f *os.File) (int64, error) {
	data, err := DataExtents(f)
	if err != nil {
		return 0, err
	}
	var zero []Extent
	buf := make([]byte, 1<<20)
	for _, e := range data {
		for off, end := e.Offset(), e.Offset()+e.Bytes(); off < end; off += int64(len(buf)) {
			if err := ctx.Err(); err != nil {
				return 0, fmt.Errorf("%s: trim: %w", f.Name(), err)
			}
			window := buf[:min(int64(len(buf)), end-off)]
			if _, err := f.ReadAt(window, off); err != nil {
				return 0, fmt.Errorf("%s: trim: %w", f.Name(), err)
			}
			zero = appendZeroPages(zero, window, uint64(off/PageSize))
		}
	}
	zero = mergeSorted(zero, 0)
	return int64(Pages(zero)) * PageSize, Punch(f, zero)
}

func appendZeroPages(zero []Extent, window []byte, first uint64) []Extent {
	for p := 0; p < len(window); p += PageSize {
		if IsZeroPage(window[p : p+PageSize]) {
			zero = append(zero, Extent{first + uint64(p/PageSize), 1})
		}
	}
	return zero
}

var zeroPage [PageSize]byte

// IsZeroPage reports whether a page holds only zeros.
func IsZeroPage(page []byte) bool {
	// Most pages that are not zero say so in their first words.
	return page[0] == 0 && page[8] == 0 && bytes.Equal(page, zeroPage[:])
}

func closeAfter(f *os.File, err error) error {
	f.Close()
	return err
}
