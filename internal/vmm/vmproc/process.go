// Package vmproc runs the process of a virtual machine monitor for the engines: its start in a directory of its own, its record there, its
// end told apart from a stop, its death by pidfd, and its taking over after the daemon died. It does not know what the monitor is.
package vmproc

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/forkd/forkd/internal/confine"
	"github.com/forkd/forkd/internal/procstat"
	"github.com/forkd/forkd/internal/vmm"
)

// maxSocketPath is what the kernel takes for the path of a Unix socket, less its final zero.
const maxSocketPath = 107

// stderrLimit is how much of a monitor's newest error output is kept.
const stderrLimit = 8 << 10

// Process is a monitor's process, started by this daemon or by an earlier one.
type Process struct {
	ID     vmm.Process // its engine may complete what it knows of descriptors and threads before Record
	Status string      // how it ended; valid when Done is closed

	name   string
	child  *os.Process    // nil when an earlier daemon started it
	users  *confine.Users // that uid goes back to
	uid    uint32         // of its own; 0: none
	stderr tail
	done   chan struct{} // closed when the process has ended and was reaped

	mu    sync.Mutex
	pidfd int // -1 when the process has ended
}

// Done is closed when the process has ended.
func (p *Process) Done() <-chan struct{} { return p.done }

// Said is the end of what the monitor wrote to its error output.
func (p *Process) Said() string { return p.stderr.String() }

// Explain adds to an error what the monitor itself said before it ended.
func (p *Process) Explain(err error) error {
	if said := p.Said(); said != "" {
		return fmt.Errorf("%w: %s said: %s", err, p.name, said)
	}
	return err
}

// Record writes the process's identity to its directory, so that it can be found after a crash.
func (p *Process) Record() error {
	b, err := json.Marshal(p.ID)
	if err != nil {
		return err
	}
	tmp := filepath.Join(p.ID.Dir, vmm.ProcessFile+".new")
	_ = os.Remove(tmp)
	f, err := os.OpenFile(tmp, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600) // the directory may be the monitor's: nothing that is there is written to
	if err == nil {
		_, err = f.Write(b)
		err = errors.Join(err, f.Close())
	}
	if err != nil {
		return fmt.Errorf("record process: %w", err)
	}
	return os.Rename(tmp, filepath.Join(p.ID.Dir, vmm.ProcessFile))
}

func (p *Process) reap(stderr *os.File) {
	copied := make(chan struct{})
	go func() {
		defer close(copied)
		io.Copy(&p.stderr, stderr)
		stderr.Close()
	}()
	// The main thread of a monitor may be stopped for a system call of ours (internal/memory), and the kernel reports every stop of a traced child
	// to whoever in this process waits for it: Wait would take the first one for the end. A pidfd tells of nothing but that.
	if p.pidfd >= 0 {
		waitPidfd(p.pidfd)
	}
	state, err := p.child.Wait()
	<-copied
	p.release()
	if p.Status = state.String(); err != nil {
		p.Status = err.Error()
	}
	close(p.done)
}

// signal sends a signal by the pidfd, which names this process even when its number was given to another.
func (p *Process) signal(sig unix.Signal) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.pidfd >= 0 {
		unix.PidfdSendSignal(p.pidfd, sig, nil, 0) // it fails only for a process that has ended
	}
}

