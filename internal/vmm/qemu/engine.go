// Package qemu runs machines in unmodified QEMU: by emulation (TCG) anywhere, and by KVM where a self-test proved that it works.
//
// Every machine is a `microvm` whose RAM is a memfd: mapped shared by a parent, private by a child. All it needs is inherited as
// descriptors or sent over its control socket (QMP). Its sockets listen in the machine's run directory, so a daemon that starts
// again finds a machine that outlived the one before. This package knows nothing of snapshots, agents or identity.
package qemu

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"regexp"
	"strings"
	"sync"
	"time"

	"github.com/forkd/forkd/internal/confine"
	"github.com/forkd/forkd/internal/hostcpu"
	"github.com/forkd/forkd/internal/vmm"
	"github.com/forkd/forkd/internal/vmm/vmproc"
)

// Accelerators.
const (
	AccelAuto = "auto"
	AccelTCG  = "tcg"
	AccelKVM  = "kvm"
)

// DefaultBinary is looked up in PATH.
const DefaultBinary = "qemu-system-x86_64"

// Options configure an Engine. The zero value is useful.
type Options struct {
	Binary    string         // path or name of QEMU; default DefaultBinary
	Accel     string         // AccelAuto (default): KVM if it proves itself, else TCG
	TBSizeMiB int            // TCG's translation cache; default 32
	Users     *confine.Users // the user ids of monitors that are confined; nil: they are not
	TSCkHz    func() (uint64, error)
	KVM       func(ctx context.Context, binary string) error // the KVM self-test; default KVMWorks
	Log       *slog.Logger
}

// Engine is the QEMU engine.
type Engine struct {
	opt Options

	mu   sync.Mutex
	info *vmm.Info     // nil until probed
	cell *confine.Cell // what monitors are confined to; nil: they are not, or not probed yet
}

var _ vmm.Engine = (*Engine)(nil)

// New returns an engine. Nothing is run before the first use.
func New(opt Options) *Engine {
	if opt.Binary == "" {
		opt.Binary = DefaultBinary
	}
	if opt.Accel == "" {
		opt.Accel = AccelAuto
	}
	if opt.TBSizeMiB == 0 {
		opt.TBSizeMiB = 32
	}
	if opt.Log == nil {
		opt.Log = slog.New(slog.DiscardHandler)
	}
	if opt.TSCkHz == nil {
		opt.TSCkHz = hostcpu.TSCkHz // emulation and KVM both show the guest the counter of the host
	}
	if opt.KVM == nil {
		opt.KVM = KVMWorks
	}
	return &Engine{opt: opt}
}

var versionLine = regexp.MustCompile(`version (\d+\.\d+\.\d+)`)

const probeLimit = 20 * time.Second

// Probe implements vmm.Engine.
func (e *Engine) Probe(ctx context.Context) (vmm.Info, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.info != nil {
		return *e.info, nil
	}
	path, err := exec.LookPath(e.opt.Binary)
	if err != nil {
		return vmm.Info{}, fmt.Errorf("QEMU (%s) not found: install it (apt-get install qemu-system-x86): %w", e.opt.Binary, vmm.ErrUnavailable)
	}
	// What is found out holds for as long as the daemon runs: who asks first may leave, but not take the answer with him.
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), probeLimit)
	defer cancel()
	out, err := exec.CommandContext(ctx, path, "--version").CombinedOutput()
	m := versionLine.FindSubmatch(out)
	if err != nil || m == nil {
		return vmm.Info{}, fmt.Errorf("%s --version: %q (%v): is it QEMU? %w", path, firstLine(string(out)), err, vmm.ErrUnavailable)
	}
	info := vmm.Info{Engine: "qemu", Version: string(m[1]), Machine: "microvm", Binary: path}
	if info.Accel, err = e.chooseAccel(ctx, path); err != nil {
		return vmm.Info{}, err
	}
	info.CPU = "max"
	if info.Accel == AccelKVM {
		cpu, err := hostcpu.Read(os.DirFS("/"))
		if err != nil {
			return vmm.Info{}, fmt.Errorf("processor: %w", err)
		}
		info.CPU, info.CPUVendor, info.CPUFamily, info.CPUFeatures = "host", cpu.Vendor, cpu.Family, cpu.Features()
	}
	if info.TSCkHz, err = e.opt.TSCkHz(); err != nil {
		return vmm.Info{}, fmt.Errorf("rate of the time stamp counter: %w", err)
	}
	if err := e.makeCell(path); err != nil {
		return vmm.Info{}, fmt.Errorf("%w: %w", err, vmm.ErrUnavailable)
	}
	info.Features = vmm.Features{Console: true, Files: true, Layers: true, Net: true}
	if f, err := os.OpenFile("/dev/userfaultfd", os.O_RDWR, 0); err == nil {
		f.Close()
		info.Features.Live = true
	}
	e.info = &info
	return info, nil
}

func (e *Engine) chooseAccel(ctx context.Context, binary string) (string, error) {
	if e.opt.Accel == AccelTCG {
		return AccelTCG, nil
	}
	err := e.opt.KVM(ctx, binary)
	switch {
	case err == nil:
		return AccelKVM, nil
	case ctx.Err() != nil:
		return "", fmt.Errorf("whether KVM works could not be found out within %s: try again, or use --accel tcg: %w: %w", probeLimit, err, vmm.ErrUnavailable)
	case e.opt.Accel == AccelKVM:
		return "", fmt.Errorf("KVM was asked for: %w: %w", err, vmm.ErrUnavailable)
	}
	e.opt.Log.Info("KVM is not used", "why", err)
	return AccelTCG, nil
}

