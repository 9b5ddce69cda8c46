// Package vmm is the contract between forkd and a virtual machine monitor (an engine).
//
// An engine does five things: it boots a parent machine from an image, it prepares a monitor process over the memory of a
// snapshot, it loads a device state into such a monitor, it attaches again to a monitor that outlived the daemon, and it says what
// it can do on this host. Everything about guest memory (resident images, layers, changed pages, write-protect windows) is above
// the engines, in internal/memory: an engine only reports which process maps the memory.
//
// # Lifecycle of a snapshot
//
//	ram := memory.New(...)                       // an unsealed memfd
//	m, _ := engine.Boot(ctx, BootConfig{Memory: ram, ...})
//	... wait for the agent, warm up ...
//	m.Pause(ctx); m.SaveState(ctx, state); m.Kill() // never resumed: it would write into the snapshot
//	memory.Seal(ram)
//
// # Lifecycle of a child
//
//	p, _ := engine.Prepare(ctx, PrepareConfig{Memory: ram, ...}) // a monitor that maps ram MAP_PRIVATE and runs nothing
//	... internal/memory may map layers over the base here ...
//	m, _ := p.Load(ctx, state)                   // a paused machine
//	... the first request may be written to Dial's connection here ...
//	m.Resume(ctx)
//
// A daemon that starts again calls Attach with the Process it persisted.
//
// This package holds plain types and imports no engine. Package vmmtest has the conformance suite that every engine passes.
package vmm

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
)

// Guest ports. With QEMU each is a virtio-serial port ("forkd.<port>"), with Firecracker a vsock port.
const (
	PortControl uint32 = 1024 // the agent's control channel (internal/guest/agentproto)
	PortData    uint32 = 1025 // HTTP data plane: its place is kept, nothing listens yet
)

// Errors that callers tell apart with errors.Is. Engines wrap them with what happened.
var (
	ErrGone          = errors.New("machine is gone")            // the monitor process has ended
	ErrUnavailable   = errors.New("engine is not available")    // this host can't run the engine
	ErrIncompatible  = errors.New("snapshot is not compatible") // this engine on this host can't restore that state
	ErrInvalidConfig = errors.New("invalid machine configuration")
)

// Engine boots parents and restores children.
type Engine interface {
	// Probe reports what the engine is and can do on this host. It runs no guest, and answers from a cache after the first call.
	// It wraps ErrUnavailable when the engine can't be used and says what to do.
	Probe(ctx context.Context) (Info, error)
	// Boot starts a parent whose RAM is cfg.Memory, or will be there after SaveState. It returns when the machine runs, before the guest is up.
	Boot(ctx context.Context, cfg BootConfig) (Machine, error)
	// Prepare starts a monitor over cfg.Memory, mapped private. No guest code runs until the returned monitor was loaded and resumed.
	Prepare(ctx context.Context, cfg PrepareConfig) (Prepared, error)
	// Attach takes over a monitor that an earlier process of ours started. It wraps ErrGone when that very process
	// (pid and start time) no longer lives.
	Attach(ctx context.Context, p Process) (Machine, error)
}

// Prepared is a monitor that was started ahead and holds no device state yet.
type Prepared interface {
	// Process identifies the monitor, for mapping layers and for persisting before Load.
	Process() Process
	// Load reads a device state (from its current offset zero) and returns the machine, paused. On an error the monitor is killed.
	// The Prepared must not be used afterwards.
	Load(ctx context.Context, state *os.File) (Machine, error)
	// Kill ends the monitor and removes what it left in its directory. It is safe to call twice.
	Kill() error
}

