package sandbox

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	"golang.org/x/sys/unix"

	"github.com/forkd/forkd/internal/memory"
	"github.com/forkd/forkd/internal/vmm"
)

// instant is a machine as it was at one moment. Its files are the owner's.
type instant struct {
	memory.Captured
	device *os.File // sealed
	base   *memory.Image
	pause  time.Duration // the machine stood still
}

// close gives up what the instant holds.
func (i *instant) close() error {
	return errors.Join(i.device.Close(), i.Layer.File.Close())
}

// capturing says how a machine is to be captured.
type capturing struct {
	id   string // of the snapshot that it becomes
	mode memory.Mode
	disk bool // it is to be stored: there must be room for it
	// stay: the machine is not let go on when it was captured: it stays paused. Its line is free then: what goes there reaches the machine when
	// it goes on after all, and else nobody.
	stay    bool
	resumed func(pause time.Duration) // is called when the machine goes on after a pause that succeeded; nil: nobody wants to know
}

// capture takes the memory and the device state of a machine at one moment. Whatever happens, the machine runs afterwards, unless it has
// ended, or was to stay and could be captured. Preconditions: nobody else captures or pauses it.
func (m *Manager) capture(ctx context.Context, c *child, how capturing) (_ *instant, err error) {
	if c.image == nil {
		return nil, newError(CodeInvalidState, nil, "fork its snapshot again", "sandbox %s outlived the daemon that started it, and what its memory was then can't be told any more", c.id)
	}
	grant, err := m.captureGrant(c, how.disk)
	if err != nil {
		return nil, err
	}
	defer grant.release() // what was captured is resident then, and counts as images do
	device, err := memory.New("device-"+how.id, memory.PageSize)
	if err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			_ = device.Close() // a memfd: nothing can be lost
		}
	}()
	if !c.tap.intact() { // the guest may have a part of a frame: a new connection repairs that
		if err := m.mend(ctx, c); err != nil {
			return nil, err
		}
	}
	h := &holder{m: m, c: c, how: how}
	got, err := h.run(ctx, device)
	if err != nil {
		return nil, err
	}
	m.log.Debug("captured", "id", c.id, "mode", got.Mode, "pause", h.took, "stop", h.stopped, "save", h.saved, "hold", got.Times.Hold, "resume", got.Times.Resume,
		"line", got.Times.Stop-h.stopped-h.saved, "ahead", got.Times.Ahead, "after", got.Times.After, "pages", got.Pages, "noted", got.Noted, "faults", got.Faults)
	return &instant{Captured: *got, device: device, base: c.image.Image(), pause: h.took}, nil
}

// run captures the machine's memory, and its device state into a memfd.
func (h *holder) run(ctx context.Context, device *os.File) (_ *memory.Captured, err error) {
	m, c, how := h.m, h.c, h.how
	release, err := h.stage(ctx, device)
	if err != nil {
		return nil, err
	}
	defer func() {
		m.warn(release(context.WithoutCancel(ctx)), "tidy up after a capture", c.id)
		c.tap.free()
	}()
	got, err := memory.Capture(ctx, memory.Target{Process: c.machine.Process(), Image: c.image.Image()}, memory.Hooks{Pause: h.pause, Resume: h.resume},
		memory.CaptureOptions{Mode: how.mode, Name: memoryName(how.id), FillGaps: true, Failpoints: m.cfg.Failpoints})
	if err != nil {
		if errors.Is(err, unix.ESRCH) && endsNow(c.machine, vmm.ErrGone) {
			err = fmt.Errorf("%w: %w", vmm.ErrGone, err) // its memory was gone a moment before its process is seen to be
		}
		return nil, errors.Join(err, m.revive(ctx, c, how.stay, err))
	}
	if err := memory.Seal(device); err != nil {
		return nil, errors.Join(err, got.Layer.File.Close(), m.revive(ctx, c, how.stay, err))
	}
	return got, nil
}

// holder stops a machine and lets it go on. What is between the two must be short and always the same: no logging, no database.
type holder struct {
	m    *Manager
	c    *child
	how  capturing
	save func(context.Context) error

	held    bool // the pause did all that it was for: the instant can become a snapshot
	began   time.Time
	stopped time.Duration // until no vCPU ran
	saved   time.Duration // until the device state was saved, after that
	took    time.Duration // until it went on, in all
}

// stager is a machine that can do ahead, while it runs, most of what saving its state takes.
type stager interface {
	// StageState returns what saves the state to w when the machine is paused, and what gives back what that needs.
	StageState(ctx context.Context, w *os.File) (save, release func(context.Context) error, err error)
}

