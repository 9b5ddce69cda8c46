package agent

import (
	"strconv"
	"strings"
	"sync"
	"sync/atomic"

	"golang.org/x/sys/unix"

	"github.com/forkd/forkd/internal/guest/agentproto"
)

const (
	firstLook = 1000  // milliseconds from an activity to a look at the disk
	lastLook  = 32000 // the longest between two; when nothing has changed for as long, it is not looked at before the next activity
	leastFree = 1 << 20
	victims   = 16 // processes that are remembered
	nameLimit = 64
)

// watch notices when the machine runs out of memory or of disk, and tells the host.
//
// Of the first the kernel's log tells: a thread sleeps until something is written to it. Of a full disk nobody tells, so it is looked at: when a
// command or an evaluation has failed, and for as long as what is free keeps changing after one. A machine in which nothing happens is never
// woken for it, nor is one that was just forked.
type watch struct {
	a      *Agent
	kmsg   int    // -1: none
	disk   string // any file on what can be written; "": not looked at
	kick   int    // an eventfd: the disk may change from now on, or not any more
	notify bool   // the host takes notices; set with mu held

	following atomic.Bool // the disk is looked at now and then
	over      atomic.Bool
	still     atomic.Bool // nothing is to happen by itself before the next activity
	kills     atomic.Uint32

	mu     sync.Mutex
	told   agentproto.Notice // what was noticed, and the host knows if it takes notices
	recent [victims]victim
	buf    [1024]byte // of a record of the log; longer ones are none of ours
}

// victim is a process that the kernel killed for want of memory.
type victim struct {
	number       uint32 // counted from 1
	pid, session int    // session -1: nobody knows; 0 is that of processes whose leader is in another PID namespace, and the kernel's own
}

// start begins to watch. Preconditions: it is called once, before anything is served.
func (w *watch) start(kmsg int, disk string) error {
	kick, err := unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK)
	if err != nil {
		return err
	}
	w.kmsg, w.disk, w.kick = kmsg, disk, kick
	w.a.wg.Add(1)
	go w.run()
	return nil
}

// openKmsg opens the kernel's log at its end.
func openKmsg() int {
	fd, err := open("/dev/kmsg", unix.O_RDONLY|unix.O_NONBLOCK)
	if err != nil {
		return -1
	}
	_, _ = unix.Seek(fd, 0, unix.SEEK_END) // at worst what the boot said is read, too
	return fd
}

// run sleeps in one system call. It ends when the log does, which a kernel's never does, or the agent is closed.
func (w *watch) run() {
	defer w.a.wg.Done()
	delay := -1
	for {
		fds := [2]unix.PollFd{{Fd: int32(w.kmsg), Events: unix.POLLIN}, {Fd: int32(w.kick), Events: unix.POLLIN}}
		n, err := unix.Poll(fds[:], delay)
		if err != nil && err != unix.EINTR {
			return
		}
		if fds[0].Revents != 0 && !w.drain() {
			return
		}
		if n == 0 {
			changed := w.look()
			switch {
			case changed:
				delay = firstLook
			case delay < lastLook:
				delay *= 2
			case w.a.execs.len() == 0:
				delay = -1
				w.following.Store(false)
			}
		}
		if w.over.Load() {
			return
		}
		if fds[1].Revents != 0 {
			var count [8]byte
			_, _ = unix.Read(w.kick, count[:])
			delay = firstLook
			if w.still.Load() {
				delay = -1
				w.following.Store(false)
			}
		}
	}
}

// active says that the disk may change.
func (w *watch) active() {
	w.still.Store(false)
	if w.disk != "" && w.following.CompareAndSwap(false, true) {
		w.wake()
	}
}

// quiet keeps it from waking the machine before the next activity.
func (w *watch) quiet() {
	w.still.Store(true)
	if w.following.Load() {
		w.wake()
	}
}

// end stops watching.
func (w *watch) end() {
	if w.kick < 0 {
		return
	}
	w.over.Store(true)
	w.wake()
}

func (w *watch) close() {
	if w.kick >= 0 {
		unix.Close(w.kick)
	}
}

func (w *watch) wake() { _, _ = unix.Write(w.kick, []byte{1, 0, 0, 0, 0, 0, 0, 0}) }