// Boot implements vmm.Engine.
func (e *Engine) Boot(ctx context.Context, cfg vmm.BootConfig) (vmm.Machine, error) {
	if err := cfg.Shape.Check(leastMiB, cfg.Memory); err != nil {
		return nil, err
	}
	info, err := e.Probe(ctx)
	if err != nil {
		return nil, err
	}
	var c command
	s, err := e.start(ctx, cfg.Dir, netNS(cfg.NIC), cfg.Cgroup, &c, func(socks sockets) {
		e.machineArgs(&c, info, cfg.Shape, cfg.Memory, cfg.Rootfs, cfg.NIC, "on", socks)
		c.add("-kernel", fmt.Sprintf("/proc/self/fd/%d", c.inherit(cfg.Kernel)), "-initrd", fmt.Sprintf("/proc/self/fd/%d", c.inherit(cfg.Initramfs)))
		c.add("-append", cmdline(info, cfg.Cmdline))
	})
	if err != nil {
		return nil, fmt.Errorf("boot parent: %w", err)
	}
	return s.machine(), nil
}

// Prepare implements vmm.Engine.
func (e *Engine) Prepare(ctx context.Context, cfg vmm.PrepareConfig) (vmm.Prepared, error) {
	if err := cfg.Shape.Check(leastMiB, cfg.Memory); err != nil {
		return nil, err
	}
	info, err := e.Probe(ctx)
	if err != nil {
		return nil, err
	}
	var c command
	s, err := e.start(ctx, cfg.Dir, netNS(cfg.NIC), cfg.Cgroup, &c, func(socks sockets) {
		e.machineArgs(&c, info, cfg.Shape, cfg.Memory, cfg.Rootfs, cfg.NIC, "off", socks)
		c.add("-S", "-incoming", "defer", "-global", "migration.send-configuration=off", "-global", "migration.announce-rounds=0")
		if cfg.UFFD != nil {
			c.uffd = c.inherit(cfg.UFFD)
		}
		for _, l := range cfg.Layers {
			c.layers = append(c.layers, c.inherit(l))
		}
	})
	if err != nil {
		return nil, fmt.Errorf("prepare child: %w", err)
	}
	if err := s.dialAhead(ctx); err != nil {
		s.discard()
		return nil, fmt.Errorf("prepare child: %w", err)
	}
	return &prepared{session: s}, nil
}

// start binds the machine's sockets, runs QEMU and opens its control connection. On an error nothing is left.
func (e *Engine) start(ctx context.Context, dir string, netNS *os.File, group *vmm.Cgroup, c *command, build func(sockets)) (_ *session, err error) {
	var socks sockets
	for _, l := range []struct {
		name string
		f    **os.File
	}{{qmpSocket, &socks.qmp}, {stateSocket, &socks.state}, {controlSocket, &socks.control}, {dataSocket, &socks.data}} {
		if *l.f, err = vmproc.Listen(dir, l.name); err != nil {
			vmproc.CleanDir(dir)
			return nil, err
		}
		defer (*l.f).Close()
	}
	build(socks)
	p, err := vmproc.Start(vmproc.Command{Name: "QEMU", Binary: e.opt.Binary, Dir: dir, Args: c.args, Files: c.files, Cell: e.cell, NetNS: netNS, Cgroup: group})
	if err != nil {
		vmproc.CleanDir(dir)
		return nil, err
	}
	p.ID.UFFDDev, p.ID.LayerFDs = c.uffd, c.layers
	var s *session
	if err = p.Record(); err == nil {
		s, err = connect(ctx, p, e.opt.Log)
	}
	if err == nil {
		err = s.qmp.do(ctx, "migrate-set-capabilities", capabilities, nil)
	}
	if err != nil {
		p.Kill()
		p.Clean()
		return nil, p.Explain(err)
	}
	return s, nil
}

// Attach implements vmm.Engine.
func (e *Engine) Attach(ctx context.Context, id vmm.Process) (vmm.Machine, error) {
	p, err := vmproc.Adopt("QEMU", id, e.opt.Users)
	if err != nil {
		return nil, err
	}
	if id.IdleThread != "" {
		return nil, fmt.Errorf("process %d is the machine of another engine: start the daemon with the --engine that it was started with: %w", id.PID, vmm.ErrUnavailable)
	}
	s, err := connect(ctx, p, e.opt.Log)
	if err != nil {
		return nil, fmt.Errorf("attach to QEMU %d: %w", id.PID, err)
	}
	var status struct {
		Status string `json:"status"`
	}
	if err := s.qmp.do(ctx, "query-status", nil, &status); err != nil {
		s.qmp.close()
		return nil, fmt.Errorf("attach to QEMU %d: %w", id.PID, err)
	}
	if status.Status != "shutdown" && status.Status != "guest-panicked" {
		return s.machine(), nil
	}
	s.guestEnded("guest had ended (" + status.Status + ") when the daemon came back")
	m := s.machine()
	<-m.done // who gets it sees at once that it has ended
	return m, nil
}

// leastMiB is what a stock kernel and the agent need.
const leastMiB = 64

func firstLine(s string) string {
	line, _, _ := strings.Cut(s, "\n")
	return line
}