// release closes the pidfd and gives back what was the process's own. Preconditions: the process has ended.
func (p *Process) release() {
	if p.uid != 0 {
		p.users.Release(p.uid)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.pidfd >= 0 {
		unix.Close(p.pidfd)
		p.pidfd = -1
	}
}

// Adopt finds a process that an earlier daemon started. The user id that it has of users, which may be nil, is not given to another while it lives.
func Adopt(name string, id vmm.Process, users *confine.Users) (*Process, error) {
	fd, err := unix.PidfdOpen(id.PID, 0)
	if err != nil {
		return nil, fmt.Errorf("process %d: %w", id.PID, vmm.ErrGone)
	}
	// Only now look at the start time: the pidfd holds on to whatever process the number named when it was opened.
	ticks, err := startTicks(id.PID)
	if err != nil || ticks != id.StartTicks {
		unix.Close(fd)
		return nil, fmt.Errorf("process %d is another one now: %w", id.PID, vmm.ErrGone)
	}
	p := &Process{ID: id, name: name, pidfd: fd, done: make(chan struct{}), users: users}
	if users != nil {
		p.uid = users.Adopt(id.PID)
	}
	go func() {
		waitPidfd(fd)
		p.release()
		p.Status = "ended while no daemon was its parent"
		close(p.done)
	}()
	return p, nil
}

// waitPidfd returns when the process has ended. It keeps no thread: a daemon has hundreds of monitors.
func waitPidfd(fd int) {
	if pollPidfd(fd) == nil {
		return
	}
	for {
		if n, err := unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, -1); n > 0 || err != nil && !errors.Is(err, unix.EINTR) {
			return
		}
	}
}

// pollPidfd waits by the runtime's poller.
func pollPidfd(fd int) error {
	own, err := unix.FcntlInt(uintptr(fd), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return err
	}
	if err := unix.SetNonblock(own, true); err != nil { // the poller takes no others
		return errors.Join(err, unix.Close(own))
	}
	f := os.NewFile(uintptr(own), "pidfd")
	defer f.Close()
	conn, err := f.SyscallConn()
	if err != nil {
		return err
	}
	return conn.Read(func(fd uintptr) bool {
		n, err := unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, 0)
		return n > 0 || err != nil && !errors.Is(err, unix.EINTR)
	})
}

// Kill ends the process and waits until it is gone.
func (p *Process) Kill() {
	select {
	case <-p.done:
	default:
		p.signal(unix.SIGKILL)
	}
	<-p.done
}

// Clean removes what the machine left in its directory. Preconditions: the process has ended.
func (p *Process) Clean() error {
	entries, err := os.ReadDir(p.ID.Dir)
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("clean machine directory: %w", err)
	}
	for _, e := range entries {
		if err := os.RemoveAll(filepath.Join(p.ID.Dir, e.Name())); err != nil {
			return fmt.Errorf("clean machine directory: %w", err)
		}
	}
	return nil
}

// startTicks is the start time of a process that lives.
func startTicks(pid int) (uint64, error) {
	s, err := procstat.ReadStat(pid)
	if err == nil && s.Ended() {
		err = fmt.Errorf("process %d has ended", pid)
	}
	return s.StartTicks, err
}

// CleanDir removes what a machine without a process left in its directory.
func CleanDir(dir string) error { return (&Process{ID: vmm.Process{Dir: dir}}).Clean() }

// Listen binds a Unix socket in dir and returns it as a file that a monitor can inherit.
func Listen(dir, name string) (*os.File, error) {
	path := filepath.Join(dir, name)
	if len(path) > maxSocketPath {
		return nil, fmt.Errorf("socket path %s is %d bytes long, the system takes %d: choose a shorter run directory: %w",
			path, len(path), maxSocketPath, vmm.ErrInvalidConfig)
	}
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	if err != nil {
		return nil, fmt.Errorf("machine socket: %w", err)
	}
	l.SetUnlinkOnClose(false) // the monitor goes on listening on it
	defer l.Close()
	return l.File()
}

// Dial connects to a socket in dir.
func Dial(ctx context.Context, dir, name string) (*net.UnixConn, error) {
	var d net.Dialer
	c, err := d.DialContext(ctx, "unix", filepath.Join(dir, name))
	if err != nil {
		return nil, err
	}
	return c.(*net.UnixConn), nil
}

// tail keeps the newest stderrLimit bytes written to it.
type tail struct {
	mu sync.Mutex
	b  []byte
}

func (t *tail) Write(p []byte) (int, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.b = append(t.b, p...)
	if over := len(t.b) - stderrLimit; over > 0 {
		t.b = append(t.b[:0], t.b[over:]...)
	}
	return len(p), nil
}

func (t *tail) String() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	return strings.TrimSpace(string(t.b))
}
