package qemu

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/forkd/forkd/internal/vmm"
)

// Files of a machine's run directory.
const (
	qmpSocket     = "qmp.sock"
	stateSocket   = "state.sock" // a second control connection; see StageState
	controlSocket = "control.sock"
	dataSocket    = "data.sock"
	processFile   = "process.json"
	consoleFile   = "console.log"
)

// maxSocketPath is what the kernel takes for the path of a Unix socket, less its final zero.
const maxSocketPath = 107

// stderrLimit is how much of QEMU's newest error output is kept.
const stderrLimit = 8 << 10

// process is a QEMU process, started by this daemon or by an earlier one.
type process struct {
	id     vmm.Process
	cmd    *exec.Cmd // nil when an earlier daemon started it
	stderr tail
	done   chan struct{} // closed when the process has ended and was reaped
	status string        // how it ended; valid when done is closed

	mu    sync.Mutex
	pidfd int // -1 when the process has ended
}

// startProcess runs QEMU in dir with files as its descriptors from 3 on.
func startProcess(binary, dir string, args []string, files []*os.File) (*process, error) {
	cmd := exec.Command(binary, args...)
	cmd.Dir = dir // names the machine in /proc/PID/cwd even if we die before the record is written
	cmd.Env = []string{"PATH=/usr/sbin:/usr/bin:/sbin:/bin", "LANG=C"}
	cmd.ExtraFiles = files
	p := &process{cmd: cmd, done: make(chan struct{})}
	r, w, err := os.Pipe()
	if err != nil {
		return nil, fmt.Errorf("pipe for QEMU's errors: %w", err)
	}
	cmd.Stderr = w
	p.pidfd = -1
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true, PidFD: &p.pidfd}
	err = cmd.Start()
	w.Close()
	if err != nil {
		r.Close()
		return nil, fmt.Errorf("start %s: %w", binary, err)
	}
	p.id = vmm.Process{PID: cmd.Process.Pid, Dir: dir}
	// Before it is reaped: until then its number is its own, even if it has ended already.
	_, p.id.StartTicks, err = processStat(p.id.PID)
	go p.reap(r)
	if err != nil {
		p.kill()
		return nil, fmt.Errorf("start time of QEMU: %w", err)
	}
	return p, nil
}

// record writes the process's identity to its directory, so that it can be found after a crash.
func (p *process) record() error {
	b, err := json.Marshal(p.id)
	if err != nil {
		return err
	}
	tmp := filepath.Join(p.id.Dir, processFile+".new")
	if err := os.WriteFile(tmp, b, 0o600); err != nil {
		return fmt.Errorf("record process: %w", err)
	}
	return os.Rename(tmp, filepath.Join(p.id.Dir, processFile))
}

func (p *process) reap(stderr *os.File) {
	copied := make(chan struct{})
	go func() {
		defer close(copied)
		io.Copy(&p.stderr, stderr)
		stderr.Close()
	}()
	// The main thread of a QEMU may be stopped for a system call of ours (internal/memory), and the kernel reports every stop of a traced child
	// to whoever in this process waits for it: Wait would take the first one for the end. A pidfd tells of nothing but that.
	if p.pidfd >= 0 {
		waitPidfd(p.pidfd)
	}
	// Not Wait at first: it would take a stop for the end, when we trace the process to run a call in it (internal/memory).
	waitPidfd(p.pidfd)
	err := p.cmd.Wait()
	<-copied
	p.release()
	p.status = "exit status 0"
	if err != nil {
		p.status = err.Error()
	}
	close(p.done)
}

// signal sends a signal by the pidfd, which names this process even when its number was given to another.
func (p *process) signal(sig unix.Signal) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.pidfd >= 0 {
		unix.PidfdSendSignal(p.pidfd, sig, nil, 0) // it fails only for a process that has ended
	}
}

// release closes the pidfd. Preconditions: the process has ended.
func (p *process) release() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.pidfd >= 0 {
		unix.Close(p.pidfd)
		p.pidfd = -1
	}
}

// adoptProcess finds a process that an earlier daemon started.
func adoptProcess(id vmm.Process) (*process, error) {
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
	p := &process{id: id, pidfd: fd, done: make(chan struct{})}
	go func() {
		waitPidfd(fd)
		p.release()
		p.status = "ended while no daemon was its parent"
		close(p.done)
	}()
	return p, nil
}

// waitPidfd returns when the process has ended.
func waitPidfd(fd int) {
	for {
		fds := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}
		if _, err := unix.Poll(fds, -1); err == nil || !errors.Is(err, unix.EINTR) {
			return
		}
	}
}

// kill ends the process and waits until it is gone.
func (p *process) kill() {
	select {
	case <-p.done:
	default:
		p.signal(unix.SIGKILL)
	}
	<-p.done
}

// clean removes what the machine left in its directory. Preconditions: the process has ended.
func (p *process) clean() error {
	entries, err := os.ReadDir(p.id.Dir)
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("clean machine directory: %w", err)
	}
	for _, e := range entries {
		if err := os.RemoveAll(filepath.Join(p.id.Dir, e.Name())); err != nil {
			return fmt.Errorf("clean machine directory: %w", err)
		}
	}
	return nil
}

// startTicks is the start time of a process that lives.
func startTicks(pid int) (uint64, error) {
	state, ticks, err := processStat(pid)
	if err == nil && state == "Z" {
		err = fmt.Errorf("process %d has ended", pid)
	}
	return ticks, err
}

// processStat reads /proc/PID/stat: the state, and field 22, the start time in clock ticks since boot.
func processStat(pid int) (state string, ticks uint64, err error) {
	b, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/stat")
	if err != nil {
		return "", 0, err
	}
	i := bytes.LastIndexByte(b, ')') // the name before it may hold anything
	fields := strings.Fields(string(b[i+1:]))
	if i < 0 || len(fields) < 20 {
		return "", 0, fmt.Errorf("/proc/%d/stat: unexpected form", pid)
	}
	ticks, err = strconv.ParseUint(fields[19], 10, 64)
	return fields[0], ticks, err
}

// listen binds a Unix socket in dir and returns it as a file that QEMU can inherit.
func listen(dir, name string) (*os.File, error) {
	path := filepath.Join(dir, name)
	if len(path) > maxSocketPath {
		return nil, fmt.Errorf("socket path %s is %d bytes long, the system takes %d: choose a shorter run directory: %w",
			path, len(path), maxSocketPath, vmm.ErrInvalidConfig)
	}
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	if err != nil {
		return nil, fmt.Errorf("machine socket: %w", err)
	}
	l.SetUnlinkOnClose(false) // QEMU goes on listening on it
	defer l.Close()
	return l.File()
}

func dial(ctx context.Context, dir, name string) (*net.UnixConn, error) {
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
