package memory

import (
	"context"
	"sync"
	"testing"
	"time"
)

// A page that is let go while the noted pages are being protected again must be noted still, or a write to it after the pause would
// go unseen. A guest meets that once in hundreds of captures; here two workers let go of a few pages without rest.
func TestRearmForgetsNothing(t *testing.T) {
	needRoot(t)
	const pages = wordPages
	img := base(t, pages, 0)
	_, p, guest := mapHere(t, img)
	m, err := openPagemap(p)
	if err != nil {
		t.Fatal(err)
	}
	defer m.close()
	ctx, fail := context.WithCancelCause(t.Context())
	defer fail(nil)
	w := &window{
		proc: p, uffd: uffdHere(t, p), guest: guest, pages: m, fail: fail,
		changed: newBitset(pages), claimed: newBitset(pages), done: newBitset(pages), noted: newBitset(pages),
	}
	if err := w.uffd.register(guest.runs[0].Addr, pages*PageSize); err != nil {
		t.Fatal(err)
	}
	if err := w.arm(ctx); err != nil {
		t.Fatal(err)
	}
	for range 50 {
		var workers sync.WaitGroup
		stop := make(chan struct{})
		for worker := range uint64(2) {
			workers.Go(func() {
				for page := worker; ; page += 3 {
					select {
					case <-stop:
						return
					default:
						w.note(page % pages)
					}
				}
			})
		}
		for start := time.Now(); time.Since(start) < 5*time.Millisecond; {
			if err := w.rearmRound(); err != nil {
				t.Fatal(err)
			}
		}
		close(stop)
		workers.Wait()
		free := newBitset(pages)
		unprotected := func(entry uint64) bool { return entry&pmUFFDWP == 0 }
		if err := m.read(guest.runs[0], Extent{0, pages}, unprotected, free.setAll); err != nil {
			t.Fatal(err)
		}
		if forgotten := Subtract(free.extents(), w.noted.extents()); len(forgotten) > 0 {
			t.Fatalf("pages %v are neither protected nor noted", forgotten)
		}
	}
}

// When its time is up a window must let go of the guest although neither the sweeper nor the fault worker gets anywhere.
func TestEndOfContextFreesGuest(t *testing.T) {
	g := runningGuest(t, guestConfig{})
	c := &capture{proc: pin(t, g.process), target: g.target(), hooks: g.hooks()}
	var err error
	if c.guest, err = readGuestMap(c.proc, g.image); err != nil {
		t.Fatal(err)
	}
	if c.layer, err = New("layer", g.image.Bytes()); err != nil {
		t.Fatal(err)
	}
	defer c.layer.Close()
	ctx, fail := context.WithCancelCause(t.Context())
	defer fail(nil)
	w, err := c.openWindow(ctx, fail)
	if err != nil {
		t.Fatal(err)
	}
	defer w.close()
	if err := w.arm(ctx); err != nil {
		t.Fatal(err)
	}
	err = c.inPause(ctx, func() error {
		defer w.armMu.Lock() // the worker hangs from here on, at its next fault
		return w.freeze(ctx)
	})
	defer w.armMu.Unlock()
	if err != nil {
		t.Fatal(err)
	}
	stuck := g.do("stats").Written
	time.Sleep(100 * time.Millisecond) // for something not to happen
	if now := g.do("stats").Written; now > stuck+2 {
		t.Errorf("the guest wrote %d pages that nobody let go of", now-stuck)
	}
	fail(errDeadline)
	g.advances(2 * testWritten)
	g.sane()
}

// A sweeper that has claimed pages and is kept from the processor must not keep the guest, nor put into the layer what the guest has written
// meanwhile to pages that the worker has captured in its place.
func TestSweeperThatIsKeptHoldsNobody(t *testing.T) {
	g := runningGuest(t, guestConfig{})
	c := &capture{proc: pin(t, g.process), target: g.target(), hooks: g.hooks()}
	var err error
	if c.guest, err = readGuestMap(c.proc, g.image); err != nil {
		t.Fatal(err)
	}
	if c.layer, err = New("layer", g.image.Bytes()); err != nil {
		t.Fatal(err)
	}
	ctx, fail := context.WithCancelCause(t.Context())
	defer fail(nil)
	w, err := c.openWindow(ctx, fail)
	if err != nil {
		t.Fatal(err)
	}
	closed := false
	defer func() {
		if !closed {
			w.close()
		}
	}()
	if err := w.arm(ctx); err != nil {
		t.Fatal(err)
	}
	if err := c.inPause(ctx, func() error { return w.freeze(ctx) }); err != nil {
		t.Fatal(err)
	}
	claimed := make([]uint64, len(w.changed))
	for i := range w.changed {
		changed := w.changed[i].Load()
		claimed[i] = changed &^ w.claimed[i].Or(changed)
	}
	g.advances(2 * testWritten) // all pages that it writes, more than once
	if err := w.storeHeld(); err != nil {
		t.Fatal(err)
	}
	buf := make([]byte, wordPages*PageSize)
	for i, mine := range claimed {
		if err := w.takeWord(uint64(i), mine, buf); err != nil {
			t.Fatal(err)
		}
	}
	w.swept = true
	if err := w.close(); err != nil {
		t.Fatal(err)
	}
	closed = true
	if err := Seal(c.layer); err != nil {
		t.Fatal(err)
	}
	branch := g.derive(Layer{c.layer, w.changed.extents()})
	if n := torn(t, branch, g.at, testWritten); n != 0 {
		t.Errorf("%d pages are not of the instant of the pause", n)
	}
	g.sane()
}