// stage gets ready to save the device state.
func (h *holder) stage(ctx context.Context, device *os.File) (release func(context.Context) error, err error) {
	if s, ok := h.c.machine.(stager); ok {
		h.save, release, err = s.StageState(ctx, device)
		return release, err
	}
	h.save = func(ctx context.Context) error { return h.c.machine.SaveState(ctx, device) }
	return func(context.Context) error { return nil }, nil
}

// freezeLimit bounds what the monitor is asked to do in a pause.
const freezeLimit = 10 * time.Second

func (h *holder) pause(ctx context.Context) error {
	if err := h.holdLine(ctx); err != nil {
		return err
	}
	// Who asked for this may give up, but not between two words to the monitor: it could not be told to let the guest go on then.
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), freezeLimit)
	defer cancel()
	h.began = time.Now()
	if err := h.c.machine.Pause(ctx); err != nil {
		return err
	}
	h.stopped = time.Since(h.began)
	if err := h.m.hit(ctx, pointBranchPaused); err != nil {
		return err
	}
	if err := h.save(ctx); err != nil {
		return err
	}
	h.saved = time.Since(h.began) - h.stopped
	if err := h.m.hit(ctx, pointBranchSaved); err != nil {
		return err
	}
	h.held = true
	return nil
}

func (h *holder) holdLine(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, h.m.limits.PingTimeout)
	defer cancel()
	return h.c.tap.hold(ctx)
}

func (h *holder) resume(ctx context.Context) error {
	if h.how.stay {
		return nil // who wants it to stay lets it go on when that was for nothing
	}
	if err := h.c.machine.Resume(ctx); err != nil {
		return err
	}
	if !h.began.IsZero() && h.took == 0 {
		h.took = time.Since(h.began)
	}
	h.c.tap.free()
	if h.held && h.how.resumed != nil { // it goes on after a pause that failed as well: that is nothing to announce
		h.how.resumed(h.took)
		h.how.resumed = nil
	}
	return nil
}

// Tries to let a machine go on that did not want to at first.
const (
	reviveTries = 5
	reviveRest  = 50 * time.Millisecond
)

// revive makes sure that a machine goes on after a capture that failed. It is not an error when the machine is gone.
func (m *Manager) revive(ctx context.Context, c *child, stayed bool, why error) error {
	if !stayed && !errors.Is(why, memory.ErrNotResumed) {
		return nil // it goes on
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), m.limits.PingTimeout)
	defer cancel()
	var err error
	for range reviveTries {
		if err = c.machine.Resume(ctx); err == nil {
			return nil
		}
		if errors.Is(err, vmm.ErrGone) && endsNow(c.machine, err) {
			return nil
		}
		if !pauseFor(ctx, reviveRest) {
			break
		}
	}
	return fmt.Errorf("%w: %w", errStuck, err)
}

// errStuck says that a machine stands still and can't be helped.
var errStuck = errors.New("the monitor does not let the guest go on")

// mend makes a connection on which nothing is half sent.
func (m *Manager) mend(ctx context.Context, c *child) error {
	ctx, cancel := context.WithTimeoutCause(ctx, m.limits.PingTimeout, errSilent)
	defer cancel()
	if _, err := c.agent.Ping(ctx); err != nil {
		return fmt.Errorf("before it is frozen: %w", err)
	}
	return nil
}

// captureGrant takes memory for a layer: what the machine has of its own now. With disk it makes sure that there is room for as much.
func (m *Manager) captureGrant(c *child, disk bool) (*grant, error) {
	own, err := m.ownBytes(c)
	if err == nil && disk {
		err = m.snapshots.Fits(own)
	}
	if err != nil {
		return nil, err
	}
	grants, err := m.memory.take(1, need{start: own})
	if err != nil {
		return nil, err
	}
	if len(grants) == 0 {
		free, _ := m.memory.free()
		return nil, &Error{Code: CodeInsufficientMemory, RetryAfter: retryLater, Hint: "end or suspend sandboxes, or shrink pools",
			Message: fmt.Sprintf("no memory to freeze sandbox %s: it has changed %d MiB, %d MiB are left", c.id, own>>20, max(free, 0)>>20)}
	}
	return grants[0], nil
}

// ownBytes is how much of its memory a machine has changed. It may change more at any moment.
func (m *Manager) ownBytes(c *child) (int64, error) {
	usage, err := memory.Measure(c.machine.Process().PID, c.image.Image())
	if err != nil {
		select {
		case <-c.machine.Done():
			return 0, fmt.Errorf("%w: %s", vmm.ErrGone, exitText(c.machine))
		default:
			return 0, err
		}
	}
	return usage.GuestAnonKiB << 10, nil
}
