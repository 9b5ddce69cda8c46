package vmmtest

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync/atomic"
	"syscall"

	"github.com/forkd/forkd/internal/procstat"
	"github.com/forkd/forkd/internal/vmm"
)

// inherited are the files that a monitor process gets, beside its sockets.
type inherited struct {
	memory, rootfs, uffd *os.File
	layers               []*os.File
}

// monitor is the host's side of one machine process. Its watcher goroutine ends with the process.
type monitor struct {
	engine *Fake
	proc   vmm.Process
	fd     *pidfd
	killed atomic.Bool
	done   chan struct{} // closed when the process has ended, and was reaped where it is our child
	exit   vmm.Exit      // set before done is closed
}

// start runs a monitor process and waits until it listens.
func (e *Fake) start(ctx context.Context, cfg machineConfig, in inherited) (*monitor, error) {
	if err := e.usable(); err != nil {
		return nil, err
	}
	if err := ctx.Err(); err != nil {
		return nil, context.Cause(ctx)
	}
	cfg.Records, cfg.SlowStart, cfg.MaxLife = e.dir, e.opts.SlowStart, e.opts.MaxLife
	cmd, proc, sockets, err := monitorCommand(cfg, in)
	defer closeAll(sockets)
	if err == nil {
		err = cmd.Start()
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("start the fake monitor: %w", err), removeFiles(cfg.Dir))
	}
	m, err := e.watch(cmd, proc)
	if err != nil {
		return nil, err
	}
	if _, err := m.call(ctx, opHello, nil); err != nil {
		return nil, errors.Join(err, m.Kill())
	}
	return m, nil
}

// monitorCommand makes the command of a monitor process. The sockets are returned for closing once it was started.
func monitorCommand(cfg machineConfig, in inherited) (*exec.Cmd, vmm.Process, []*os.File, error) {
	proc := vmm.Process{Dir: cfg.Dir, IdleThread: idleThread}
	binary, err := os.Executable()
	if err != nil {
		return nil, proc, nil, err
	}
	cmd := exec.Command(binary)
	inherit := func(f *os.File) int {
		cmd.ExtraFiles = append(cmd.ExtraFiles, f)
		return 2 + len(cmd.ExtraFiles)
	}
	cfg.Memory = inherit(in.memory)
	if in.rootfs != nil {
		inherit(in.rootfs)
	}
	if in.uffd != nil {
		proc.UFFDDev = inherit(in.uffd)
	}
	for _, layer := range in.layers {
		proc.LayerFDs = append(proc.LayerFDs, inherit(layer))
	}
	var sockets []*os.File
	for _, name := range []string{controlSocket, portSocket(vmm.PortControl), portSocket(vmm.PortData)} {
		socket, err := listen(cfg.Dir, name)
		if err != nil {
			return nil, proc, sockets, err
		}
		sockets = append(sockets, socket)
		cfg.Sockets = append(cfg.Sockets, inherit(socket))
	}
	cfg.Process = proc
	config, err := json.Marshal(cfg)
	if err != nil {
		return nil, proc, sockets, err
	}
	cmd.Env = []string{machineEnv + "=" + string(config), "PATH=" + os.Getenv("PATH"), "GOTRACEBACK=single"}
	cmd.Dir = "/"
	// Not our process group: a ^C at the terminal is for the daemon, and machines outlive it.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	return cmd, proc, sockets, nil
}

func closeAll(files []*os.File) {
	for _, f := range files {
		f.Close()
	}
}

// watch takes over a process that was just started.
func (e *Fake) watch(cmd *exec.Cmd, proc vmm.Process) (*monitor, error) {
	proc.PID = cmd.Process.Pid
	now, err := procstat.ReadStat(proc.PID)
	var fd *pidfd
	if err == nil {
		fd, err = openPidfd(proc.PID)
	}
	if err != nil {
		return nil, errors.Join(err, cmd.Process.Kill(), cmd.Wait(), removeFiles(proc.Dir))
	}
	proc.StartTicks = now.StartTicks
	m := &monitor{engine: e, proc: proc, fd: fd, done: make(chan struct{})}
	go m.wait(cmd.Wait)
	return m, nil
}

// attach takes over a process that an earlier Fake started.
func (e *Fake) attach(ctx context.Context, p vmm.Process) (*monitor, error) {
	fd, err := openPidfd(p.PID)
	if errors.Is(err, syscall.ESRCH) || errors.Is(err, syscall.EINVAL) {
		return nil, fmt.Errorf("%w: process %d doesn't exist", vmm.ErrGone, p.PID)
	}
	if err != nil {
		return nil, err
	}
	// The pidfd was opened first: when the start time is right now, it refers to that process for good.
	if !alive(p.PID, p.StartTicks) {
		fd.close()
		return nil, fmt.Errorf("%w: process %d that started at tick %d has ended", vmm.ErrGone, p.PID, p.StartTicks)
	}
	m := &monitor{engine: e, proc: p, fd: fd, done: make(chan struct{})}
	go m.wait(nil)
	if _, err := m.call(ctx, opHello, nil); err != nil {
		m.forget()
		return nil, err
	}
	return m, nil
}

// wait ends when the process has ended, or with forget. reap is nil where the process isn't our child.
func (m *monitor) wait(reap func() error) {
	waited := m.fd.wait()
	m.fd.close()
	if waited != nil {
		return // forget closed the pidfd
	}
	var status error
	if reap != nil {
		status = reap()
	}
	m.exit = m.reason(status, reap != nil)
	os.Remove(recordPath(m.engine.dir, m.proc.PID))
	close(m.done)
}