// Machine is a monitor that holds a guest, running or paused.
type Machine interface {
	// Pause stops the vCPUs; it returns when no vCPU runs. Pausing a paused machine is not an error.
	Pause(ctx context.Context) error
	// Resume lets the vCPUs run. Resuming a running machine is not an error.
	Resume(ctx context.Context) error
	// SaveState writes the device state, without memory, to w at offset zero. It also sees to it that BootConfig.Memory holds a parent's
	// memory.
	// Preconditions: the machine is paused.
	SaveState(ctx context.Context, w *os.File) error
	// Dial connects to a guest port. With QEMU a port carries one connection at a time: a second one waits for the first to close.
	// Bytes may be written before the guest runs; they are delivered when it does.
	Dial(ctx context.Context, port uint32) (net.Conn, error)
	// Process identifies the monitor.
	Process() Process
	// Done is closed when the monitor has ended or its guest has shut down; Exit then says which.
	Done() <-chan struct{}
	// Exit says why the machine ended. Preconditions: Done is closed.
	Exit() Exit
	// Kill ends the monitor, waits until it is gone and removes what it left in its directory. It is safe to call twice.
	Kill() error
}

// Console is implemented by machines that keep the guest's console.
type Console interface {
	// Console returns the newest bytes the guest wrote to its console since it was booted or loaded, at most ConsoleLimit.
	Console(ctx context.Context) ([]byte, error)
}

// ConsoleLimit is how many bytes of a guest's console are kept.
const ConsoleLimit = 64 << 10

// FileReceiver is implemented by monitors that can be handed an open file while they run.
type FileReceiver interface {
	// SendFile gives f to the monitor and returns the number under which it holds it.
	SendFile(ctx context.Context, f *os.File) (int, error)
}

// Exit is the end of a machine.
type Exit struct {
	Reason ExitReason
	Detail string // for people: signal, exit status, what the guest asked for
}

// ExitReason classifies the end of a machine.
type ExitReason string

// Exit reasons.
const (
	ExitKilled   ExitReason = "killed"   // by Kill
	ExitShutdown ExitReason = "shutdown" // the guest powered off or rebooted
	ExitPanicked ExitReason = "panicked" // the guest's kernel panicked: see PanicIn; Detail is what it died of
	ExitCrashed  ExitReason = "crashed"  // the monitor ended by itself or by a signal that was not ours
)

// ProcessFile is where an engine leaves a machine's Process, in the machine's directory and as soon as it can.
const ProcessFile = "process.json"

// Process identifies a monitor across restarts of the daemon. It is persisted as JSON.
type Process struct {
	PID        int    `json:"pid"`
	StartTicks uint64 `json:"start_ticks"` // field 22 of /proc/PID/stat: with PID, one process for all time since boot
	Dir        string `json:"dir"`         // the machine's run directory (sockets, logs)
	IdleThread string `json:"idle_thread"` // name of a thread that may be stopped for an injected system call, once there is guest memory; empty: the main thread
	UFFDDev    int    `json:"uffd_dev"`    // the number under which the monitor holds /dev/userfaultfd; 0: it holds none
	LayerFDs   []int  `json:"layer_fds"`   // the numbers under which the monitor holds PrepareConfig.Layers, in order

	Confinement string `json:"confinement,omitempty"` // a confine.Level; empty: not known, an older daemon started it
}

// Shape is the hardware of a machine. A child must have the shape of its snapshot.
type Shape struct {
	MemMiB int  `json:"mem_mib"`
	VCPUs  int  `json:"vcpus"`
	Net    bool `json:"net,omitempty"` // has a network device, with the address GuestMAC
}

// GuestMAC is the address of every machine's network device, which a snapshot has in its memory: each machine is in a network of its own.
const GuestMAC = "02:f0:4b:d0:00:02"

// TapName is the name of every machine's tap, which is the only one in its namespace: monitors that open taps by name keep it in device states.
const TapName = "tap0"

// NIC is what a machine's network device is plugged into.
type NIC struct {
	Tap   *os.File // an open tap, TapName, which the monitor inherits, or opens by its name: the engine hands it over then, which closes it
	NetNS *os.File // the network namespace that the monitor runs in
}

