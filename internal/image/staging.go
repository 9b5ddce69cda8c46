package image

import (
	"bufio"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"
)

// stagingPrefix starts the names of directories in which something is being made. Their owner holds a lock on the directory: one
// that can be locked is a leftover.
const stagingPrefix = ".staging-"

// staging is a directory in which something is made before it is published.
type staging struct {
	dir  string
	lock *os.File
}

func newStaging(parent string) (*staging, error) {
	dir, err := os.MkdirTemp(parent, stagingPrefix)
	if err != nil {
		return nil, fmt.Errorf("create staging directory: %w", err)
	}
	lock, err := os.Open(dir)
	if err == nil {
		err = unix.Flock(int(lock.Fd()), unix.LOCK_EX|unix.LOCK_NB)
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("lock staging directory %s: %w", dir, err), os.RemoveAll(dir))
	}
	return &staging{dir: dir, lock: lock}, nil
}

func (s *staging) path(name string) string { return filepath.Join(s.dir, name) }

// remove deletes the directory and everything that was not moved out of it.
func (s *staging) remove() error {
	return errors.Join(removeTree(s.dir), s.lock.Close())
}

// removeStale deletes the staging directories below parent whose owner is gone.
func removeStale(parent string) error {
	dirs, err := filepath.Glob(filepath.Join(parent, stagingPrefix+"*"))
	if err != nil {
		return fmt.Errorf("list leftovers: %w", err)
	}
	var errs []error
	for _, dir := range dirs {
		lock, err := os.Open(dir)
		if err != nil {
			continue // its owner was faster
		}
		if unix.Flock(int(lock.Fd()), unix.LOCK_EX|unix.LOCK_NB) == nil {
			errs = append(errs, removeTree(dir))
		}
		lock.Close()
	}
	return errors.Join(errs...)
}

// removeTree deletes a tree in which a root file system may have been built. It refuses one that has something mounted in it:
// deleting through a mount would delete what is mounted.
func removeTree(dir string) error {
	mounts, err := os.Open("/proc/self/mountinfo")
	if err != nil {
		return fmt.Errorf("read mounts: %w", err)
	}
	defer mounts.Close()
	for lines := bufio.NewScanner(mounts); lines.Scan(); {
		if f := strings.Fields(lines.Text()); len(f) > 4 && strings.HasPrefix(f[4], dir+"/") {
			return fmt.Errorf("not removing %s: something is mounted in it: run: umount %s", dir, f[4])
		}
	}
	if err := os.RemoveAll(dir); err != nil {
		return fmt.Errorf("remove %s: %w", dir, err)
	}
	return nil
}

// writeFile writes and syncs a new file.
func writeFile(path string, data []byte, perm fs.FileMode) error {
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, perm)
	if err != nil {
		return fmt.Errorf("create file: %w", err)
	}
	_, err = f.Write(data)
	if err == nil {
		err = f.Sync()
	}
	return errors.Join(err, f.Close())
}

// openRegular opens a file that somebody names. Of anything else, such as a pipe, opening or reading may never end.
func openRegular(path string) (*os.File, error) {
	f, err := os.OpenFile(path, os.O_RDONLY|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil, err
	}
	info, err := f.Stat()
	if err == nil && !info.Mode().IsRegular() {
		err = fmt.Errorf("%s is a %s, not a file", path, kindOf(info.Mode()))
	}
	if err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return f, nil
}

func kindOf(m fs.FileMode) string {
	switch {
	case m.IsDir():
		return "directory"
	case m&fs.ModeNamedPipe != 0:
		return "pipe"
	case m&fs.ModeSocket != 0:
		return "socket"
	}
	return "device"
}

// copyFile copies and syncs a file, padded with zeros to a multiple of align bytes. Where the file system can share blocks the copy
// costs no space.
func copyFile(dst, src string, align int64) error {
	in, err := openRegular(src)
	if err != nil {
		return fmt.Errorf("open file: %w", err)
	}
	defer in.Close()
	out, err := os.OpenFile(dst, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o644)
	if err != nil {
		return fmt.Errorf("create file: %w", err)
	}
	n, err := io.Copy(out, in)
	if err == nil && n%align != 0 {
		err = out.Truncate(n + align - n%align)
	}
	if err == nil {
		err = out.Sync()
	}
	if err := errors.Join(err, out.Close()); err != nil {
		return fmt.Errorf("copy %s: %w", src, err)
	}
	return nil
}

// linkFile gives a file that is never written again a second name, or copies it where that can't be.
func linkFile(dst, src string) error {
	if os.Link(src, dst) == nil {
		return nil
	}
	return copyFile(dst, src, 1)
}

// blobOf describes a file, reading all of it.
func blobOf(path string) (Blob, error) {
	f, err := openRegular(path)
	if err != nil {
		return Blob{}, fmt.Errorf("open file: %w", err)
	}
	defer f.Close()
	h := sha256.New()
	n, err := io.Copy(h, f)
	if err != nil {
		return Blob{}, fmt.Errorf("read %s: %w", path, err)
	}
	return Blob{Path: path, Name: filepath.Base(path), Bytes: n, SHA256: hex.EncodeToString(h.Sum(nil))}, nil
}

// syncTree makes what was written below dir durable. One syncfs is cheaper than an fsync of each of thousands of files.
func syncTree(dir string) error {
	d, err := os.Open(dir)
	if err != nil {
		return fmt.Errorf("sync %s: %w", dir, err)
	}
	defer d.Close()
	if err := unix.Syncfs(int(d.Fd())); err != nil {
		return fmt.Errorf("sync %s: %w", dir, err)
	}
	return nil
}

func syncDir(dir string) error {
	d, err := os.Open(dir)
	if err != nil {
		return fmt.Errorf("sync directory: %w", err)
	}
	if err := errors.Join(d.Sync(), d.Close()); err != nil {
		return fmt.Errorf("sync directory %s: %w", dir, err)
	}
	return nil
}
