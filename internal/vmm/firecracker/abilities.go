package firecracker

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"time"

	"github.com/forkd/forkd/internal/confine"
	"github.com/forkd/forkd/internal/hostcpu"
	"github.com/forkd/forkd/internal/netns"
	"github.com/forkd/forkd/internal/vmm"
	"github.com/forkd/forkd/internal/vmm/probeguest"
)

// abilities is what a binary proved to do on this host.
type abilities struct {
	info  vmm.Info
	major int
	minor int
	save  SaveMode
}

// older says whether the binary is older than a version.
func (a *abilities) older(major, minor int) bool {
	return a.major < major || a.major == major && a.minor < minor
}

// deafAfterPause says whether the binary delivers nothing to a guest's vsock device any more after it was paused and resumed: versions 1.16
// wait then for the guest to acknowledge a word that it is only given when a state is saved. It is mended in what follows.
func (a *abilities) deafAfterPause() bool { return a.major == 1 && a.minor == 16 }

// The oldest version that is known to work.
const (
	oldestMajor = 1
	oldestMinor = 12
)

var versionLine = regexp.MustCompile(`(?m)^Firecracker v((\d+)\.(\d+)\.\S+)$`)

// abilities finds out, once, what the binary can do.
func (e *Engine) abilities(ctx context.Context) (*abilities, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.probed != nil {
		return e.probed, nil
	}
	a, err := e.probe(ctx)
	if err != nil {
		if cause := context.Cause(ctx); cause != nil {
			return nil, fmt.Errorf("probe Firecracker: %w", cause)
		}
		return nil, err
	}
	e.probed = a
	return a, nil
}

// Describe says, for people, which Firecracker it is and how it saves the state of a machine that is branched.
func (e *Engine) Describe(ctx context.Context) (string, error) {
	a, err := e.abilities(ctx)
	if err != nil {
		return "", err
	}
	how := map[SaveMode]string{
		SaveStateOnly: "a branch saves the device state without memory",
		SaveDiff:      "a branch saves the device state with what has changed, which makes its pause longer: this version opens the memory's file first",
		SaveFull:      "a branch saves the device state with all memory, which makes its pause long",
	}[a.save]
	through := ""
	if e.opt.Jailer != "" {
		through = ", started through its jailer (" + e.opt.Jailer + ")"
	}
	return fmt.Sprintf("Firecracker %s (%s)%s: %s", a.info.Version, a.info.Binary, through, how), nil
}

func (e *Engine) probe(ctx context.Context) (*abilities, error) {
	path, err := findBinary(e.opt.Binary)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", err, vmm.ErrUnavailable)
	}
	a, err := askVersion(ctx, path)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", err, vmm.ErrUnavailable)
	}
	if err := e.checkJailer(ctx, a.info.Version); err != nil {
		return nil, fmt.Errorf("%w: %w", err, vmm.ErrUnavailable)
	}
	if err := e.checkKVM(); err != nil {
		return nil, fmt.Errorf("%w: %w", err, vmm.ErrUnavailable)
	}
	if a.info, err = e.describe(a.info); err != nil {
		return nil, err
	}
	e.opt.Binary = path
	if err := e.makeCell(); err != nil {
		return nil, fmt.Errorf("%w: %w", err, vmm.ErrUnavailable)
	}
	if e.opt.Save != "" {
		a.save = e.opt.Save
		return a, nil
	}
	if err := e.trySaving(ctx, a); err != nil {
		return nil, fmt.Errorf("%s %s was tried with a small guest, and failed: %w: %w", path, a.info.Version, err, vmm.ErrUnavailable)
	}
	return a, nil
}

func findBinary(name string) (string, error) {
	path, err := exec.LookPath(name)
	if err != nil {
		return "", fmt.Errorf("no Firecracker (%s: %w): give it with --firecracker or FORKD_FIRECRACKER", name, err)
	}
	return path, nil
}

// askVersion runs the binary for its version.
func askVersion(ctx context.Context, path string) (*abilities, error) {
	m, said, err := version(ctx, versionLine, path)
	if m == nil {
		return nil, fmt.Errorf("%s --version: %.200q (%v): is it Firecracker?", path, said, err)
	}
	a := &abilities{info: vmm.Info{Engine: "firecracker", Version: m[1], Accel: "kvm", Machine: "mmio", Binary: path}}
	a.major, _ = strconv.Atoi(m[2])
	a.minor, _ = strconv.Atoi(m[3])
	if a.older(oldestMajor, oldestMinor) {
		return nil, fmt.Errorf("%s is Firecracker %s, at least %d.%d is needed", path, m[1], oldestMajor, oldestMinor)
	}
	return a, nil
}

// makeCell makes what monitors are confined to. Preconditions: e.mu is held.
func (e *Engine) makeCell() (err error) {
	if e.opt.Users == nil || e.cell != nil {
		return nil
	}
	e.cell, err = confine.New(confine.Spec{Binary: e.opt.Binary, Files: e.shown, Devices: []string{probeguest.Device, netns.TunDevice}, Jailer: e.opt.Jailer}, e.opt.Users)
	return err
}

// explainKVM says what an error of opening KVM means.
func explainKVM(err error) error {
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return fmt.Errorf("this host has no KVM (%w): Firecracker needs it", err)
	case errors.Is(err, fs.ErrPermission):
		return fmt.Errorf("KVM is not ours to use (%w): run as root or join the group of %s", err, probeguest.Device)
	case err != nil:
		return fmt.Errorf("KVM can't be used: %w", err)
	}
	return nil
}

func (e *Engine) checkKVM() error {
	if err := explainKVM(probeguest.Accessible()); err != nil {
		return err
	}
	err := e.opt.KVM()
	if e.opt.Bare && errors.Is(err, probeguest.ErrNoStockKernel) {
		return nil
	}
	return err
}

