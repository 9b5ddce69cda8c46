// Package firecracker runs machines in an unmodified Firecracker, from version 1.12 on, where KVM works.
//
// A parent boots with memory of Firecracker's own; freezing it writes that memory to the snapshot's memfd. A child maps that memfd private,
// under a number that it inherits, so that children share it page for page with those of other engines' kind. Paths that a device state
// keeps are relative to the machine's directory or numbers of inherited files: a state fits every child as it is. The guest's ports are on
// its vsock device. This package knows nothing of snapshots, agents or identity.
package firecracker

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/forkd/forkd/internal/confine"
	"github.com/forkd/forkd/internal/hostcpu"
	"github.com/forkd/forkd/internal/memory"
	"github.com/forkd/forkd/internal/vmm"
	"github.com/forkd/forkd/internal/vmm/probeguest"
	"github.com/forkd/forkd/internal/vmm/vmlinux"
	"github.com/forkd/forkd/internal/vmm/vmproc"
)

// DefaultBinary is looked up in PATH.
const DefaultBinary = "firecracker"

// Options configure an Engine. The zero value is useful.
type Options struct {
	Binary      string // path or name of Firecracker; default DefaultBinary
	CPUTemplate string // Firecracker's template for parents; empty: the guest sees the host's processor
	Bare        bool   // a KVM that can't run a stock kernel will do, and guests may have no root file system: for probe guests
	Serial      bool   // the guest's serial port can be written to: see Serial
	Save        SaveMode
	Users       *confine.Users // the user ids of monitors, which are confined; nil: they are not, and run as the daemon's user
	Jailer      string         // Firecracker's jailer, of the same version, to start each monitor through; needs Users. Empty: we confine it ourselves
	Trials      string         // where a directory is made for the guest that a binary is tried with; a daemon's next start ends what is left there. Empty: the one for temporary files
	TSCkHz      func() (uint64, error)
	KVM         func() error // what this host's KVM is worth; default probeguest.Check
	Log         *slog.Logger
}

// SaveMode says how the device state of a child is saved.
type SaveMode string

// Save modes, the best first. The default is the first one that the binary proved to have.
const (
	// SaveStateOnly makes Firecracker fail after it has written the state, and before it writes any memory.
	SaveStateOnly SaveMode = "state-only"
	// SaveDiff has it write, and throws away, what it knows to have changed. The pause grows with that.
	SaveDiff SaveMode = "diff"
	// SaveFull has it write all memory, and throws it away.
	SaveFull SaveMode = "full"
)

// Engine is the Firecracker engine.
type Engine struct {
	opt Options

	mu     sync.Mutex
	probed *abilities    // nil until probed
	cell   *confine.Cell // what monitors are confined to; nil: they are not
	shown  []string      // files that monitors see beside theirs, for tests

	kernelMu sync.Mutex
	kernel   unpackedKernel
}

var _ vmm.Engine = (*Engine)(nil)

// New returns an engine. Nothing is run before the first use.
func New(opt Options) *Engine {
	opt.Binary = cmp.Or(opt.Binary, DefaultBinary)
	if opt.Log == nil {
		opt.Log = slog.New(slog.DiscardHandler)
	}
	if opt.TSCkHz == nil {
		opt.TSCkHz = hostcpu.TSCkHz
	}
	if opt.KVM == nil {
		opt.KVM = probeguest.Check
	}
	return &Engine{opt: opt}
}

// Probe implements vmm.Engine. The first call runs a guest of a few hundred bytes, to find out what the binary can do.
func (e *Engine) Probe(ctx context.Context) (vmm.Info, error) {
	a, err := e.abilities(ctx)
	if err != nil {
		return vmm.Info{}, err
	}
	return a.info, nil
}

