package vmmtest

import (
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"

	"github.com/forkd/forkd/internal/procstat"
)

// alive says whether the very process (pid and start time) lives; a zombie doesn't.
func alive(pid int, ticks uint64) bool {
	s, err := procstat.ReadStat(pid)
	return err == nil && s.StartTicks == ticks && !s.Ended()
}

// pidfd refers to one process for as long as it is open.
type pidfd struct{ file *os.File }

func openPidfd(pid int) (*pidfd, error) {
	// Non-blocking, so that waiting for the process is the runtime's poller's work and holds no thread.
	fd, err := unix.PidfdOpen(pid, unix.PIDFD_NONBLOCK)
	if err != nil {
		return nil, fmt.Errorf("open a pidfd of process %d: %w", pid, err)
	}
	return &pidfd{os.NewFile(uintptr(fd), fmt.Sprintf("pidfd:%d", pid))}, nil
}

// wait returns when the process has ended, reaped or not.
func (p *pidfd) wait() error {
	conn, err := p.file.SyscallConn()
	if err != nil {
		return err
	}
	return conn.Read(func(fd uintptr) bool {
		n, err := unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, 0)
		return err == nil && n > 0
	})
}

// kill sends SIGKILL. A process that has ended already is no error.
func (p *pidfd) kill() error {
	conn, err := p.file.SyscallConn()
	if err != nil {
		return err
	}
	var sent error
	closed := conn.Control(func(fd uintptr) { sent = unix.PidfdSendSignal(int(fd), unix.SIGKILL, nil, 0) })
	if closed != nil || errors.Is(sent, unix.ESRCH) {
		return nil // whoever closed it has seen the process's end
	}
	return sent
}

func (p *pidfd) close() error { return p.file.Close() }