// drain reads what the kernel has to say. It is false when there will be no more.
func (w *watch) drain() bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	before := w.told.OOMKills
	defer func() {
		if w.told.OOMKills != before {
			w.tell()
		}
	}()
	for {
		n, err := unix.Read(w.kmsg, w.buf[:])
		switch err {
		case nil:
		case unix.EINTR, unix.EPIPE, unix.EINVAL: // EPIPE: some were dropped; EINVAL: one was longer than any of ours
			continue
		default:
			return err == unix.EAGAIN
		}
		if n <= 0 {
			return false
		}
		if pid, name, ok := killedForMemory(string(w.buf[:n])); ok {
			w.killed(pid, name)
		}
	}
}

// killed notes a victim. Preconditions: mu is held.
func (w *watch) killed(pid int, name string) {
	n := w.kills.Add(1)
	w.told.OOMKills++
	w.told.Victim = name
	w.recent[n%victims] = victim{number: n, pid: pid, session: sessionOf(pid)}
}

// tell sends what was noticed. Preconditions: mu is held.
func (w *watch) tell() {
	if w.notify {
		w.a.out.send(w.a.out.session.Load(), agentproto.KindNotice, 0, w.told.AppendTo(nil))
	}
}

// greet begins a session.
func (w *watch) greet(version uint16) {
	w.mu.Lock()
	w.notify = version >= 2
	if w.told.OOMKills > 0 || w.told.DiskFull {
		w.tell()
	}
	w.mu.Unlock()
}

// reborn forgets what befell the machine that this one was forked from. That its disk is full is true of both.
func (w *watch) reborn() {
	w.mu.Lock()
	if w.told.OOMKills > 0 {
		w.told.OOMKills, w.told.Victim = 0, ""
		w.tell()
	}
	w.mu.Unlock()
}

// look looks at the disk, and says whether it has changed.
func (w *watch) look() (changed bool) {
	if w.disk == "" {
		return false
	}
	var st unix.Statfs_t
	if unix.Statfs(w.disk, &st) != nil {
		return false
	}
	free, size := st.Bfree*uint64(st.Bsize), st.Blocks*uint64(st.Bsize)
	w.mu.Lock()
	defer w.mu.Unlock()
	changed = free != w.told.DiskFree
	w.told.DiskFree, w.told.DiskSize = free, size
	least := max(leastFree, size/100)
	if w.told.DiskFull {
		least *= 2 // else one that is just about full would be so again and again
	}
	if full := size > 0 && free < least; full != w.told.DiskFull {
		w.told.DiskFull = full
		w.tell()
	}
	return changed
}

// blame says what a process that has failed was short of, since the kernel had killed so many. It looks at both, for the thread may not have come
// to it yet.
func (w *watch) blame(leader int, since uint32) (memory, disk bool) {
	if w.kmsg >= 0 {
		w.drain()
	}
	w.look()
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, v := range w.recent {
		memory = memory || v.number > since && (v.pid == leader || v.session == leader || v.session < 0)
	}
	return memory, w.told.DiskFull
}

// killedForMemory finds the victim in a record of the kernel's log: "6,339,5140900,-;message". Records that programs wrote have another facility
// than the kernel's 0.
func killedForMemory(record string) (pid int, name string, ok bool) {
	head, text, _ := strings.Cut(record, ";")
	priority, _, _ := strings.Cut(head, ",")
	if p, err := strconv.Atoi(priority); err != nil || p > 7 {
		return 0, "", false
	}
	if !strings.HasPrefix(text, "Out of memory") && !strings.HasPrefix(text, "Memory cgroup out of memory") {
		return 0, "", false
	}
	_, rest, ok := strings.Cut(text, "illed process ")
	if !ok {
		return 0, "", false
	}
	number, rest, _ := strings.Cut(rest, " (")
	pid, err := strconv.Atoi(number)
	if err != nil {
		return 0, "", false
	}
	name, _, _ = strings.Cut(rest, ") total-vm:")
	return pid, name[:min(len(name), nameLimit)], true
}

// sessionOf is the session that a process belongs to; -1 when it is gone.
func sessionOf(pid int) int {
	stat, err := readFile("/proc/" + strconv.Itoa(pid) + "/stat")
	if err != nil {
		return -1
	}
	f := strings.Fields(string(stat[strings.LastIndexByte(string(stat), ')')+1:]))
	if len(f) < 4 {
		return -1
	}
	session, err := strconv.Atoi(f[3])
	if err != nil {
		return -1
	}
	return session
}
