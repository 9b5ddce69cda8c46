package memory

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math/bits"
	"sync"
	"sync/atomic"

	"golang.org/x/sys/unix"

	"github.com/forkd/forkd/internal/failpoint"
	"github.com/forkd/forkd/internal/thread"
)

// Phases of a window say what a write-protect fault means.
const (
	arming uint32 = iota // the page is let go, and noted: its content belongs to the guest's future still
	frozen               // the page is captured, if it differs from the image, and let go
	open                 // the page is let go: the window is over or given up
)

// window holds a guest's memory as it was at one instant, while the guest goes on: what was captured of it is let go, page by
// page.
//
// A page that differs from the image is claimed by whoever captures it, the sweeper or the fault worker, so that it is rarely read twice. Both
// read a page, then mark it done, and only then let it go, which wakes the guest's threads that wait for it. Who finds it marked already was not
// the first, and drops what it read: the page may have been let go, and written, before. So no lock is held, and the worker need not wait for a
// sweeper that has claimed a page and is kept from the processor.
type window struct {
	proc  *process
	uffd  *UFFD
	own   bool // the userfaultfd goes with the window
	guest *guestMap
	pages *pagemap
	sink  *sink

	points *failpoint.Set

	phase   atomic.Uint32
	changed bitset // differs from the image; complete when frozen
	claimed bitset
	done    bitset
	split   atomic.Bool // the kernel takes ranges of one mapping only

	// armMu is over letting go of a page that is noted, or protecting it, together with what the notes say of it, and over the end of
	// arming.
	armMu sync.Mutex
	noted bitset // let go since it was last protected

	held        []byte // pages that were captured in the pause, one behind the other
	heldBytes   int
	heldExtents []Extent

	noteCount atomic.Uint64
	faults    atomic.Uint64

	fail       context.CancelCauseFunc
	registered []Mapping
	swept      bool // everything has been let go
	stopFD     int  // eventfd: ends the worker
	worker     sync.WaitGroup
	keep       func() bool   // forestalls the release that the end of the context starts
	released   chan struct{} // closed when that is through
}

// live captures through a window.
func (c *capture) live(ctx context.Context) (extents []Extent, err error) {
	ctx, fail := context.WithCancelCause(ctx)
	defer fail(nil)
	w, err := c.openWindow(ctx, fail)
	if err != nil {
		return nil, err
	}
	defer func() { // also when a hook panics
		err = errors.Join(err, w.close())
		if err == nil {
			err = context.Cause(ctx) // the worker may have failed at the last page
		}
		c.result.Faults, c.result.Noted = w.faults.Load(), w.noteCount.Load()
	}()
	return c.throughWindow(ctx, w)
}

func (c *capture) throughWindow(ctx context.Context, w *window) ([]Extent, error) {
	if !c.opt.Unprotected {
		if err := w.arm(ctx); err != nil {
			return nil, err
		}
	}
	err := c.inPause(ctx, func() error {
		if c.opt.Unprotected {
			return w.findChanged(Extent{0, w.guest.pages()})
		}
		return w.freeze(ctx)
	})
	if err != nil {
		return nil, err
	}
	return w.sweep(ctx)
}

// openWindow adopts a userfaultfd if the target brings none, registers guest memory and starts the fault worker.
func (c *capture) openWindow(ctx context.Context, fail context.CancelCauseFunc) (_ *window, err error) {
	pages := c.guest.pages()
	w := &window{
		proc: c.proc, guest: c.guest, points: c.opt.Failpoints, fail: fail, stopFD: -1, sink: newSink(c.layer),
		changed: newBitset(pages), claimed: newBitset(pages), done: newBitset(pages), noted: newBitset(pages),
		held: make([]byte, heldPages*PageSize), heldExtents: make([]Extent, 0, heldPages),
	}
	clear(w.held) // its memory is there before the pause
	defer func() {
		if err != nil {
			err = errors.Join(err, w.close())
		}
	}()
	uffd := c.target.UFFD
	if uffd == nil {
		w.own = true
		if uffd, err = adopt(ctx, c.proc); err != nil {
			return w, err
		}
	}
	if err := uffd.acquire(c.proc.Process); err != nil {
		return w, err
	}
	w.uffd = uffd
	if err := c.opt.Failpoints.Hit(ctx, PointAdopted); err != nil {
		return w, err
	}
	return w, w.start(ctx)
}

func (w *window) start(ctx context.Context) (err error) {
	if w.pages, err = openPagemap(w.proc); err != nil {
		return err
	}
	if w.stopFD, err = unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK); err != nil {
		return fmt.Errorf("eventfd: %w", err)
	}
	for _, run := range w.guest.runs {
		if err := w.uffd.register(run.Addr, uint64(run.Bytes())); err != nil {
			return err
		}
		w.registered = append(w.registered, run)
	}
	w.worker.Go(w.serve)
	w.released = make(chan struct{})
	w.keep = context.AfterFunc(ctx, func() {
		defer close(w.released)
		w.phase.Store(open)
		w.unprotect(Extent{0, w.guest.pages()}) // fails only when the process is gone
	})
	return nil
}

