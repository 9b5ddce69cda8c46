package vmmtest

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"

	"github.com/forkd/forkd/internal/vmm"
)

// FakeOptions say what a Fake is and how it fails.
type FakeOptions struct {
	Info        vmm.Info      // what Probe reports; fields left empty get defaults
	NoFeatures  bool          // Probe reports no optional powers, whatever Info says
	Unavailable error         // Probe and all else wrap vmm.ErrUnavailable with it
	Faults      []Fault       // injected failures; Inject changes them later
	NoPython    bool          // guests that are booted have no interpreter
	SlowStart   time.Duration // a monitor process needs that long before it listens
	MaxLife     time.Duration // a machine ends itself after that long, so that a broken test leaves nothing for ever; 0: 15 min
}

// Fake is a vmm.Engine whose machines are processes without a guest.
type Fake struct {
	dir    string
	opts   FakeOptions
	faults *faults
}

// NewFake returns an engine that records the processes it starts in dir, so that a Fake of a later process finds them as well.
func NewFake(dir string, opts FakeOptions) *Fake {
	opts.MaxLife = cmp.Or(opts.MaxLife, 15*time.Minute)
	return &Fake{dir: dir, opts: opts, faults: newFaults(opts.Faults)}
}

// Inject replaces the injected failures and starts to count calls anew.
func (e *Fake) Inject(list ...Fault) { e.faults.replace(list) }

// Calls returns how often each step was called since the failures were last set.
func (e *Fake) Calls() map[Step]int { return e.faults.count() }

// Probe implements vmm.Engine.
func (e *Fake) Probe(ctx context.Context) (vmm.Info, error) {
	info := e.opts.Info
	err := e.faults.around(ctx, StepProbe, nil, e.usable)
	if err != nil {
		return vmm.Info{}, err
	}
	binary, err := os.Executable()
	if err != nil {
		return vmm.Info{}, fmt.Errorf("find the fake monitor: %w", err)
	}
	info.Engine = cmp.Or(info.Engine, "fake")
	info.Version = cmp.Or(info.Version, "1.0.0")
	info.Accel = cmp.Or(info.Accel, "none")
	info.Machine = cmp.Or(info.Machine, "fake-1")
	info.CPU = cmp.Or(info.CPU, "fake")
	info.TSCkHz = cmp.Or(info.TSCkHz, 1_000_000)
	info.Binary = cmp.Or(info.Binary, binary)
	if info.Features == (vmm.Features{}) {
		info.Features = vmm.Features{Console: true, Files: true, Layers: true, Live: true}
	}
	if e.opts.NoFeatures {
		info.Features = vmm.Features{}
	}
	return info, nil
}

func (e *Fake) usable() error {
	if e.opts.Unavailable != nil {
		return fmt.Errorf("fake engine: %w: %w", vmm.ErrUnavailable, e.opts.Unavailable)
	}
	return nil
}

// Boot implements vmm.Engine.
func (e *Fake) Boot(ctx context.Context, cfg vmm.BootConfig) (vmm.Machine, error) {
	if err := checkBoot(cfg); err != nil {
		return nil, fmt.Errorf("boot a fake machine: %w", err)
	}
	var m *monitor
	err := e.faults.around(ctx, StepBoot, nil, func() (err error) {
		m, err = e.start(ctx, machineConfig{Dir: cfg.Dir, Boot: true, Shape: cfg.Shape, Cmdline: cfg.Cmdline, Python: !e.opts.NoPython}, inherited{memory: cfg.Memory, rootfs: cfg.Rootfs})
		return err
	})
	if err != nil {
		if m != nil {
			err = errors.Join(err, m.Kill())
		}
		return nil, fmt.Errorf("boot a fake machine: %w", err)
	}
	return &machine{monitor: m}, nil
}

// Prepare implements vmm.Engine.
func (e *Fake) Prepare(ctx context.Context, cfg vmm.PrepareConfig) (vmm.Prepared, error) {
	if err := checkPrepare(cfg); err != nil {
		return nil, fmt.Errorf("prepare a fake machine: %w", err)
	}
	var m *monitor
	err := e.faults.around(ctx, StepPrepare, nil, func() (err error) {
		m, err = e.start(ctx, machineConfig{Dir: cfg.Dir, Shape: cfg.Shape}, inherited{memory: cfg.Memory, rootfs: cfg.Rootfs, uffd: cfg.UFFD, layers: cfg.Layers})
		return err
	})
	if err != nil {
		if m != nil {
			err = errors.Join(err, m.Kill())
		}
		return nil, fmt.Errorf("prepare a fake machine: %w", err)
	}
	return &prepared{monitor: m}, nil
}

