package lab

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"runtime"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/forkd/forkd/internal/hostcpu"
)

const (
	scratchBytes = 16 << 30 // the most that the scratch disk may take of the cache's file system
	consoleBytes = 64 << 10 // how much of the lab's console is kept
)

// machine is the outer QEMU.
type machine struct {
	cmd     *exec.Cmd
	console tail
	done    chan struct{} // closed when it has ended
	err     error         // how it ended; valid when done is closed
	once    sync.Once
}

// config is what the process is told that turns into QEMU; see enterQEMU.
type config struct {
	Dir    string // where a root in memory is mounted
	MemMiB int
	TSCkHz uint64
	Clock  int64 // Unix time in µs
	Ports  int
	Disk   int // descriptor of the disk with files; 0: none
}

// Descriptors that the process that turns into QEMU inherits, from 3 on; the ports follow.
const (
	fdQEMU = 3 + iota
	fdKernel
	fdInitrd
	fdAgent // this program, for the guest
	fdRoot
	fdScratch
	fdMail
	fdPorts
)

// startMachine starts QEMU. It ends with ctx, and with this process.
func startMachine(ctx context.Context, o Options, files artifacts, mail *os.File) (_ *machine, _ []net.Conn, err error) {
	khz, err := hostcpu.TSCkHz()
	if err != nil {
		return nil, nil, err
	}
	var inherit []*os.File
	var conns []net.Conn
	defer func() {
		for _, f := range inherit {
			f.Close()
		}
		for _, c := range conns {
			if err != nil {
				c.Close()
			}
		}
	}()
	self, err := os.Executable()
	if err != nil {
		return nil, nil, err
	}
	for _, path := range []string{files.qemu, files.kernel, files.initrd, self, files.root} {
		f, err := os.Open(path)
		if err != nil {
			return nil, nil, err
		}
		inherit = append(inherit, f)
	}
	disk, err := nameless(o.Cache)
	if err != nil {
		return nil, nil, fmt.Errorf("scratch disk: %w", err)
	}
	inherit = append(inherit, disk)
	if err := disk.Truncate(scratchBytes); err != nil {
		return nil, nil, fmt.Errorf("scratch disk: %w", err)
	}
	read, err := os.Open(fmt.Sprintf("/proc/self/fd/%d", mail.Fd())) // QEMU wants a descriptor that can only be read
	if err != nil {
		return nil, nil, fmt.Errorf("mailbox: %w", err)
	}
	inherit = append(inherit, read)
	for range ports {
		ours, theirs, err := socketPair()
		if err != nil {
			return nil, nil, err
		}
		conns, inherit = append(conns, ours), append(inherit, theirs)
	}
	cfg := config{Dir: o.Cache, MemMiB: o.MemMiB, TSCkHz: khz, Clock: time.Now().UnixMicro(), Ports: ports}
	if files.disk != nil {
		cfg.Disk = fdQEMU + len(inherit)
		copied, err := os.Open(fmt.Sprintf("/proc/self/fd/%d", files.disk.Fd()))
		if err != nil {
			return nil, nil, err
		}
		inherit = append(inherit, copied)
	}
	m := &machine{done: make(chan struct{})}
	m.console.limit = consoleBytes
	m.cmd = again(ctx, roleQEMU, cfg, inherit)
	m.cmd.Stdout, m.cmd.Stderr = &m.console, &m.console
	if err := m.start(); err != nil {
		return nil, nil, err
	}
	return m, conns, nil
}

// start runs the process and watches it, all on one thread: the kernel ends the process when the thread ends that started it.
func (m *machine) start() error {
	started := make(chan error)
	go func() {
		runtime.LockOSThread() // and never unlocked: the thread ends with this goroutine
		err := m.cmd.Start()
		started <- err
		if err == nil {
			m.err = m.cmd.Wait()
			if m.err == nil {
				m.err = errors.New("it was powered off")
			}
			close(m.done)
		}
	}()
	return <-started
}

// end kills QEMU.
func (m *machine) end() error {
	m.once.Do(func() { _ = m.cmd.Process.Kill() }) // it may have ended
	select {
	case <-m.done:
		return nil
	case <-time.After(killLimit):
		return fmt.Errorf("the lab's QEMU (process %d) does not end", m.cmd.Process.Pid)
	}
}

// nameless makes a file without a name on the file system of dir.
func nameless(dir string) (*os.File, error) {
	fd, err := unix.Open(dir, unix.O_TMPFILE|unix.O_RDWR|unix.O_CLOEXEC, 0o600)
	if err != nil {
		return nil, fmt.Errorf("file without a name in %s: %w", dir, err)
	}
	return os.NewFile(uintptr(fd), "nameless"), nil
}

// again is this program once more, in mount and PID namespaces of its own, in another role. It dies with the thread that starts it, and all
// that it started and mounted is gone with it.
func again(ctx context.Context, role string, cfg any, inherit []*os.File) *exec.Cmd {
	arg, err := json.Marshal(cfg)
	if err != nil {
		panic(err) // strings and numbers
	}
	cmd := exec.CommandContext(ctx, "/proc/self/exe", string(arg))
	cmd.Env = append(os.Environ(), roleEnv+"="+role)
	cmd.ExtraFiles = inherit
	cmd.WaitDelay = 5 * time.Second
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL, Cloneflags: syscall.CLONE_NEWPID | syscall.CLONE_NEWNS}
	return cmd
}

// tail keeps the newest of what is written to it.
type tail struct {
	mu    sync.Mutex
	buf   []byte
	limit int
	also  io.Writer // gets everything; may be nil
}

func (t *tail) Write(p []byte) (int, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.also != nil {
		_, _ = t.also.Write(p) // for people who watch
	}
	if t.buf = append(t.buf, p...); len(t.buf) > 2*t.limit {
		t.buf = append([]byte(nil), t.buf[len(t.buf)-t.limit:]...)
	}
	return len(p), nil
}

func (t *tail) String() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	return string(t.buf[max(0, len(t.buf)-t.limit):])
}
