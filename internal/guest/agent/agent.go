// Package agent is the guest side of forkd: the first process of a machine and the server of its control channel.
//
// As init (Run) it turns an initramfs into a running root file system: modules, a read-only erofs root with a tmpfs overlay, the usual
// mounts. It stays process 1, reaps orphans and serves the control channel (internal/guest/agentproto) on the first guest port: ping,
// commands, a resident Python interpreter and the identity of a fork. It also serves a Unix socket for tests and the fake engine.
//
// It is not a supervisor: it starts no services and keeps no logs. It imports nothing of the host side and uses no file of the root
// file system for itself.
//
// # One loop
//
// Everything but running commands happens on one goroutine that sleeps in one system call (loop.go). A ping or an eval is read,
// handled and answered there without waking another thread, allocating or formatting: in a fresh fork under QEMU's TCG each basic
// block that runs for the first time costs some 13 µs, so code that is not on that path is what makes a fork fast.
package agent

import (
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
)

// Version of the agent, as a Pong reports it.
const Version = "0.2.0"

// Options say what an Agent may do. The zero value serves a machine of its own.
type Options struct {
	// Sandboxed keeps the agent's hands off the machine it runs on: an identity sets no clock, entropy or host name unless Machine is
	// given, writes no file unless Root is given, and the agent waits for its own children only.
	Sandboxed bool
	// Root is the directory under which an identity writes /etc/hostname and the like. Empty: / when not Sandboxed, else nowhere.
	Root string
	// Machine is what an identity changes. Nil: the kernel when not Sandboxed, else nothing.
	Machine Machine
	// Python is the interpreter of evals. Empty: the first python3 on the default path.
	Python string
	// Log receives the agent's own messages. Nil: they are dropped.
	Log func(msg string)

	// init says that the agent is process 1 and inherits orphans.
	init bool
}

// Machine is what an identity changes outside of files and processes.
type Machine interface {
	SetClock(unixNano int64) error
	AddEntropy(fresh []byte) error // fresh bytes are credited and the kernel's generator is reseeded from them
	SetHostname(name string) error
}

// limits are how long things may take.
type limits struct {
	hooks   time.Duration // all hooks of an identity together
	start   time.Duration // the interpreter to start; cold under TCG, among many others, that takes seconds
	reseed  time.Duration // the interpreter to take an identity
	quiesce time.Duration // a full garbage collection of the interpreter
	grace   time.Duration // between SIGINT and SIGKILL
	linger  time.Duration // reading on after a command ended when something it left behind holds the pipes open
}

var defaultLimits = limits{
	hooks: 30 * time.Second, start: 2 * time.Minute, reseed: 30 * time.Second, quiesce: time.Minute, grace: time.Second, linger: 250 * time.Millisecond,
}

// Agent serves one machine over any number of connections, one after the other. Commands, the interpreter and the identity's
// environment last longer than a connection.
type Agent struct {
	opt     Options
	log     func(string)
	limits  limits
	started time.Time
	boot    int64 // uptime in ns when the agent started
	pid     uint32
	python  string
	files   identityFiles

	out       outlet
	procs     *reaper
	execs     execTable
	short     watch
	wg        sync.WaitGroup // commands, hooks and drains
	in        interp
	ident     identityState
	identBusy atomic.Bool // an identity is being applied
	stop      int         // an eventfd that ends the loop; -1 for init
	fd        int         // connection, -1 while there is none
	received  uint64      // bytes of what is said on the connection, and on those that it goes on from
	session   uint64      // of the connection; 0 before HELLO
	env       []string    // of the identity
	warm      struct {
		bytes []byte
		words []string
	} // see warmHeap
	quiet struct {
		session uint64
		id      uint32
	} // the QUIESCE that is under way
	instance string
	scratch  []byte
	polls    [8]unix.PollFd
}

// New returns an Agent that is not connected yet. Close ends it.
func New(opt Options) (*Agent, error) {
	a := &Agent{opt: opt, log: opt.Log, started: time.Now(), limits: defaultLimits, stop: -1, fd: -1, scratch: make([]byte, 0, 512)}
	if a.log == nil {
		a.log = func(string) {}
	}
	if a.opt.Machine == nil {
		a.opt.Machine = nowhere{}
		if !opt.Sandboxed {
			a.opt.Machine = &kernel{random: -1}
		}
	}
	var ts unix.Timespec
	if unix.ClockGettime(unix.CLOCK_MONOTONIC, &ts) == nil {
		a.boot = ts.Nano()
	}
	if !opt.init {
		fd, err := unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK)
		if err != nil {
			return nil, os.NewSyscallError("eventfd", err)
		}
		a.stop = fd
	}
	a.pid = uint32(os.Getpid())
	a.files.root = strings.TrimRight(opt.Root, "/")
	a.files.on = opt.Root != "" || !opt.Sandboxed
	a.out.fd = -1
	a.short = watch{a: a, kmsg: -1, kick: -1}
	a.procs = newReaper(opt.init)
	a.in.init(a)
	a.python = findPython(opt.Python)
	return a, nil
}

// Close ends the commands and the interpreter, and waits for them.
// Preconditions: no Serve is running.
func (a *Agent) Close() error {
	a.execs.killAll()
	a.in.shutdown()
	a.short.end()
	a.wg.Wait()
	a.procs.close()
	a.files.close()
	a.short.close()
	if a.stop >= 0 {
		unix.Close(a.stop)
		a.stop = -1
	}
	return nil
}

// now is a monotonic time in ns.
func (a *Agent) now() int64 { return int64(time.Since(a.started)) }

// after is the time in d from now, as a deadline.
func (a *Agent) after(d time.Duration) int64 { return a.now() + int64(d) }
