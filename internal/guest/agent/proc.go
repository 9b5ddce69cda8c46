package agent

import (
	"strconv"
	"strings"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"
)

// proc is a child process. Its pidfd becomes readable when it ended; status is valid once done is closed.
type proc struct {
	pid    int
	pidfd  int
	done   chan struct{}
	status unix.WaitStatus
}

// reaper starts children and collects how they end. As init it also collects orphans: both come from the same wait, so that neither
// takes the other's.
type reaper struct {
	init bool
	wg   sync.WaitGroup
	kick chan struct{} // a child was started

	mu       sync.Mutex
	children map[int]*proc
}

func newReaper(init bool) *reaper {
	r := &reaper{init: init, kick: make(chan struct{}, 1), children: make(map[int]*proc)}
	if init {
		go r.reapAll() // lives as long as the machine
	}
	return r
}

// start runs a program in a session of its own.
func (r *reaper) start(path string, argv []string, attr *syscall.ProcAttr) (*proc, error) {
	p := &proc{pidfd: -1, done: make(chan struct{})}
	attr.Sys.Setsid = true
	attr.Sys.PidFD = &p.pidfd
	r.mu.Lock()
	defer r.mu.Unlock()
	pid, err := syscall.ForkExec(path, argv, attr)
	if err != nil {
		return nil, err
	}
	p.pid = pid
	if !r.init {
		r.wg.Add(1)
		go r.wait(p)
		return p, nil
	}
	r.children[pid] = p
	select {
	case r.kick <- struct{}{}:
	default:
	}
	return p, nil
}

func (r *reaper) wait(p *proc) {
	defer r.wg.Done()
	for {
		if _, err := unix.Wait4(p.pid, &p.status, 0, nil); err != unix.EINTR {
			close(p.done)
			return
		}
	}
}

// reapAll sleeps in waitid, or until a child is started when there is none: a process without children inherits no orphans either.
func (r *reaper) reapAll() {
	for {
		err := unix.Waitid(unix.P_ALL, 0, nil, unix.WEXITED|unix.WNOWAIT, nil)
		if err == unix.ECHILD {
			<-r.kick
			continue
		}
		// Reaped under the lock that start holds: a number can't be used again before its owner is known.
		r.mu.Lock()
		for {
			var st unix.WaitStatus
			pid, err := unix.Wait4(-1, &st, unix.WNOHANG, nil)
			if err == unix.EINTR {
				continue
			}
			if err != nil || pid <= 0 {
				break
			}
			if p := r.children[pid]; p != nil {
				delete(r.children, pid)
				p.status = st
				close(p.done)
			}
		}
		r.mu.Unlock()
	}
}

func (r *reaper) close() { r.wg.Wait() }

// closeFD gives the pidfd back.
func (p *proc) closeFD() {
	if p.pidfd >= 0 {
		unix.Close(p.pidfd)
		p.pidfd = -1
	}
}

// killSession kills every process of the session that p leads, in whatever process group they are.
func (p *proc) killSession() {
	select {
	case <-p.done:
		return // the number may be another process's by now
	default:
	}
	_ = unix.Kill(-p.pid, unix.SIGKILL)
	_ = unix.Kill(p.pid, unix.SIGKILL)
	for _, pid := range sessionMembers(p.pid) {
		_ = unix.Kill(pid, unix.SIGKILL)
	}
}

// sessionMembers reads from /proc who belongs to the session sid.
func sessionMembers(sid int) []int {
	entries, err := readDir("/proc")
	if err != nil {
		return nil
	}
	var pids []int
	for _, name := range entries {
		pid, err := strconv.Atoi(name)
		if err != nil || pid == sid {
			continue
		}
		stat, err := readFile("/proc/" + name + "/stat")
		if err != nil {
			continue
		}
		// After the command's closing parenthesis: state, ppid, pgrp, session.
		_, rest, _ := strings.Cut(string(stat[strings.LastIndexByte(string(stat), ')')+1:]), " ")
		f := strings.Fields(rest)
		if len(f) > 3 && f[3] == strconv.Itoa(sid) {
			pids = append(pids, pid)
		}
	}
	return pids
}