// Check refuses what monitors would refuse less legibly, and memory that is not what the shape says: a machine over a shorter file would die
// when it reads behind its end. Its errors wrap ErrInvalidConfig.
func (s Shape) Check(leastMiB int, memory *os.File) error {
	switch {
	case s.MemMiB < leastMiB || s.MemMiB > 64<<10:
		return fmt.Errorf("memory of %d MiB: choose %d to 65536: %w", s.MemMiB, leastMiB, ErrInvalidConfig)
	case s.VCPUs < 1 || s.VCPUs > 32:
		return fmt.Errorf("%d vCPUs: choose 1 to 32: %w", s.VCPUs, ErrInvalidConfig)
	}
	fi, err := memory.Stat()
	if err != nil {
		return fmt.Errorf("guest memory: %w", err)
	}
	if want := int64(s.MemMiB) << 20; fi.Size() != want {
		return fmt.Errorf("guest memory holds %d bytes, the machine needs %d: %w", fi.Size(), want, ErrInvalidConfig)
	}
	return nil
}

// BootConfig describes a parent.
type BootConfig struct {
	Dir       string // run directory: exists, empty, ours alone
	Shape     Shape
	Memory    *os.File // guest RAM: a memfd of Shape.MemMiB MiB, mapped shared; or where RAM of the engine's own goes with SaveState
	Kernel    *os.File // bzImage
	Initramfs *os.File
	Rootfs    *os.File // read-only root file system image
	Cmdline   []string // words appended to the engine's own kernel command line
	Cgroup    *Cgroup  // where the monitor is started; nil: where the daemon is
	NIC       *NIC     // nil: a network device, if Shape has one, is not plugged in
}

// PrepareConfig describes a child before its device state is loaded.
type PrepareConfig struct {
	Dir    string
	Shape  Shape
	Memory *os.File   // sealed memfd, mapped private
	Layers []*os.File // inherited too, so that internal/memory can map their extents: Prepared.Process().LayerFDs gives their numbers
	Rootfs *os.File
	UFFD   *os.File // an open /dev/userfaultfd to inherit, or nil
	NIC    *NIC     // as for a parent
	Cgroup *Cgroup  // where the monitor is started; nil: where the daemon is
}

// Cgroup is the control group that a monitor is started in, so that nothing it takes goes uncounted: a directory that it is cloned into, or the
// "tasks" files of hierarchies of version 1, which the thread that starts it enters first.
type Cgroup struct {
	Dir   *os.File
	Tasks []*os.File
}

// Info is what an engine is on this host. A snapshot's manifest keeps the one it was made with; every field but Features and
// CPUFeatures must match for a restore.
type Info struct {
	Engine   string   `json:"engine"`  // "qemu", "firecracker"
	Version  string   `json:"version"` // of the monitor
	Accel    string   `json:"accel"`   // "tcg" or "kvm"
	Machine  string   `json:"machine"` // machine type
	CPU      string   `json:"cpu"`     // CPU model the guest sees
	TSCkHz   uint64   `json:"tsc_khz"` // rate of the guest's time stamp counter
	Binary   string   `json:"binary"`  // path, for people
	Features Features `json:"-"`

	// What of the host's processor the guest may have seen; empty where it can't have seen any. CPUFeatures are in order, with spaces between
	// them: a host that a snapshot is restored on may have more.
	CPUVendor   string `json:"cpu_vendor,omitempty"`
	CPUFamily   string `json:"cpu_family,omitempty"`
	CPUFeatures string `json:"cpu_features,omitempty"`
}

// Features are optional powers.
type Features struct {
	Console bool // machines implement Console
	Files   bool // Prepared monitors and machines implement FileReceiver
	Layers  bool // layers may be mapped over a monitor's memory: over a Prepared one's, unless LayersLoaded
	Live    bool // the monitor's memory can be write-protected from outside (live branch)
	Net     bool // machines may have a network device

	// LayersLoaded: a Prepared monitor has no guest memory yet. Layers are mapped over the machine that Load returns, before it runs.
	LayersLoaded bool
}
