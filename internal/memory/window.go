package memory

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	"github.com/forkd/forkd/internal/failpoint"
	"github.com/forkd/forkd/internal/vmm"
)

// Target is a running child whose memory is to be captured.
type Target struct {
	Process vmm.Process
	Image   *Image // what its memory was when it started: the layer will be the difference to this
	UFFD    *UFFD  // adopted before, and kept; nil: adopted for this capture and given back after it
}

// Hooks stop the guest at the instant that is captured. They are called from the goroutine that called Capture, in order, once
// each.
type Hooks struct {
	// Pause stops all vCPUs and saves whatever else belongs to that instant (the device state). When it returns, nothing may
	// write to guest memory until Resume is called: no vCPU, no device, no request to the guest's agent that the monitor would
	// deliver.
	Pause func(context.Context) error
	// Resume lets the vCPUs run. It is called on every path once Pause was, also when Pause failed or ctx is done (it gets a
	// context of its own), and a second time when it fails.
	Resume func(context.Context) error
}

// Mode says how a capture makes one instant of a memory that goes on changing.
type Mode string

// Modes. Each yields the same layer; they differ in the pause.
const (
	// ModeLive protects the memory ahead and captures it after the pause, each page before it is written: the pause does not
	// grow with anything. It needs a userfaultfd of the monitor.
	ModeLive Mode = "live"
	// ModeDiff copies the changed pages while the guest runs, and again in the pause: all of them, or where the kernel keeps
	// soft-dirty bits those written since.
	ModeDiff Mode = "diff"
	// ModeStop copies the changed pages in the pause and does nothing before: for a guest that will not go on anyway.
	ModeStop Mode = "stop"
)

// CaptureOptions configure a capture. The zero value is useful.
type CaptureOptions struct {
	// Mode: when empty, ModeLive, or ModeDiff with a warning where the host or the monitor can't do that. A mode that is asked
	// for and can't be had is an error.
	Mode Mode
	Name string // of the layer's memfd; default "layer"
	// Deadline bounds the whole capture; default from the size of memory. When it ends the guest is let go and the capture has
	// failed.
	Deadline time.Duration
	// FillGaps adds unchanged pages to the layer where that saves mappings (see FillGaps).
	FillGaps   bool
	Failpoints *failpoint.Set

	// Unprotected is a control for tests and measurements: a live capture that protects nothing, and so is torn.
	Unprotected bool
}

// Captured is one instant of a guest's memory.
type Captured struct {
	Layer   Layer // sealed; the pages that differ from the target's image
	Mode    Mode
	Warning string // why the mode is not the best one; empty if it is
	Times   CaptureTimes
	Pages   uint64 // in the layer
	Noted   uint64 // written between arming and the pause, live mode
	Faults  uint64 // write-protect faults served
}

// CaptureTimes are what a capture spent where.
type CaptureTimes struct {
	Ahead  time.Duration // adopting and arming, or copying ahead: the guest ran
	Pause  time.Duration // from calling Pause to Resume's return
	Stop   time.Duration // of Pause: the hook
	Hold   time.Duration // of Pause: protecting the noted pages, or copying
	Resume time.Duration // of Pause: the hook
	After  time.Duration // from Resume's return to the layer
}

// Names of the failpoints of a capture, in the order they are hit.
const (
	PointAdopted = "memory.capture.adopted" // live only: the userfaultfd is ours
	PointArming  = "memory.capture.arming"  // live only: at every step of protecting
	PointAhead   = "memory.capture.ahead"   // armed, or copied ahead
	PointPaused  = "memory.capture.paused"  // after the Pause hook
	PointHeld    = "memory.capture.held"    // protected or copied, before the Resume hook
	PointResumed = "memory.capture.resumed" // after the Resume hook
	PointSweep   = "memory.capture.sweep"   // live only: before every 64 pages
	PointDone    = "memory.capture.done"    // all captured, before the layer is sealed
)

// Points are the names of all failpoints of a capture.
func Points() []string {
	return []string{PointAdopted, PointArming, PointAhead, PointPaused, PointHeld, PointResumed, PointSweep, PointDone}
}

// ErrNotResumed says that the guest of a failed or succeeded capture may still be stopped.
var ErrNotResumed = errors.New("guest was not resumed")

// errDeadline is the cause of a capture that took too long.
var errDeadline = errors.New("capture took longer than its deadline")

const (
	minDeadline = 10 * time.Second
	minRate     = 64 << 20 // bytes a second that a capture reaches on the slowest host
	resumeTime  = 10 * time.Second
)

