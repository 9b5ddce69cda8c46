package memory

import (
	"encoding/binary"
	"errors"
	"fmt"
	"runtime"

	"golang.org/x/sys/unix"
)

// faultBatch is how many messages are read at a time.
const faultBatch = 64

// beFirst has this thread run as soon as it can whatever else the host is busy with: a thread of the guest waits for it, and it only ever
// runs for microseconds. A host that doesn't allow it has longer stalls, no more.
func beFirst() {
	attr := unix.SchedAttr{Size: unix.SizeofSchedAttr, Policy: unix.SCHED_RR, Priority: 1, Flags: unix.SCHED_FLAG_RESET_ON_FORK}
	unix.SchedSetAttr(0, &attr, 0)
}

// serve answers the guest's faults until the window is closed. A thread of the guest waits for each of them, so this never waits for the monitor,
// nor for the sweeper, and writes to the layer only when no fault is pending.
func (w *window) serve() {
	runtime.LockOSThread() // for good: the thread ends with the window, and its priority with it
	beFirst()
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
		if err := w.serveFault(c, page); err != nil {
			w.fail(err)
			w.unprotect(Extent{page, 1})
		}
	}
}

func (w *window) serveFault(c *catcher, page uint64) error {
	if w.note(page) {
		return nil
	}
	switch {
	case w.phase.Load() == open || !w.changed.has(page):
		return w.unprotect(Extent{page, 1})
	case w.claimed.set(page):
		return c.take(page)
	case w.done.has(page):
		return w.unprotect(Extent{page, 1})
	}
	return nil // whoever is at it lets it go, and that wakes the thread
}

// note remembers a page that is written while the window is being armed, and lets it go. It reports false when the window is armed.
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
	w     *window
	pages []uint64 // captured and not yet in the layer
	buf   []byte
}

func newCatcher(w *window) *catcher {
	return &catcher{w: w, buf: make([]byte, faultBatch*PageSize)}
}

// take captures a page and lets it go. It gets into the layer later.
// Preconditions: the caller has claimed the page.
func (c *catcher) take(page uint64) error {
	if len(c.pages) == cap(c.buf)/PageSize {
		if err := c.store(); err != nil {
			return err
		}
	}
	slot := c.buf[len(c.pages)*PageSize:][:PageSize]
	if err := c.w.read(slot, page/wordPages, bit(page)); err != nil {
		return err
	}
	c.w.done.set(page)
	c.pages = append(c.pages, page)
	return c.w.unprotect(Extent{page, 1})
}

func (c *catcher) store() error {
	for i, page := range c.pages {
		if err := c.w.sink.store(page, c.buf[i*PageSize:][:PageSize]); err != nil {
			return err
		}
	}
	c.pages = c.pages[:0]
	return nil
}
