package firecracker

import (
	"bytes"
	"errors"
	"fmt"
	"io"
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
	dir    string
	pipe   *os.File
	done   chan struct{} // closed when all was taken in
	halted func()        // called once, when the guest's kernel said that it stops for good
	line   []byte        // the one that is not ended yet; drain's own

	mu    sync.Mutex
	size  int64 // of the newer file
	heard chan []byte
}

// newConsole begins to take in what comes out of pipe.
func newConsole(dir string, pipe *os.File, halted func()) *console {
	c := &console{dir: dir, pipe: pipe, done: make(chan struct{}), halted: halted}
	if f, err := openConsole(dir, consoleFile, os.O_RDONLY); err == nil {
		if fi, err := f.Stat(); err == nil {
			c.size = fi.Size()
		}
		_ = f.Close()
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
func reopenConsole(dir string, pid int, halted func()) (*console, error) {
	pipe, err := os.OpenFile(fmt.Sprintf("/proc/%d/fd/1", pid), os.O_RDONLY|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil, fmt.Errorf("guest console: %w", err)
	}
	if fi, err := pipe.Stat(); err != nil || fi.Mode().Type() != os.ModeNamedPipe { // the monitor may have put something else there
		return nil, errors.Join(fmt.Errorf("guest console: it is no pipe any more: %w", vmm.ErrGone), err, pipe.Close())
	}
	return newConsole(dir, pipe, halted), nil
}

// openConsole opens a file of a console, which must be one that a daemon made.
func openConsole(dir, name string, flags int) (*os.File, error) {
	f, err := openIn(dir, name, flags)
	if err != nil {
		return nil, err
	}
	var st unix.Stat_t
	err = unix.Fstat(int(f.Fd()), &st)
	if err == nil && (st.Mode&unix.S_IFMT != unix.S_IFREG || st.Uid != uint32(os.Geteuid())) {
		err = fmt.Errorf("%s was not made by the daemon", f.Name())
	}
	if err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return f, nil
}

func (c *console) drain() {
	defer close(c.done)
	buf := make([]byte, 4<<10)
	for {
		n, err := c.pipe.Read(buf)
		if n > 0 {
			c.keep(buf[:n])
			c.look(buf[:n])
		}
		if err != nil {
			return
		}
	}
}

// longestLine is how much of a line is kept until its end comes.
const longestLine = 256

// look looks for a kernel's last words in what has come.
func (c *console) look(b []byte) {
	if c.halted == nil {
		return
	}
	c.line = append(c.line, b...)
	if vmm.HaltedIn(c.line) {
		c.halted()
		c.halted = nil
	}
	c.line = append(c.line[:0], c.line[bytes.LastIndexByte(c.line, '\n')+1:]...)
	if len(c.line) > longestLine {
		c.line = append(c.line[:0], '?') // none of a kernel's last words begins so
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
	f, err := openConsole(c.dir, consoleFile, os.O_WRONLY|os.O_CREATE|os.O_APPEND)
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
		f, err := openConsole(c.dir, name, os.O_RDONLY)
		if errors.Is(err, os.ErrNotExist) {
			continue
		}
		if err != nil {
			return nil, fmt.Errorf("guest console: %w", err)
		}
		b, err := io.ReadAll(io.LimitReader(f, vmm.ConsoleLimit))
		if err = errors.Join(err, f.Close()); err != nil {
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