// arm protects all of guest memory while the guest runs, in steps, and finds the pages that differ from the image: those the
// process owns once they are protected, and those it writes later, which fault. Nothing that grows with memory is left to be
// done in the pause.
func (w *window) arm(ctx context.Context) error {
	pages := w.guest.pages()
	for first := uint64(0); first < pages; first += armStep {
		if err := w.points.Hit(ctx, PointArming); err != nil {
			return err
		}
		if err := context.Cause(ctx); err != nil {
			return err
		}
		step := Extent{first, min(armStep, pages-first)}
		if err := w.protect(step); err != nil {
			return err
		}
		if err := w.findChanged(step); err != nil {
			return err
		}
	}
	return w.rearm()
}

const (
	armStep        = 8 << 20 / PageSize // pages protected at a time: about half a millisecond
	unregisterStep = 2 << 20 / PageSize

	rearmRounds = 3
	rearmEnough = 256 // noted pages that are left to the pause, which copies them: some 100 µs
	heldPages   = 2 * rearmEnough
)

// findChanged marks the pages of e that the process owns.
func (w *window) findChanged(e Extent) error {
	return w.pages.ownedProtected(w.guest, e, w.changed.setAll)
}

// rearm protects the noted pages again while the guest still runs: a guest that writes at full speed has written many while we
// armed, but few since the last round.
func (w *window) rearm() error {
	for range rearmRounds {
		if w.noted.count() <= rearmEnough {
			break
		}
		if err := thread.Briefly(w.rearmRound); err != nil { // the worker waits for its lock, and the guest for the worker
			return err
		}
	}
	return nil
}

// rearmRound locks word by word, so that the worker is never kept for long.
func (w *window) rearmRound() error {
	for i := range w.noted {
		if w.noted[i].Load() == 0 {
			continue
		}
		w.armMu.Lock()
		err := w.protectNotedLocked(i)
		w.armMu.Unlock()
		if err != nil {
			return err
		}
	}
	return nil
}

// protectNotedLocked protects the noted pages of word i and forgets them. Were the lock not held the worker might let go of one
// in between that it had found noted already, and nobody would know.
func (w *window) protectNotedLocked(i int) error {
	for e := range runsIn(uint64(i), w.noted[i].Swap(0)) {
		if err := w.protect(e); err != nil {
			return err
		}
	}
	return nil
}

// freeze makes this the instant: from here on pages are captured before they are written.
// Preconditions: the guest stands still.
func (w *window) freeze(ctx context.Context) error {
	w.armMu.Lock()
	defer w.armMu.Unlock()
	if !w.phase.CompareAndSwap(arming, frozen) {
		return context.Cause(ctx) // it was given up
	}
	for i := range w.noted {
		if err := w.holdNotedLocked(uint64(i)); err != nil {
			return err
		}
		if err := w.protectNotedLocked(i); err != nil {
			return err
		}
	}
	return nil
}

// holdNotedLocked captures the noted pages of word i at once, as long as there is room for them: what was written a moment ago is written again
// a moment after the pause, and the guest would wait for each of these pages. They stay let go.
// Preconditions: the guest stands still.
func (w *window) holdNotedLocked(i uint64) error {
	pages := w.noted[i].Load()
	n := bits.OnesCount64(pages) * PageSize
	if n == 0 || w.heldBytes+n > len(w.held) {
		return nil
	}
	if err := w.read(w.held[w.heldBytes:], i, pages); err != nil {
		return err
	}
	w.noted[i].Store(0)
	w.claimed[i].Or(pages)
	w.done[i].Or(pages)
	w.heldBytes += n
	for e := range runsIn(i, pages) {
		w.heldExtents = append(w.heldExtents, e)
	}
	return nil
}

// storeHeld puts what was captured in the pause into the layer.
func (w *window) storeHeld() error {
	buf := w.held
	for _, e := range w.heldExtents {
		if err := w.sink.store(e.First, buf[:e.Bytes()]); err != nil {
			return err
		}
		buf = buf[e.Bytes():]
	}
	w.held, w.heldExtents = nil, nil
	return nil
}

// close ends the worker, and then all protection: the worker may still be reading a page. Everything in it holds for a window
// that was opened in part.
func (w *window) close() error {
	var err error
	if w.keep != nil {
		if !w.keep() {
			<-w.released
		}
		_, err = unix.Write(w.stopFD, binary.LittleEndian.AppendUint64(nil, 1))
		w.worker.Wait()
		if !w.swept {
			w.unprotect(Extent{0, w.guest.pages()}) // fails only when the process is gone
		}
	}
	if w.stopFD >= 0 {
		unix.Close(w.stopFD)
	}
	if w.pages != nil {
		w.pages.close()
	}
	if w.uffd == nil {
		return err
	}
	if w.own {
		w.unregister()
		w.uffd.Close()
	}
	w.uffd.release()
	return err
}

// unregister ends the registration in steps: each locks the address space against the guest's page faults while it walks its
// pages, and closing the userfaultfd would do that for all of them at once.
func (w *window) unregister() {
	for _, run := range w.registered {
		for e := run.Extent; e.N > 0; {
			step := Extent{e.First, min(e.N, unregisterStep)}
			w.uffd.unregister(run.at(step.First), uint64(step.Bytes())) // fails only when the process is gone
			e = from(e, step.End())
		}
	}
}
