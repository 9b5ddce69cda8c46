package memory

import (
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

func closeAfter(f *os.File, err error) error {
	f.Close()
	return err
}