// Boot implements vmm.Engine.
func (e *Engine) Boot(ctx context.Context, cfg vmm.BootConfig) (vmm.Machine, error) {
	if err := e.checkBoot(cfg); err != nil {
		return nil, err
	}
	a, err := e.abilities(ctx)
	if err != nil {
		return nil, err
	}
	m, err := e.boot(ctx, a, cfg)
	if err != nil {
		return nil, fmt.Errorf("boot parent: %w", err)
	}
	return m, nil
}

func (e *Engine) boot(ctx context.Context, a *abilities, cfg vmm.BootConfig) (_ *machine, err error) {
	if err := context.Cause(ctx); err != nil {
		return nil, err
	}
	kernel, err := e.elf(cfg.Kernel)
	if err != nil {
		return nil, err
	}
	c := command{dir: cfg.Dir, rootfs: cfg.Rootfs, memory: cfg.Memory, abilities: a, cgroup: cfg.Cgroup}
	boot := bootSource{Kernel: fdPath(c.inherit(kernel)), Cmdline: cmdline(cfg.Cmdline)}
	if cfg.Initramfs != nil {
		boot.Initramfs = fdPath(c.inherit(cfg.Initramfs))
	}
	s, err := e.plugAndStart(ctx, &c, cfg.Shape, cfg.NIC)
	if err != nil {
		return nil, err
	}
	for _, c := range e.bootCalls(cfg, boot) {
		if err := s.do(ctx, c); err != nil {
			return nil, s.fail(err)
		}
	}
	s.memoryMiB = cfg.Shape.MemMiB
	s.parent = true
	s.running.set(true)
	return s.machine(), nil
}

// bootCalls configure a parent and start it.
func (e *Engine) bootCalls(cfg vmm.BootConfig, boot bootSource) []call {
	calls := []call{putMachine(cfg.Shape, e.opt.CPUTemplate, false), putBoot(boot), putVsock()}
	if cfg.Rootfs != nil { // probe guests have no drivers
		calls = append(calls, putRootfs(), putEntropy())
	}
	if cfg.Shape.Net {
		calls = append(calls, putNetwork())
	}
	return append(calls, startInstance())
}

// Prepare implements vmm.Engine. A Firecracker has no guest memory before a device state is loaded.
func (e *Engine) Prepare(ctx context.Context, cfg vmm.PrepareConfig) (vmm.Prepared, error) {
	if err := cfg.Shape.Check(leastMiB, cfg.Memory); err != nil {
		return nil, err
	}
	a, err := e.abilities(ctx)
	if err != nil {
		return nil, err
	}
	c := command{dir: cfg.Dir, rootfs: cfg.Rootfs, memory: cfg.Memory, abilities: a, cgroup: cfg.Cgroup}
	if cfg.UFFD != nil {
		c.uffd = c.inherit(cfg.UFFD)
	}
	for _, l := range cfg.Layers {
		c.layers = append(c.layers, c.inherit(l))
	}
	s, err := e.plugAndStart(ctx, &c, cfg.Shape, cfg.NIC)
	if err != nil {
		return nil, fmt.Errorf("prepare child: %w", err)
	}
	s.memoryMiB = cfg.Shape.MemMiB
	return &prepared{session: s}, nil
}

// Attach implements vmm.Engine.
func (e *Engine) Attach(ctx context.Context, id vmm.Process) (_ vmm.Machine, err error) {
	p, err := vmproc.Adopt("Firecracker", id, e.opt.Users)
	if err != nil {
		return nil, err
	}
	if id.IdleThread != apiThread {
		return nil, fmt.Errorf("process %d is the machine of another engine: start the daemon with the --engine that it was started with: %w", id.PID, vmm.ErrUnavailable)
	}
	s := &session{process: p, api: &api{dir: id.Dir}, log: e.opt.Log}
	defer func() {
		if err != nil {
			s.letGo()
			err = fmt.Errorf("attach to Firecracker %d: %w", id.PID, err)
		}
	}()
	if s.abilities, err = e.abilities(ctx); err != nil {
		return nil, err
	}
	if s.state, err = openMemfd(fmt.Sprintf("/proc/%d/fd/%d", id.PID, fdState), stateName); err != nil {
		return nil, fmt.Errorf("its state file: %w", err)
	}
	if err := s.findScratch(id.PID); err != nil {
		return nil, err
	}
	var info instanceInfo
	if err := s.do(ctx, getInstance(&info)); err != nil {
		return nil, err
	}
	if info.State == stateNone {
		return nil, fmt.Errorf("it holds no guest: %w", vmm.ErrGone)
	}
	if fi, err := os.Stat(fmt.Sprintf("/proc/%d/fd/%d", id.PID, fdMemory)); err == nil {
		s.memoryMiB = int(fi.Size() >> 20)
	}
	if s.console, err = reopenConsole(id.Dir, id.PID, s.endHalted); err != nil {
		return nil, err
	}
	s.running.set(info.State != statePaused)
	m := s.machine()
	m.untold = info.State == statePaused
	return m, nil
}