// Attach implements vmm.Engine.
func (e *Fake) Attach(ctx context.Context, p vmm.Process) (vmm.Machine, error) {
	var m *monitor
	err := e.faults.around(ctx, StepAttach, func() { killProcess(p) }, func() (err error) {
		if err := e.usable(); err != nil {
			return err
		}
		m, err = e.attach(ctx, p)
		return err
	})
	if err != nil {
		if m != nil {
			m.forget()
		}
		return nil, fmt.Errorf("attach to fake machine %d: %w", p.PID, err)
	}
	return &machine{monitor: m}, nil
}

// Live returns the machines of this dir, of whichever Fake, that are alive.
func (e *Fake) Live() ([]vmm.Process, error) {
	names, err := filepath.Glob(filepath.Join(e.dir, "machine-*"))
	if err != nil {
		return nil, err
	}
	var live []vmm.Process
	for _, name := range names {
		b, err := os.ReadFile(name)
		if errors.Is(err, os.ErrNotExist) {
			continue
		}
		var p vmm.Process
		if err == nil {
			err = json.Unmarshal(b, &p)
		}
		if err != nil {
			return nil, fmt.Errorf("read the record of a fake machine: %w", err)
		}
		if alive(p.PID, p.StartTicks) {
			live = append(live, p)
		}
	}
	return live, nil
}

// Close kills the machines that Live returns and removes what they left.
func (e *Fake) Close() error {
	live, err := e.Live()
	if err != nil {
		return err
	}
	for _, p := range live {
		killProcess(p)
		err = errors.Join(err, removeFiles(p.Dir))
	}
	return err
}

// killProcess sends SIGKILL to the very process and waits until it has ended.
func killProcess(p vmm.Process) {
	fd, err := openPidfd(p.PID)
	if err != nil {
		return
	}
	defer fd.close()
	if alive(p.PID, p.StartTicks) && fd.kill() == nil {
		_ = fd.wait()
	}
}

func checkBoot(cfg vmm.BootConfig) error {
	if err := checkCommon(cfg.Dir, cfg.Shape, cfg.Memory); err != nil {
		return err
	}
	seals, err := unix.FcntlInt(cfg.Memory.Fd(), unix.F_GET_SEALS, 0)
	if err == nil && seals&unix.F_SEAL_WRITE != 0 {
		return fmt.Errorf("%w: the memory of a parent is sealed", vmm.ErrInvalidConfig)
	}
	return nil
}

func checkPrepare(cfg vmm.PrepareConfig) error {
	if err := checkCommon(cfg.Dir, cfg.Shape, cfg.Memory); err != nil {
		return err
	}
	seals, err := unix.FcntlInt(cfg.Memory.Fd(), unix.F_GET_SEALS, 0)
	if err != nil || seals&unix.F_SEAL_WRITE == 0 {
		return fmt.Errorf("%w: the memory of a child isn't a sealed memfd", vmm.ErrInvalidConfig)
	}
	return nil
}

func checkCommon(dir string, shape vmm.Shape, memory *os.File) error {
	entries, err := os.ReadDir(dir)
	switch {
	case err != nil:
		return fmt.Errorf("%w: run directory: %w", vmm.ErrInvalidConfig, err)
	case len(entries) > 0:
		return fmt.Errorf("%w: run directory %s isn't empty: it holds %s", vmm.ErrInvalidConfig, dir, entries[0].Name())
	case shape.VCPUs < 1:
		return fmt.Errorf("%w: %d vCPUs", vmm.ErrInvalidConfig, shape.VCPUs)
	case memory == nil:
		return fmt.Errorf("%w: no memory", vmm.ErrInvalidConfig)
	}
	info, err := memory.Stat()
	if err != nil {
		return fmt.Errorf("%w: memory: %w", vmm.ErrInvalidConfig, err)
	}
	if want := int64(shape.MemMiB) << 20; want <= 0 || info.Size() != want {
		return fmt.Errorf("%w: the memory has %d bytes, the shape says %d MiB", vmm.ErrInvalidConfig, info.Size(), shape.MemMiB)
	}
	return nil
}