func (m *monitor) reason(status error, known bool) vmm.Exit {
	if why, err := os.ReadFile(filepath.Join(m.proc.Dir, exitFile)); err == nil {
		if why, panicked := strings.CutPrefix(string(why), panicPrefix); panicked {
			return vmm.Exit{Reason: vmm.ExitPanicked, Detail: why}
		}
		return vmm.Exit{Reason: vmm.ExitShutdown, Detail: string(why)}
	}
	switch {
	case m.killed.Load():
		return vmm.Exit{Reason: vmm.ExitKilled, Detail: "killed by forkd"}
	case !known:
		return vmm.Exit{Reason: vmm.ExitCrashed, Detail: "the monitor ended; it was not our child, so its exit status is unknown"}
	case status == nil:
		return vmm.Exit{Reason: vmm.ExitCrashed, Detail: "the monitor ended with exit status 0"}
	}
	return vmm.Exit{Reason: vmm.ExitCrashed, Detail: "the monitor ended: " + status.Error()}
}

// forget lets the process be and ends the watcher.
func (m *monitor) forget() { m.fd.close() }

// call asks the process for something. It wraps vmm.ErrGone when the process has ended.
func (m *monitor) call(ctx context.Context, o op, f *os.File) (reply, error) {
	return m.request(ctx, request{Op: o}, f)
}

func (m *monitor) request(ctx context.Context, req request, f *os.File) (reply, error) {
	r, err := call(ctx, m.proc.Dir, req, f)
	if err != nil && ctx.Err() == nil && !alive(m.proc.PID, m.proc.StartTicks) {
		return r, fmt.Errorf("%w: %w", vmm.ErrGone, err)
	}
	return r, err
}

// die is SIGKILL from outside: not a Kill of ours.
func (m *monitor) die() {
	if m.fd.kill() == nil {
		<-m.done
	}
}

func (m *monitor) Process() vmm.Process { return m.proc }

func (m *monitor) Done() <-chan struct{} { return m.done }

func (m *monitor) Exit() vmm.Exit { return m.exit }

func (m *monitor) Kill() error {
	m.killed.Store(true)
	if err := m.fd.kill(); err != nil {
		return fmt.Errorf("kill fake machine %d: %w", m.proc.PID, err)
	}
	<-m.done
	return removeFiles(m.proc.Dir)
}

// SendFile implements vmm.FileReceiver.
func (m *monitor) SendFile(ctx context.Context, f *os.File) (int, error) {
	r, err := m.call(ctx, opFile, f)
	return r.FD, err
}

// prepared implements vmm.Prepared.
type prepared struct{ *monitor }

func (p *prepared) Load(ctx context.Context, state *os.File) (vmm.Machine, error) {
	err := p.engine.faults.around(ctx, StepLoad, p.die, func() error {
		_, err := p.request(ctx, request{Op: opLoad, Guest: p.engine.faults.guest()}, state)
		return err
	})
	if err != nil {
		return nil, errors.Join(fmt.Errorf("load the device state into fake machine %d: %w", p.proc.PID, err), p.Kill())
	}
	return &machine{monitor: p.monitor}, nil
}

// machine implements vmm.Machine, vmm.Console and vmm.FileReceiver.
type machine struct{ *monitor }

func (m *machine) Pause(ctx context.Context) error {
	return m.step(ctx, StepPause, opPause, nil)
}

func (m *machine) Resume(ctx context.Context) error {
	return m.step(ctx, StepResume, opResume, nil)
}

func (m *machine) SaveState(ctx context.Context, w *os.File) error {
	return m.step(ctx, StepSave, opSave, w)
}

func (m *machine) step(ctx context.Context, step Step, o op, f *os.File) error {
	err := m.engine.faults.around(ctx, step, m.die, func() error {
		_, err := m.call(ctx, o, f)
		return err
	})
	if err != nil {
		return fmt.Errorf("%s fake machine %d: %w", step, m.proc.PID, err)
	}
	return nil
}

func (m *machine) Dial(ctx context.Context, port uint32) (net.Conn, error) {
	var conn net.Conn
	err := m.engine.faults.around(ctx, StepDial, m.die, func() error {
		c, err := dial(ctx, m.proc.Dir, portSocket(port))
		if err != nil {
			if !alive(m.proc.PID, m.proc.StartTicks) {
				err = fmt.Errorf("%w: %w", vmm.ErrGone, err)
			}
			return err
		}
		conn = c
		return nil
	})
	if err != nil {
		if conn != nil {
			conn.Close()
		}
		return nil, fmt.Errorf("dial port %d of fake machine %d: %w", port, m.proc.PID, err)
	}
	return conn, nil
}

// Console implements vmm.Console.
func (m *machine) Console(context.Context) ([]byte, error) {
	f, err := os.Open(filepath.Join(m.proc.Dir, consoleFile))
	if errors.Is(err, os.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("read the console of fake machine %d: %w", m.proc.PID, err)
	}
	defer f.Close()
	b, err := io.ReadAll(f)
	if err != nil {
		return nil, fmt.Errorf("read the console of fake machine %d: %w", m.proc.PID, err)
	}
	return b[max(0, len(b)-vmm.ConsoleLimit):], nil
}