// command is what a Firecracker is started with.
type command struct {
	dir            string
	rootfs, memory *os.File
	abilities      *abilities
	cgroup         *vmm.Cgroup
	nic            *vmm.NIC   // nil: it has no network device
	more           []*os.File // from fdFree on
	uffd           int
	layers         []int
}

// inherit gives Firecracker a descriptor and returns the number it has over there.
func (c *command) inherit(f *os.File) int {
	c.more = append(c.more, f)
	return fdFree + len(c.more) - 1
}

// plugAndStart is start for a machine of that shape.
func (e *Engine) plugAndStart(ctx context.Context, c *command, shape vmm.Shape, nic *vmm.NIC) (*session, error) {
	if shape.Net {
		var done func()
		var err error
		if c.nic, done, err = plug(nic); err != nil {
			return nil, err
		}
		defer done()
	}
	return e.start(ctx, c)
}

// start runs a Firecracker and waits for its API. On an error nothing is left.
func (e *Engine) start(ctx context.Context, c *command) (*session, error) {
	s := &session{api: &api{dir: c.dir}, abilities: c.abilities, log: e.opt.Log, jailed: e.opt.Jailer != ""}
	err := e.spawn(s, c)
	if err == nil {
		err = s.process.Record()
	}
	if err == nil {
		err = s.awaitAPI(ctx)
	}
	if err != nil {
		return nil, s.fail(err)
	}
	return s, nil
}

func (e *Engine) spawn(s *session, c *command) (err error) {
	if s.state, err = newState(); err != nil {
		return err
	}
	if err := s.addScratch(c); err != nil {
		return err
	}
	output, inherited, stdout, err := consolePipe()
	if err != nil {
		return err
	}
	defer inherited.Close()
	defer stdout.Close()
	rootfs := c.rootfs
	if rootfs == nil { // its number must be taken
		if rootfs, err = os.Open(os.DevNull); err != nil {
			return errors.Join(err, output.Close())
		}
		defer rootfs.Close()
	}
	start := vmproc.Command{Name: "Firecracker", Binary: e.opt.Binary, Dir: c.dir, Args: e.arguments(), Stdout: stdout, Cell: e.cell, Cgroup: c.cgroup, WorkDir: true, Files: append([]*os.File{rootfs, s.state, c.memory}, c.more...)}
	if c.nic != nil {
		start.NetNS, start.Tap = c.nic.NetNS, c.nic.Tap
	}
	if e.opt.Serial {
		if start.Stdin, s.input, err = os.Pipe(); err != nil {
			return errors.Join(err, output.Close())
		}
		defer start.Stdin.Close()
	}
	start.Files = append(start.Files, inherited) // the console goes on when we die
	if s.process, err = vmproc.Start(start); err != nil {
		return errors.Join(err, output.Close())
	}
	s.process.ID.UFFDDev, s.process.ID.LayerFDs, s.process.ID.IdleThread = c.uffd, c.layers, apiThread
	s.console = newConsole(c.dir, output, s.endHalted)
	return nil
}