// Capture takes the memory of a running child as it is at one instant, as a layer over the child's image, while the child goes
// on. Whatever happens, on return the guest has been resumed (or the error wraps ErrNotResumed), nothing of it is protected or
// held up any more, and the caller owns the layer's file, if there is one. It wraps vmm.ErrGone when the child has ended.
func Capture(ctx context.Context, t Target, h Hooks, opt CaptureOptions) (*Captured, error) {
	p, err := openProcess(t.Process)
	if err != nil {
		return nil, fmt.Errorf("capture: %w", err)
	}
	defer p.close()
	guest, err := readGuestMap(p, t.Image)
	if err != nil {
		return nil, fmt.Errorf("capture: %w", err)
	}
	deadline := opt.Deadline
	if deadline == 0 {
		deadline = minDeadline + time.Duration(t.Image.Bytes()/minRate)*time.Second
	}
	ctx, cancel := context.WithTimeoutCause(ctx, deadline, errDeadline)
	defer cancel()
	c := &capture{proc: p, guest: guest, target: t, hooks: h, opt: opt}
	if err := c.run(ctx); err != nil {
		return nil, fmt.Errorf("capture: %w", p.blame(err))
	}
	return &c.result, nil
}

// capture is one call of Capture.
type capture struct {
	proc   *process
	guest  *guestMap
	target Target
	hooks  Hooks
	opt    CaptureOptions
	layer  *os.File
	result Captured
	start  time.Time // of the present stage

	stopped bool // Pause was called
}

func (c *capture) run(ctx context.Context) (err error) {
	name := c.opt.Name
	if name == "" {
		name = "layer"
	}
	if c.layer, err = New(name, c.target.Image.Bytes()); err != nil {
		return err
	}
	defer func() {
		if err != nil {
			c.layer.Close()
		}
	}()
	c.start = time.Now()
	extents, err := c.inMode(ctx)
	if err != nil {
		return err
	}
	return c.finish(ctx, extents)
}

func (c *capture) inMode(ctx context.Context) ([]Extent, error) {
	c.result.Mode = c.opt.Mode
	switch c.opt.Mode {
	case ModeLive:
		return c.live(ctx)
	case ModeDiff, ModeStop:
		return c.copied(ctx)
	case "":
	default:
		return nil, fmt.Errorf("%q is no mode: choose %s, %s or %s", c.opt.Mode, ModeLive, ModeDiff, ModeStop)
	}
	c.result.Mode = ModeLive
	extents, err := c.live(ctx)
	if c.stopped || !errors.Is(err, ErrNotTracked) && !errors.Is(err, ErrNotPermitted) {
		return extents, err
	}
	c.result.Mode = ModeDiff
	c.result.Warning = fmt.Sprintf("changed pages were copied while the guest stood still, since a live capture is not possible: %v", err)
	return c.copied(ctx)
}

// finish seals the layer.
func (c *capture) finish(ctx context.Context, extents []Extent) (err error) {
	if err := c.opt.Failpoints.Hit(ctx, PointDone); err != nil {
		return err
	}
	if err := c.proc.gone(); err != nil {
		return err // and what was read last may have been another process's
	}
	if c.opt.FillGaps {
		if extents, err = FillGaps(c.layer, extents, c.target.Image); err != nil {
			return err
		}
	}
	if err := Seal(c.layer); err != nil {
		return err
	}
	c.result.Layer = Layer{File: c.layer, Extents: extents}
	c.result.Pages = Pages(extents)
	c.result.Times.After = time.Since(c.start)
	return nil
}

// inPause stops the guest, does hold and lets the guest go on, whatever happens in between.
func (c *capture) inPause(ctx context.Context, hold func() error) (err error) {
	if err := c.opt.Failpoints.Hit(ctx, PointAhead); err != nil {
		return err
	}
	if err := context.Cause(ctx); err != nil {
		return err
	}
	times := &c.result.Times
	paused := time.Now()
	times.Ahead = paused.Sub(c.start)
	defer func() {
		err = errors.Join(err, c.resume(ctx))
		c.start = time.Now()
		times.Pause = c.start.Sub(paused)
		if err == nil {
			err = c.opt.Failpoints.Hit(ctx, PointResumed)
		}
	}()
	c.stopped = true
	if err := c.hooks.Pause(ctx); err != nil {
		return fmt.Errorf("pause the guest: %w", err)
	}
	stopped := time.Now()
	times.Stop = stopped.Sub(paused)
	if err := c.opt.Failpoints.Hit(ctx, PointPaused); err != nil {
		return err
	}
	if err := hold(); err != nil {
		return err
	}
	times.Hold = time.Since(stopped)
	return c.opt.Failpoints.Hit(ctx, PointHeld)
}

// resume calls the hook in a context of its own: a guest must go on even if whoever asked for the capture has given up.
func (c *capture) resume(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), resumeTime)
	defer cancel()
	start := time.Now()
	err := c.hooks.Resume(ctx)
	if err != nil {
		err = c.hooks.Resume(ctx)
	}
	c.result.Times.Resume = time.Since(start)
	if err != nil {
		return fmt.Errorf("resume the guest: %w (%w)", ErrNotResumed, err)
	}
	return nil
}
