package memory

import (
	"context"
	"fmt"
	"os"

	"golang.org/x/sys/unix"

	"github.com/forkd/forkd/internal/thread"
)

// sweepRest is how long the sweeper rests for the time it worked.
const sweepRest = 0.35

// sweep captures the changed pages that the fault worker has not, and lets go of all others. It returns what the layer holds when
// the worker has ended.
func (w *window) sweep(ctx context.Context) ([]Extent, error) {
	if err := w.storeHeld(); err != nil {
		return nil, err
	}
	buf := make([]byte, wordPages*PageSize)
	pace := thread.Pace(sweepRest)
	for i := uint64(0); i < uint64(len(w.changed)); {
		if err := w.points.Hit(ctx, PointSweep); err != nil {
			return nil, err
		}
		if err := context.Cause(ctx); err != nil {
			return nil, err
		}
		n, err := w.sweepWord(i, buf)
		if err != nil {
			return nil, err
		}
		i += n
		if !pace.Rest() {
			thread.Yield() // to the guest, should it be on the same processor
		}
	}
	if err := context.Cause(ctx); err != nil {
		return nil, err // it may have been let go before it was captured
	}
	w.swept = true
	return w.changed.extents(), nil
}

// sweepWord does the pages of word i, and of the next ones if there is nothing to be captured in any. It returns how many words
// it did.
func (w *window) sweepWord(i uint64, buf []byte) (uint64, error) {
	if w.changed[i].Load() == 0 {
		n := uint64(1)
		for n < armStep/wordPages && i+n < uint64(len(w.changed)) && w.changed[i+n].Load() == 0 {
			n++
		}
		return n, w.unprotect(Extent{i * wordPages, min(n*wordPages, w.guest.pages()-i*wordPages)})
	}
	changed := w.changed[i].Load()
	return 1, w.takeWord(i, changed&^w.claimed[i].Or(changed), buf)
}

// takeWord captures pages of word i, and lets all pages of the word go that the worker has not claimed.
// Preconditions: the caller has claimed the pages, and they are all that are left of those that must be captured.
func (w *window) takeWord(i, mine uint64, buf []byte) error {
	if err := w.read(buf, i, mine); err != nil {
		return err
	}
	kept := mine &^ w.done[i].Or(mine) // the others the worker has captured, since the guest would have had to wait
	theirs := w.changed[i].Load() &^ mine
	for e := range runsIn(i, ^theirs&mask(min(wordPages, w.guest.pages()-i*wordPages))) {
		if err := w.unprotect(e); err != nil {
			return err
		}
	}
	for e := range runsIn(i, mine) {
		for k := range runsIn(i, kept&(mask(e.N)<<(e.First%wordPages))) {
			if err := w.sink.store(k.First, buf[k.Offset()-e.Offset():][:k.Bytes()]); err != nil {
				return err
			}
		}
		buf = buf[e.Bytes():]
	}
	return nil
}

// read copies those pages of word i whose bits are set, one behind the other, as the process sees them.
func (w *window) read(buf []byte, i, pages uint64) error {
	var remote [wordPages]unix.RemoteIovec
	n, bytes := 0, 0
	for e := range runsIn(i, pages) {
		within(w.guest.runs, e, func(run Mapping, part Extent) error {
			remote[n] = unix.RemoteIovec{Base: uintptr(run.at(part.First)), Len: int(part.Bytes())}
			n, bytes = n+1, bytes+int(part.Bytes())
			return nil
		})
	}
	if n == 0 {
		return nil
	}
	local := unix.Iovec{Base: &buf[0]}
	local.SetLen(bytes)
	return readProcess(w.proc, []unix.Iovec{local}, remote[:n])
}

// readProcess copies memory of a process into ours.
func readProcess(p *process, local []unix.Iovec, remote []unix.RemoteIovec) error {
	want := 0
	for _, r := range remote {
		want += r.Len
	}
	n, err := unix.ProcessVMReadv(p.PID, local, remote, 0)
	if err == nil && n != want {
		err = fmt.Errorf("got %d of %d bytes", n, want)
	}
	if err != nil {
		return p.blame(fmt.Errorf("read guest memory: %w", err))
	}
	return nil
}

// sink is the layer's memfd under construction. Pages of zeros stay holes in it.
type sink struct {
	fd   int
	file *os.File
}

func newSink(f *os.File) *sink { return &sink{fd: int(f.Fd()), file: f} }

// store puts the pages from page first on at their place.
func (s *sink) store(first uint64, pages []byte) error {
	for len(pages) > 0 {
		n := 0 // bytes that are not zero pages
		for n < len(pages) && !IsZeroPage(pages[n:n+PageSize]) {
			n += PageSize
		}
		if n > 0 {
			if err := s.write(pages[:n], int64(first)*PageSize); err != nil {
				return err
			}
		}
		n = min(n+PageSize, len(pages)) // and the zero page behind them
		first, pages = first+uint64(n/PageSize), pages[n:]
	}
	return nil
}

func (s *sink) write(b []byte, off int64) error {
	for len(b) > 0 {
		n, err := unix.Pwrite(s.fd, b, off)
		if err == unix.EINTR {
			continue
		}
		if err != nil {
			return fmt.Errorf("write to layer %s: %w", s.file.Name(), err)
		}
		b, off = b[n:], off+int64(n)
	}
	return nil
}
