package memory

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math/bits"

	"golang.org/x/sys/unix"

	"github.com/forkd/forkd/internal/thread"
)

// faultBatch is how many messages are read at a time.
const faultBatch = 64

// serve answers the guest's faults until the window is closed. A thread of the guest waits for each of them, so this never
// waits for the monitor, nor for the sweeper, and writes to the layer only when no fault is pending.
func (w *window) serve() {
	thread.First()
	c := newCatcher(w)
	fds := []unix.PollFd{
		{Fd: int32(w.uffd.fd), Events: unix.POLLIN},
		{Fd: int32(w.stopFD), Events: unix.POLLIN},
		{Fd: int32(w.proc.pidfd), Events: unix.POLLIN},
	}
	msgs := make([]byte, faultBatch*uffdMsgBytes)
	for {
		n, err := unix.Read(w.uffd.fd, msgs)
		switch {
		case err == nil:
			w.serveFaults(c, msgs[:n])
			continue
		case err == unix.EINTR:
			continue
		case err != unix.EAGAIN:
			w.fail(fmt.Errorf("read faults: %w", err))
		}
		if err := c.store(); err != nil {
			w.fail(err)
		}
		if _, err := unix.Poll(fds, -1); err != nil && err != unix.EINTR {
			w.fail(fmt.Errorf("wait for faults: %w", err))
			return
		}
		if fds[1].Revents != 0 {
			return
		}
		if fds[2].Revents != 0 {
			w.fail(w.proc.gone())
			fds[2].Fd = -1
		}
	}
}

func (w *window) serveFaults(c *catcher, msgs []byte) {
	taken := Extent{}
	for ; len(msgs) >= uffdMsgBytes; msgs = msgs[uffdMsgBytes:] {
		if msgs[0] != uffdEventPagefault {
			continue
		}
		w.faults.Add(1)
		addr := binary.LittleEndian.Uint64(msgs[uffdMsgAddress:])
		page, ok := w.guest.page(addr)
		if !ok {
			w.fail(fmt.Errorf("fault at %#x, where there is no guest memory", addr))
			continue
		}
		got, err := w.serveFault(c, page)
		if err != nil {
			w.fail(err)
			w.unprotect(Extent{page, 1})
		}
		if got {
			taken = Extent{page, 1}
		}
	}
	if err := c.takeBehind(taken); err != nil {
		w.fail(err)
	}
}

// serveFault lets a page go, after it was captured if it must be. It reports whether it captured it.
func (w *window) serveFault(c *catcher, page uint64) (taken bool, err error) {
	if w.note(page) {
		return false, nil
	}
	switch {
	case w.phase.Load() == open || !w.changed.has(page):
		return false, w.unprotect(Extent{page, 1})
	case w.done.has(page):
		return false, w.unprotect(Extent{page, 1})
	}
	w.claimed.set(page) // if the sweeper has claimed it, it may be long in coming to it: the guest doesn't wait for that
	return true, c.take(Extent{page, 1})
}

// note remembers a page that is written while the window is being armed, and lets it go. It reports false when the window is
// armed.
func (w *window) note(page uint64) bool {
	w.armMu.Lock()
	defer w.armMu.Unlock()
	if w.phase.Load() != arming {
		return false
	}
	w.changed.set(page)
	if w.noted.set(page) {
		w.noteCount.Add(1)
	}
	if err := w.unprotect(Extent{page, 1}); err != nil {
		w.fail(err)
	}
	return true
}

// protect has the guest's writes to pages fault.
func (w *window) protect(e Extent) error { return w.setProtection(e, true) }

// unprotect lets pages go and wakes the threads that wait for them.
func (w *window) unprotect(e Extent) error { return w.setProtection(e, false) }

func (w *window) setProtection(e Extent, on bool) error {
	parts := w.guest.runs
	if w.split.Load() {
		parts = w.guest.mappings
	}
	return within(parts, e, func(m Mapping, part Extent) error {
		err := w.uffd.writeProtect(m.at(part.First), uint64(part.Bytes()), on)
		switch {
		case err == nil:
			return nil
		case errors.Is(err, unix.ENOENT) && part.N > 1:
			return w.protectParts(part, on)
		}
		return w.proc.blame(fmt.Errorf("write-protect (%t) %d pages at page %d: %w (%w)", on, part.N, part.First, ErrNotTracked, err))
	})
}

// protectParts is for kernels before 6.4, which take no range over several mappings: mapping by mapping, and should the
// monitor have split one meanwhile, by halves.
func (w *window) protectParts(e Extent, on bool) error {
	if !w.split.Swap(true) {
		return w.setProtection(e, on)
	}
	half := e.N / 2
	return errors.Join(w.setProtection(Extent{e.First, half}, on), w.setProtection(Extent{e.First + half, e.N - half}, on))
}

// catcher captures the pages of faults.
type catcher struct {
	w       *window
	extents []Extent // captured and not yet in the layer
	used    int      // of buf
	buf     []byte
}

const (
	catcherPages = 256
	// takeAhead is how many pages behind a fault are captured with it, when no other thread waits: who writes a page often
	// writes the next.
	takeAhead = 15
)

func newCatcher(w *window) *catcher {
	return &catcher{w: w, buf: make([]byte, catcherPages*PageSize)}
}

// take captures pages of one word of the bitsets and lets them go. They get into the layer later, unless the sweeper was first.
// Preconditions: the caller has claimed them, or there is one only.
func (c *catcher) take(e Extent) error {
	if c.used+int(e.Bytes()) > len(c.buf) {
		if err := c.store(); err != nil {
			return err
		}
	}
	i, pages := e.First/wordPages, mask(e.N)<<(e.First%wordPages)
	if err := c.w.read(c.buf[c.used:], i, pages); err != nil {
		return err
	}
	if c.w.done[i].Or(pages)&pages == 0 {
		c.used += int(e.Bytes())
		c.extents = append(c.extents, e)
	}
	return c.w.unprotect(e)
}

// takeBehind captures what nobody has captured yet of the changed pages right behind e, in the same word.
func (c *catcher) takeBehind(e Extent) error {
	if e.N == 0 {
		return nil
	}
	i, at := e.End()/wordPages, e.End()%wordPages
	if at == 0 {
		return nil
	}
	n := min(takeAhead, uint64(bits.TrailingZeros64(^(c.w.changed[i].Load() >> at))), wordPages-at)
	if n == 0 {
		return nil
	}
	want := mask(n) << at
	for run := range runsIn(i, want&^c.w.claimed[i].Or(want)) {
		if err := c.take(run); err != nil {
			return err
		}
	}
	return nil
}

func (c *catcher) store() error {
	b := c.buf
	for _, e := range c.extents {
		if err := c.w.sink.store(e.First, b[:e.Bytes()]); err != nil {
			return err
		}
		b = b[e.Bytes():]
	}
	c.extents, c.used = c.extents[:0], 0
	return nil
}
