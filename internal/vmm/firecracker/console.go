package firecracker

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/forkd/forkd/internal/vmm"
)

// console takes in what a guest writes to its serial port, which is Firecracker's output. It is kept in the machine's directory, in two
// files of at most vmm.ConsoleLimit bytes each, so it survives the daemon. Firecracker holds the reading end of the pipe, too: while no
// daemon reads, the pipe fills and then drops what is new; the guest is not held up.
type console struct {
	dir  string
	pipe *os.File
	done chan struct{} // closed when all was taken in

	mu    sync.Mutex
	size  int64 // of the newer file
	heard chan []byte
}

// newConsole begins to take in what comes out of pipe.
func newConsole(dir string, pipe *os.File) *console {
	c := &console{dir: dir, pipe: pipe, done: make(chan struct{})}
	if fi, err := os.Stat(filepath.Join(dir, consoleFile)); err == nil {
		c.size = fi.Size()
	}
	go c.drain()
	return c
}

// consolePipe makes the pipe of a console. Its reading end is opened twice: what is handed to another process must block, ours must not, so
// that it can be closed while it is read.
func consolePipe() (ours, inherited, written *os.File, err error) {
	var fds [2]int
	if err := unix.Pipe2(fds[:], unix.O_CLOEXEC); err != nil {
		return nil, nil, nil, os.NewSyscallError("pipe2", err)
	}
	inherited, written = os.NewFile(uintptr(fds[0]), "console"), os.NewFile(uintptr(fds[1]), "console")
	if ours, err = os.OpenFile(fdPath(fds[0]), os.O_RDONLY|unix.O_NONBLOCK, 0); err != nil {
		return nil, nil, nil, errors.Join(err, inherited.Close(), written.Close())
	}
	return ours, inherited, written, nil
}

// reopenConsole takes over the console of a monitor that an earlier daemon started.
func reopenConsole(dir string, pid int) (*console, error) {
	pipe, err := os.OpenFile(fmt.Sprintf("/proc/%d/fd/1", pid), os.O_RDONLY|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil, fmt.Errorf("guest console: %w", err)
	}
	return newConsole(dir, pipe), nil
}

func (c *console) drain() {
	defer close(c.done)
	buf := make([]byte, 4<<10)
	for {
		n, err := c.pipe.Read(buf)
		if n > 0 {
			c.keep(buf[:n])
		}
		if err != nil {
			return
		}
	}
}

// keep appends to the newer file. What can't be kept is lost: a console is for people, and no reason to end a machine.
func (c *console) keep(b []byte) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.heard != nil {
		select {
		case c.heard <- append([]byte(nil), b...):
		default: // nobody listens any more
		}
	}
	path := filepath.Join(c.dir, consoleFile)
	if c.size+int64(len(b)) > vmm.ConsoleLimit {
		_ = os.Rename(path, filepath.Join(c.dir, olderConsole))
		c.size = 0
	}
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_APPEND, 0o600)
	if err != nil {
		return
	}
	n, _ := f.Write(b)
	c.size += int64(n)
	_ = f.Close()
}

// newest returns the newest bytes.
func (c *console) newest() ([]byte, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	var text []byte
	for _, name := range []string{olderConsole, consoleFile} {
		b, err := os.ReadFile(filepath.Join(c.dir, name))
		if err != nil && !errors.Is(err, os.ErrNotExist) {
			return nil, fmt.Errorf("guest console: %w", err)
		}
		text = append(text, b...)
	}
	return text[max(0, len(text)-vmm.ConsoleLimit):], nil
}

// listen returns what the guest writes from now on. What is not taken in time is dropped.
func (c *console) listen() <-chan []byte {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.heard = make(chan []byte, 64)
	return c.heard
}

// close waits until all was taken in. Preconditions: the monitor has ended.
func (c *console) close() {
	<-c.done
	_ = c.pipe.Close()
}

// letGo stops taking in without waiting for the monitor's end.
func (c *console) letGo() {
	_ = c.pipe.Close()
	<-c.done
}
