package memory

import (
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/forkd/forkd/internal/procstat"
	"github.com/forkd/forkd/internal/vmm"
)

// process pins a monitor: what is done with its pid while gone reports nil was done to that very process and no other.
type process struct {
	vmm.Process
	pidfd int
}

// openProcess finds the monitor that p names. It wraps vmm.ErrGone when the process has ended or the pid is another one's now.
func openProcess(p vmm.Process) (*process, error) {
	if p.PID <= 0 {
		return nil, fmt.Errorf("monitor: %d is no process id", p.PID)
	}
	fd, err := unix.PidfdOpen(p.PID, 0)
	if errors.Is(err, unix.ESRCH) {
		return nil, fmt.Errorf("monitor %d: %w", p.PID, vmm.ErrGone)
	}
	if err != nil {
		return nil, fmt.Errorf("monitor %d: open pidfd: %w", p.PID, err)
	}
	// Only now look at the start time: the pidfd holds on to whatever process the number named when it was opened.
	ticks, err := startTicks(p.PID)
	if err != nil || ticks != p.StartTicks {
		unix.Close(fd)
		return nil, fmt.Errorf("monitor %d (started at tick %d) has another start, %d, now: %w", p.PID, p.StartTicks, ticks, vmm.ErrGone)
	}
	return &process{Process: p, pidfd: fd}, nil
}

// gone reports whether the process has ended, as an error that wraps vmm.ErrGone.
func (p *process) gone() error {
	if !p.wait(0) {
		return nil
	}
	return fmt.Errorf("monitor %d: %w", p.PID, vmm.ErrGone)
}

// wait waits for the process's end and reports whether it has come in time.
func (p *process) wait(limit time.Duration) bool {
	fds := []unix.PollFd{{Fd: int32(p.pidfd), Events: unix.POLLIN}}
	for deadline := time.Now().Add(limit); ; limit = time.Until(deadline) {
		n, err := unix.Poll(fds, max(0, int(limit.Milliseconds())))
		if err != unix.EINTR {
			return err == nil && n > 0
		}
	}
}

// endTime is how long the end of a process is waited for that has lost its memory or a thread already: giving back gigabytes takes
// a while, and the end comes after that.
const endTime = 5 * time.Second

// blame says that the process is gone where that is what is behind an error of something done to it.
func (p *process) blame(err error) error {
	if err == nil || errors.Is(err, vmm.ErrGone) {
		return err
	}
	if errors.Is(err, unix.ESRCH) || errors.Is(err, errThreadEnded) {
		p.wait(endTime)
	}
	if gone := p.gone(); gone != nil {
		return fmt.Errorf("%w (%w)", gone, err)
	}
	return err
}

func (p *process) close() { unix.Close(p.pidfd) }

// inodeOfInfo is inodeOf for a file that was looked up by name.
func inodeOfInfo(fi os.FileInfo) inode {
	st := fi.Sys().(*syscall.Stat_t)
	return inode{unix.Major(st.Dev), unix.Minor(st.Dev), st.Ino}
}

// startTicks is when a process started.
func startTicks(pid int) (uint64, error) {
	s, err := procstat.ReadStat(pid)
	return s.StartTicks, err
}

// thread finds the thread that may be stopped: the only one of that name, or the main thread when the name is empty.
func (p *process) thread(name string) (int, error) {
	if name == "" {
		return p.PID, nil
	}
	tasks, err := os.ReadDir(fmt.Sprintf("/proc/%d/task", p.PID))
	if err != nil {
		return 0, p.blame(fmt.Errorf("threads of monitor %d: %w", p.PID, err))
	}
	found := 0
	for _, t := range tasks {
		comm, err := os.ReadFile(fmt.Sprintf("/proc/%d/task/%s/comm", p.PID, t.Name()))
		if err != nil || strings.TrimSuffix(string(comm), "\n") != name {
			continue
		}
		if found != 0 {
			return 0, fmt.Errorf("monitor %d has several threads named %q: an idle thread must have a name of its own", p.PID, name)
		}
		if found, err = strconv.Atoi(t.Name()); err != nil {
			return 0, err
		}
	}
	if found == 0 {
		return 0, p.blame(fmt.Errorf("monitor %d has no thread named %q", p.PID, name))
	}
	return found, nil
}
