// Package enginebench measures an engine itself, without daemon, kernel or agent: machines that are a probe guest of a few hundred bytes
// (internal/vmm/probeguest), from the start of the monitor to the guest's own answer. It runs on hosts whose KVM can't run a stock kernel.
// What users get is measured by package bench.
package enginebench

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/forkd/forkd/internal/confine"
	"github.com/forkd/forkd/internal/memory"
	"github.com/forkd/forkd/internal/vmm"
	"github.com/forkd/forkd/internal/vmm/firecracker"
	"github.com/forkd/forkd/internal/vmm/probeguest"
)

// Options say what to measure.
type Options struct {
	Binary   string // Firecracker; empty: the one in PATH
	Confined bool   // each monitor, as a daemon that is root does
	Jailer   string // Firecracker's, to start each through; empty: none
	Branches int    // of each size of memory
	Only     string // "start", "branch" or "share"; empty: everything
	Progress func(format string, args ...any)
}

// Report is the outcome, as `forkd bench engine --json` prints it.
type Report struct {
	Engine   string   `json:"engine"`
	Version  string   `json:"version"`
	CPU      string   `json:"cpu"`
	CPUs     int      `json:"cpus"`
	Confined string   `json:"confined"` // how monitors were: "no", "by forkd", "by its jailer"
	Starts   []Start  `json:"starts,omitempty"`
	Branches []Branch `json:"branches,omitempty"`
	Share    *Share   `json:"share,omitempty"`
}

// Start is a number of forks that were asked for at once.
type Start struct {
	From      string  `json:"from"` // "cold" or "pool"
	N         int     `json:"n"`
	Rounds    int     `json:"rounds"` // how often; the times are over all
	Parallel  int     `json:"parallel"`
	MemMiB    int     `json:"mem_mib"`
	P50MS     float64 `json:"p50_ms"` // from the fork's own start to its guest's answer
	P90MS     float64 `json:"p90_ms"`
	MaxMS     float64 `json:"max_ms"`
	AllP50MS  float64 `json:"all_p50_ms"` // from the first start to the last answer of a round
	AllMaxMS  float64 `json:"all_max_ms"`
	LoadP50MS float64 `json:"load_p50_ms,omitempty"` // of that: until the device state was loaded
}

// Branch is a number of branches of one running guest that rewrites its pages without rest.
type Branch struct {
	MemMiB      int     `json:"mem_mib"`   // all resident
	DirtyMiB    int     `json:"dirty_mib"` // what the guest rewrites
	Branches    int     `json:"branches"`
	PauseP50MS  float64 `json:"pause_p50_ms"` // from the call that stops the guest to the answer to the one that lets it go on
	PauseP90MS  float64 `json:"pause_p90_ms"`
	PauseMaxMS  float64 `json:"pause_max_ms"`
	StillP50MS  float64 `json:"still_p50_ms"` // for how long the guest itself saw its work stand still at most, whoever had its processor
	StillP90MS  float64 `json:"still_p90_ms"`
	StillMaxMS  float64 `json:"still_max_ms"`
	StopP50MS   float64 `json:"stop_p50_ms"` // of the pause: stop and save the state
	HoldP50MS   float64 `json:"hold_p50_ms"`
	ResumeP50MS float64 `json:"resume_p50_ms"`
	AheadP50MS  float64 `json:"ahead_p50_ms"`
	AfterP50MS  float64 `json:"after_p50_ms"`
	Torn        int     `json:"torn"`         // branches with a page of another instant
	TornPages   uint64  `json:"torn_pages"`   //
	Control     int     `json:"control"`      // branches that were captured without protection
	ControlTorn int     `json:"control_torn"` // of these
}

