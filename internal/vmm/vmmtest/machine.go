package vmmtest

import (
	"encoding/json"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/forkd/forkd/internal/procstat"
	"github.com/forkd/forkd/internal/vmm"
)

// Everything in this file and in guest*.go runs in the machine's own process.

// idleThread is the name of a thread of the machine that does nothing: a system call may be injected there.
const idleThread = "fake_idle"

// machineConfig is what a Fake tells a machine process.
type machineConfig struct {
	Dir, Records string
	Boot         bool
	Shape        vmm.Shape
	Cmdline      []string
	Python       bool
	Memory       int   // descriptor
	Sockets      []int // descriptors of the listening sockets: control, then the ports
	Process      vmm.Process
	SlowStart    time.Duration
	MaxLife      time.Duration
}

func recordPath(records string, pid int) string {
	return filepath.Join(records, "machine-"+strconv.Itoa(pid))
}

// hardware is a fake machine from the inside.
type hardware struct {
	cfg    machineConfig
	memory []byte
	gate   *gate
	guest  *guest
	over   chan string // why the guest shut down

	mu     sync.Mutex // guards what follows; one control request at a time
	loaded bool
	files  []*os.File // from SendFile, held open
}

// machineMain is the life of a machine process. It returns the exit status.
func machineMain(config string) int {
	hw := &hardware{gate: newGate(), over: make(chan string, 1)}
	if err := json.Unmarshal([]byte(config), &hw.cfg); err != nil {
		fmt.Fprintln(os.Stderr, "fake machine: configuration:", err)
		return 2
	}
	if err := hw.run(); err != nil {
		fmt.Fprintln(os.Stderr, "fake machine:", err)
		return 1
	}
	return 0
}

func (hw *hardware) run() error {
	if err := hw.mapMemory(); err != nil {
		return err
	}
	hw.guest = newGuest(hw.memory, hw.gate, hw.cfg.Dir, hw.over)
	listeners, err := hw.listeners()
	if err != nil {
		return err
	}
	if err := hw.record(); err != nil {
		return err
	}
	named := make(chan error)
	go idle(named)
	if err := <-named; err != nil {
		return err
	}
	life := time.NewTimer(hw.cfg.MaxLife)
	time.Sleep(hw.cfg.SlowStart) // what a slow monitor looks like: nothing to await
	if hw.cfg.Boot {
		if err := hw.guest.boot(hw.cfg.Cmdline, hw.cfg.Python); err != nil {
			return err
		}
		hw.loaded = true
		hw.gate.open()
	}
	go accept(listeners[0], hw.control)
	for i, port := range ports {
		go newAgentServer(hw.guest).serve(listeners[1+i], port)
	}
	go hw.guest.tick()
	return hw.live(life.C)
}

// live waits for the end: the guest's shutdown, the end of a life that nobody ended, or a run directory that was removed.
func (hw *hardware) live(over <-chan time.Time) error {
	look := time.NewTicker(time.Second)
	defer look.Stop()
	for {
		select {
		case why := <-hw.over:
			return os.WriteFile(filepath.Join(hw.cfg.Dir, exitFile), []byte(why), 0o600)
		case <-over:
			return fmt.Errorf("nobody ended it for %v", hw.cfg.MaxLife)
		case <-look.C:
			if _, err := os.Stat(hw.cfg.Dir); err != nil {
				return err
			}
		}
	}
}

func (hw *hardware) mapMemory() error {
	flags := unix.MAP_PRIVATE
	if hw.cfg.Boot {
		flags = unix.MAP_SHARED
	}
	var err error
	hw.memory, err = unix.Mmap(hw.cfg.Memory, 0, hw.cfg.Shape.MemMiB<<20, unix.PROT_READ|unix.PROT_WRITE, flags)
	if err != nil {
		return fmt.Errorf("map the memory: %w", err)
	}
	return nil
}

func (hw *hardware) listeners() ([]net.Listener, error) {
	var listeners []net.Listener
	for _, fd := range hw.cfg.Sockets {
		f := os.NewFile(uintptr(fd), "listener")
		l, err := net.FileListener(f)
		if err != nil {
			return nil, fmt.Errorf("inherited socket %d: %w", fd, err)
		}
		f.Close()
		listeners = append(listeners, l)
	}
	return listeners, nil
}

// record leaves word of this process for a Fake in another process.
func (hw *hardware) record() error {
	p := hw.cfg.Process
	p.PID = os.Getpid()
	now, err := procstat.ReadStat(p.PID)
	if err != nil {
		return err
	}
	p.StartTicks = now.StartTicks
	b, err := json.Marshal(p)
	if err != nil {
		return err
	}
	path := recordPath(hw.cfg.Records, p.PID)
	unfinished := filepath.Join(hw.cfg.Records, ".new-"+strconv.Itoa(p.PID)) // a name that Live doesn't look at
	if err := os.WriteFile(unfinished, b, 0o600); err != nil {
		return err
	}
	return os.Rename(unfinished, path)
}

// idle is the idle thread, once it has sent nil. It ends with the process.
func idle(named chan<- error) {
	runtime.LockOSThread()
	named <- os.WriteFile("/proc/thread-self/comm", []byte(idleThread), 0)
	for {
		_, _ = unix.Poll(nil, -1)
	}
}

// accept serves each connection in a goroutine. It ends with the process.
func accept(l net.Listener, serve func(*net.UnixConn)) {
	for {
		conn, err := l.Accept()
		if err != nil {
			return
		}
		go serve(conn.(*net.UnixConn))
	}
}

// control serves one control connection.
func (hw *hardware) control(conn *net.UnixConn) {
	defer conn.Close()
	req, f, err := receive(conn)
	var r reply
	if err == nil {
		r, err = hw.do(req, f)
	}
	if err != nil {
		r.Error = err.Error()
	}
	line, err := json.Marshal(r)
	if err == nil {
		_, _ = conn.Write(append(line, '\n'))
	}
}

// do carries out one request and owns f.
func (hw *hardware) do(req request, f *os.File) (reply, error) {
	hw.mu.Lock()
	defer hw.mu.Unlock()
	if req.Op == opFile {
		if f == nil {
			return reply{}, fmt.Errorf("no descriptor came with the request")
		}
		hw.files = append(hw.files, f)
		return reply{FD: int(f.Fd())}, nil
	}
	if f != nil {
		defer f.Close()
	}
	if !hw.loaded && (req.Op == opPause || req.Op == opResume || req.Op == opSave) {
		return reply{}, fmt.Errorf("no device state was loaded")
	}
	switch req.Op {
	case opHello:
	case opPause:
		hw.gate.shut()
	case opResume:
		hw.gate.open()
	case opLoad:
		return reply{}, hw.load(f, req.Guest)
	case opSave:
		return reply{}, hw.save(f)
	case opQuit:
		hw.guest.shutdown("asked by the monitor")
	default:
		return reply{}, fmt.Errorf("unknown request %q", req.Op)
	}
	return reply{}, nil
}