// stateName is the name of the memfd that device states go through.
const stateName = "state"

func newState() (*os.File, error) {
	f, err := memfdOf(stateName, nil)
	if err != nil {
		return nil, fmt.Errorf("state file: %w", err)
	}
	return f, nil
}

// openMemfd opens a memfd of a monitor, of which we write to: one that a guest has taken over may have put anything in its place, such as an image
// that others use, which it may only read.
func openMemfd(path, name string) (*os.File, error) {
	f, err := os.OpenFile(path, os.O_RDWR|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil, err
	}
	target, err := os.Readlink(fdPath(int(f.Fd())))
	if err == nil && !strings.HasPrefix(target, "/memfd:forkd-"+name) {
		err = fmt.Errorf("it is %q: %w", target, vmm.ErrGone)
	}
	if err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return f, nil
}

// unpackedKernel is the kernel that was booted last, as an ELF file.
type unpackedKernel struct {
	of   unix.Stat_t
	file *os.File
}

// elf unpacks a kernel. The last one is kept: it takes a tenth of a second, and parents are mostly made of one image.
func (e *Engine) elf(kernel *os.File) (*os.File, error) {
	var st unix.Stat_t
	if err := unix.Fstat(int(kernel.Fd()), &st); err != nil {
		return nil, fmt.Errorf("kernel: %w", err)
	}
	e.kernelMu.Lock()
	defer e.kernelMu.Unlock()
	if k := e.kernel; k.file != nil && k.of.Dev == st.Dev && k.of.Ino == st.Ino && k.of.Size == st.Size && k.of.Mtim == st.Mtim {
		return k.file, nil
	}
	image, err := io.ReadAll(io.NewSectionReader(kernel, 0, st.Size))
	if err != nil {
		return nil, fmt.Errorf("kernel: %w", err)
	}
	elf, err := vmlinux.Extract(image)
	if err != nil {
		return nil, fmt.Errorf("kernel %s: %w: %w", kernel.Name(), err, vmm.ErrInvalidConfig)
	}
	f, err := memory.SealedCopy("kernel", elf) // all parents inherit it: none may change it
	if err != nil {
		return nil, err
	}
	// The one before may be about to be inherited by a start that is under way: it is closed by the collector.
	e.kernel = unpackedKernel{of: st, file: f}
	return f, nil
}

func memfdOf(name string, data []byte) (*os.File, error) {
	fd, err := unix.MemfdCreate("forkd-"+name, unix.MFD_CLOEXEC)
	if err != nil {
		return nil, err
	}
	f := os.NewFile(uintptr(fd), "memfd:forkd-"+name)
	if _, err := f.WriteAt(data, 0); err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return f, nil
}

// cmdline is the parent's kernel command line.
func cmdline(extra []string) string {
	words := []string{"console=ttyS0", "quiet", "reboot=k", "panic=-1", "pci=off", "mitigations=off", "psi=0", "nowatchdog", "audit=0",
		"apparmor=0", "init_on_alloc=0", "cgroup_disable=memory", "i8042.noaux", "i8042.nomux", "i8042.dumbkbd", "8250.nr_uarts=1"}
	return strings.Join(append(words, extra...), " ")
}

func (e *Engine) checkBoot(cfg vmm.BootConfig) error {
	if err := cfg.Shape.Check(leastMiB, cfg.Memory); err != nil {
		return err
	}
	if cfg.Kernel == nil || !e.opt.Bare && (cfg.Initramfs == nil || cfg.Rootfs == nil) {
		return fmt.Errorf("a parent needs a kernel, an initramfs and a root file system: %w", vmm.ErrInvalidConfig)
	}
	return nil
}

// leastMiB is for guests without an operating system.
const leastMiB = 16

// saveLimit is how long it may take to write so much memory.
func saveLimit(mib int) time.Duration {
	const rate = 16 // MiB a second on the slowest host: one that is emulated, and busy with other things
	return callLimit + time.Duration(mib/rate)*time.Second
}