// Share is what children of one snapshot cost together.
type Share struct {
	MemMiB         int     `json:"mem_mib"`
	Children       int     `json:"children"`
	TouchedMiB     int     `json:"touched_mib"`        // by each
	AnonMiB        float64 `json:"anon_mib"`           // guests' own pages, of all
	ChildAnonMiB   float64 `json:"child_anon_mib"`     // the median
	ChildPSSMiB    float64 `json:"child_pss_mib"`      // with its part of the image and its monitor; the median
	OverImageMiB   float64 `json:"over_image_mib"`     // everything but the image, of all
	PerChildMiB    float64 `json:"per_child_mib"`      // of that, a child's part
	AvailableUsedM float64 `json:"available_used_mib"` // by which the host's available memory fell
}

// rig is a Firecracker engine and a directory for its machines.
type rig struct {
	engine *firecracker.Engine
	dir    string
	uffd   *os.File // nil: this host has none
	tscKHz uint64   // of the guests' time stamp counters
	say    func(format string, args ...any)
	count  atomic.Int64 // of machines, for their directories
}

// runDir is where directories of machines are made: in memory, as a daemon's run directory is. "" is the system's for temporary files.
func runDir() string {
	for _, dir := range []string{"/run", "/dev/shm"} {
		var st unix.Statfs_t
		if unix.Statfs(dir, &st) == nil && st.Type == unix.TMPFS_MAGIC && unix.Access(dir, unix.W_OK) == nil {
			return dir
		}
	}
	return ""
}

// Run measures.
func Run(ctx context.Context, opt Options) (_ Report, err error) {
	dir, err := os.MkdirTemp(runDir(), "forkd-bench-")
	if err != nil {
		return Report{}, err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	r := &rig{dir: dir, say: opt.Progress}
	var confined string
	r.engine, confined = newEngine(opt)
	info, err := r.engine.Probe(ctx)
	if err != nil {
		return Report{}, err
	}
	r.tscKHz = info.TSCkHz
	if f, err := memory.OpenUFFD(); err == nil {
		r.uffd = f
		defer f.Close()
	}
	report := Report{Engine: info.Engine, Version: info.Version, CPU: info.CPU, CPUs: cpus(), Confined: confined}
	for _, part := range []struct {
		name string
		run  func(context.Context, Options, *Report) error
	}{{"start", r.starts}, {"branch", r.branches}, {"share", r.share}} {
		if opt.Only != "" && opt.Only != part.name {
			continue
		}
		if err := part.run(ctx, opt, &report); err != nil {
			return report, fmt.Errorf("%s: %w", part.name, err)
		}
	}
	return report, nil
}

// newEngine is the engine to measure, and how it confines monitors.
func newEngine(opt Options) (*firecracker.Engine, string) {
	confined := "no"
	options := firecracker.Options{Binary: opt.Binary, Bare: true, Serial: true, Jailer: opt.Jailer}
	if opt.Confined || opt.Jailer != "" {
		options.Users, confined = confine.NewUsers(confine.RangeFor("bench")), "by forkd"
	}
	if opt.Jailer != "" {
		confined = "by its jailer"
	}
	return firecracker.New(options), confined
}

// frozen is a probe guest that waits for a command.
type frozen struct {
	shape vmm.Shape
	image *memory.Image
	state *os.File
}

func (f *frozen) close() {
	_ = f.image.Close()
	_ = f.state.Close()
}

// pages is how many pages a guest of that memory can be told to work on.
func pages(mib int) uint32 { return uint32(mib)<<8 - probeguest.FirstPage }

// freeze boots a guest, has it touch all its memory, and freezes it.
func (r *rig) freeze(ctx context.Context, mib int) (_ *frozen, err error) {
	f := &frozen{shape: vmm.Shape{MemMiB: mib, VCPUs: 1}}
	ram, err := memory.New("bench", int64(mib)<<20)
	if err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			_ = ram.Close()
		}
	}()
	kernel, err := memory.SealedCopy("probe-kernel", probeguest.Kernel())
	if err != nil {
		return nil, err
	}
	defer kernel.Close()
	m, err := r.engine.Boot(ctx, vmm.BootConfig{Dir: r.newDir(), Shape: f.shape, Memory: ram, Kernel: kernel})
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, m.Kill()) }()
	if err := ask(ctx, m, probeguest.Command(probeguest.Touch, pages(mib)), probeguest.Touch); err != nil {
		return nil, err
	}
	if f.state, err = memory.New("bench-state", memory.PageSize); err != nil {
		return nil, err
	}
	if err := errors.Join(m.Pause(ctx), m.SaveState(ctx, f.state), m.Kill(), memory.Seal(ram)); err != nil {
		return nil, err
	}
	f.image, err = memory.NewImage(ram)
	return f, err
}