// describe fills in what a snapshot depends on besides the binary.
func (e *Engine) describe(info vmm.Info) (vmm.Info, error) {
	cpu, err := hostcpu.Read(os.DirFS("/"))
	if err != nil {
		return info, fmt.Errorf("processor: %w", err)
	}
	info.CPU = "host: " + cpu.Model
	info.CPUVendor, info.CPUFamily, info.CPUFeatures = cpu.Vendor, cpu.Family, cpu.Features()
	if e.opt.CPUTemplate != "" {
		info.CPU = "template " + e.opt.CPUTemplate + " on " + cpu.Vendor
		info.CPUFamily, info.CPUFeatures = "", "" // the guest sees the template's, which every processor that has the template has
	}
	if info.TSCkHz, err = e.opt.TSCkHz(); err != nil {
		return info, fmt.Errorf("rate of the time stamp counter: %w", err)
	}
	info.Features = vmm.Features{Console: true, Layers: true, LayersLoaded: true, Net: true}
	if f, err := os.OpenFile("/dev/userfaultfd", os.O_RDWR, 0); err == nil {
		f.Close()
		info.Features.Live = true
	}
	return info, nil
}

// probeMiB is the memory of the guest that a binary is tried with.
const probeMiB = 16

// trySaving boots a guest of a few hundred bytes, saves it in the ways that we need, and restores it.
func (e *Engine) trySaving(ctx context.Context, a *abilities) (err error) {
	dir, err := e.trialDir()
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	kernel, err := memfdOf("probe-kernel", probeguest.Kernel())
	if err != nil {
		return err
	}
	defer kernel.Close()
	ram, err := memfdOf("probe", nil)
	if err != nil {
		return err
	}
	defer ram.Close()
	if err := ram.Truncate(probeMiB << 20); err != nil {
		return err
	}
	state, err := newState()
	if err != nil {
		return err
	}
	defer state.Close()
	a.save = SaveStateOnly
	trial := New(Options{Binary: e.opt.Binary, Jailer: e.opt.Jailer, Bare: true, Serial: true, Log: e.opt.Log})
	trial.probed, trial.cell = a, e.cell // what else could be wrong with its confinement is found out here
	if err := trial.tryParent(ctx, a, dir, kernel, ram, state); err != nil {
		return err
	}
	return trial.tryChild(ctx, dir, ram, state)
}

// trialDir makes a directory for trySaving. Its name has no symbolic links: that is how a process is known to be of it.
func (e *Engine) trialDir() (string, error) {
	if e.opt.Trials == "" {
		return os.MkdirTemp("", "forkd-probe-")
	}
	if err := os.MkdirAll(e.opt.Trials, 0o700); err != nil {
		return "", err
	}
	within, err := filepath.EvalSymlinks(e.opt.Trials)
	if err != nil {
		return "", err
	}
	return os.MkdirTemp(within, "probe")
}

// tryParent freezes the guest: its memory by the number of an inherited file, then its state once more without the memory.
func (e *Engine) tryParent(ctx context.Context, a *abilities, dir string, kernel, ram, state *os.File) error {
	m, err := e.boot(ctx, a, vmm.BootConfig{Dir: dir, Shape: vmm.Shape{MemMiB: probeMiB, VCPUs: 1}, Memory: ram, Kernel: kernel})
	if err != nil {
		return err
	}
	defer m.Kill()
	heard := m.Listen()
	if _, err := m.Write([]byte{probeguest.Echo}); err != nil {
		return err
	}
	if err := hear(ctx, m, heard, probeguest.Echo); err != nil {
		return fmt.Errorf("boot a test guest: %w", err)
	}
	if err := m.Pause(ctx); err != nil {
		return err
	}
	if err := m.SaveState(ctx, state); err != nil {
		return err
	}
	m.session.parent = false
	only, err := newState()
	if err != nil {
		return err
	}
	defer only.Close()
	if err := m.SaveState(ctx, only); err != nil {
		e.opt.Log.Info("Firecracker does not save a device state without the memory: pauses grow with what has changed", "why", err)
		a.save = SaveDiff
		return nil
	}
	return copyState(state, only)
}

// tryChild restores the guest, and sees whether it answers.
func (e *Engine) tryChild(ctx context.Context, dir string, ram, state *os.File) error {
	p, err := e.Prepare(ctx, vmm.PrepareConfig{Dir: dir, Shape: vmm.Shape{MemMiB: probeMiB, VCPUs: 1}, Memory: ram})
	if err != nil {
		return err
	}
	loaded, err := p.Load(ctx, state)
	if err != nil {
		return err
	}
	m := loaded.(*machine)
	defer m.Kill()
	if err := m.Resume(ctx); err != nil {
		return err
	}
	heard := m.Listen()
	if _, err := m.Write([]byte{probeguest.Echo}); err != nil {
		return err
	}
	if err := hear(ctx, m, heard, probeguest.Echo); err != nil {
		return fmt.Errorf("restore a test guest: %w", err)
	}
	return nil
}

// hearLimit is how long a test guest may take to answer.
const hearLimit = 10 * time.Second

// hear waits for a byte on the guest's serial port.
func hear(ctx context.Context, m *machine, heard <-chan []byte, want byte) error {
	ctx, cancel := context.WithTimeoutCause(ctx, hearLimit, fmt.Errorf("it did not answer within %v: %w", hearLimit, context.DeadlineExceeded))
	defer cancel()
	for {
		select {
		case b := <-heard:
			if bytes.IndexByte(b, want) >= 0 {
				return nil
			}
		case <-m.Done():
			return fmt.Errorf("it ended: %s", m.Exit().Detail)
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}
