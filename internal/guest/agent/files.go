package agent

import (
	"strings"

	"golang.org/x/sys/unix"
)

// The agent reads files with bare system calls: one os.File that can be polled would start the runtime's network poller, which then is
// asked at every turn of the scheduler, in every fork.

// maxFile bounds what readFile reads; nothing it is used for comes close.
const maxFile = 16 << 20

// readFile returns the contents of a file.
func readFile(path string) ([]byte, error) {
	fd, err := open(path, unix.O_RDONLY)
	if err != nil {
		return nil, err
	}
	defer unix.Close(fd)
	var data []byte
	for {
		if cap(data)-len(data) < 512 {
			data = append(make([]byte, 0, max(4096, 2*cap(data))), data...)
		}
		n, err := unix.Read(fd, data[len(data):cap(data)])
		switch {
		case err == unix.EINTR:
		case err != nil:
			return nil, err
		case n <= 0:
			return data, nil
		default:
			data = data[:len(data)+n]
		}
		if len(data) > maxFile {
			return nil, unix.EFBIG
		}
	}
}

// readDir returns the names in a directory, in no order.
func readDir(path string) ([]string, error) {
	fd, err := open(path, unix.O_RDONLY|unix.O_DIRECTORY)
	if err != nil {
		return nil, err
	}
	defer unix.Close(fd)
	return dirNames(fd)
}

func dirNames(fd int) ([]string, error) {
	var names []string
	buf := make([]byte, 8<<10)
	for {
		n, err := unix.ReadDirent(fd, buf)
		if err == unix.EINTR {
			continue
		}
		if err != nil || n <= 0 {
			return names, err
		}
		_, _, names = unix.ParseDirent(buf[:n], -1, names)
	}
}

// open opens a file for this process only.
func open(path string, flags int) (int, error) {
	for {
		fd, err := unix.Open(path, flags|unix.O_CLOEXEC, 0)
		if err != unix.EINTR {
			return fd, err
		}
	}
}

// mkdirAll makes a directory and those above it.
func mkdirAll(path string, mode uint32) error {
	err := unix.Mkdir(path, mode)
	if err == unix.ENOENT {
		i := strings.LastIndexByte(strings.TrimRight(path, "/"), '/')
		if i <= 0 {
			return err
		}
		if err := mkdirAll(path[:i], mode); err != nil {
			return err
		}
		err = unix.Mkdir(path, mode)
	}
	if err == unix.EEXIST {
		return nil
	}
	return err
}

func exists(path string) bool {
	var st unix.Stat_t
	return unix.Stat(path, &st) == nil
}

// isDir returns nil for a directory.
func isDir(path string) error {
	var st unix.Stat_t
	if err := unix.Stat(path, &st); err != nil {
		return err
	}
	if st.Mode&unix.S_IFMT != unix.S_IFDIR {
		return unix.ENOTDIR
	}
	return nil
}

func firstLine(b []byte) string {
	line, _, _ := strings.Cut(string(b), "\n")
	return strings.TrimSpace(line)
}