func (r *rig) newDir() string {
	dir := filepath.Join(r.dir, fmt.Sprint(r.count.Add(1)))
	_ = os.Mkdir(dir, 0o700) // the start of a monitor in it fails if this did
	return dir
}

// child restores a guest, paused.
func (r *rig) child(ctx context.Context, shape vmm.Shape, img *memory.Image, state *os.File) (vmm.Machine, error) {
	cfg := vmm.PrepareConfig{Dir: r.newDir(), Shape: shape, Memory: img.Base(), UFFD: r.uffd}
	for _, l := range img.Layers() {
		cfg.Layers = append(cfg.Layers, l.File)
	}
	p, err := r.engine.Prepare(ctx, cfg)
	if err != nil {
		return nil, err
	}
	m, err := p.Load(ctx, state)
	if err != nil {
		return nil, err
	}
	if err := memory.Overlay(ctx, m.Process(), img, nil); err != nil {
		return nil, errors.Join(err, m.Kill())
	}
	return m, nil
}

// answerLimit is how long a guest may take to answer.
const answerLimit = 60 * time.Second

// hear writes to a guest's serial port and reads until enough has come.
func hear(ctx context.Context, m vmm.Machine, what []byte, enough func(heard []byte) bool) ([]byte, error) {
	return hearAfter(ctx, m, what, func() error { return nil }, enough)
}

// hearAfter does something between writing and reading.
func hearAfter(ctx context.Context, m vmm.Machine, what []byte, do func() error, enough func(heard []byte) bool) ([]byte, error) {
	serial := m.(firecracker.Serial)
	heard := serial.Listen()
	if _, err := serial.Write(what); err != nil {
		return nil, err
	}
	if err := do(); err != nil {
		return nil, err
	}
	limit := time.NewTimer(answerLimit)
	defer limit.Stop()
	var all []byte
	for !enough(all) {
		select {
		case b := <-heard:
			all = append(all, b...)
		case <-m.Done():
			return nil, fmt.Errorf("guest ended: %s", m.Exit().Detail)
		case <-limit.C:
			return nil, fmt.Errorf("guest says %q within %v, when told %q", all, answerLimit, what)
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		}
	}
	return all, nil
}

// run resumes a guest that has been told something before it runs, as sandboxes are, and waits for its answer.
func run(ctx context.Context, m vmm.Machine, what byte) error {
	_, err := hearAfter(ctx, m, []byte{what}, func() error { return m.Resume(ctx) }, func(heard []byte) bool { return bytes.IndexByte(heard, what) >= 0 })
	return err
}

// ask waits for an answer of one byte.
func ask(ctx context.Context, m vmm.Machine, what []byte, want byte) error {
	_, err := hear(ctx, m, what, func(heard []byte) bool { return bytes.IndexByte(heard, want) >= 0 })
	return err
}

// status asks a working guest for the torn pages that it has found, and its round.
func status(ctx context.Context, m vmm.Machine) (torn, round uint32, err error) {
	b, err := hear(ctx, m, []byte{probeguest.Status}, func(heard []byte) bool { return len(heard) >= 9 })
	if err != nil {
		return 0, 0, err
	}
	return binary.LittleEndian.Uint32(b[1:]), binary.LittleEndian.Uint32(b[5:]), nil
}
