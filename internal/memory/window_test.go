package memory

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/forkd/forkd/internal/vmm"
)

const (
	testPages   = 6144 // 24 MiB: three steps of arming
	testWritten = 2048 // of which two writers write these
)

// runningGuest is a guest with two writers that have been through their areas.
func runningGuest(t *testing.T, cfg guestConfig) *guest {
	t.Helper()
	needRoot(t)
	cfg.Writers = areas(2, testWritten)
	g := startGuest(t, base(t, testPages, testWritten), cfg)
	g.do("start")
	g.advances(testWritten / 2)
	return g
}

// Every mode must yield one instant of a guest that writes at full speed.
func TestCaptureIsOneInstant(t *testing.T) {
	tests := map[string]struct {
		mode   Mode
		rounds int
		cfg    guestConfig
	}{
		"live":            {mode: ModeLive, rounds: 100},
		"live, in halves": {mode: ModeLive, rounds: 10, cfg: guestConfig{Split: true}},
		"live, filtered":  {mode: ModeLive, rounds: 2, cfg: guestConfig{Seccomp: true}},
		"diff":            {mode: ModeDiff, rounds: 10},
		"stop":            {mode: ModeStop, rounds: 5},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			g := runningGuest(t, tt.cfg)
			if testing.Short() {
				tt.rounds = min(tt.rounds, 5)
			}
			for i := range tt.rounds {
				c, branch := g.capture(CaptureOptions{Mode: tt.mode})
				if n := torn(t, branch, g.at, testWritten); n != 0 {
					t.Errorf("branch %d: %d pages are not of the instant of the pause", i, n)
				}
				if c.Mode != tt.mode || c.Warning != "" {
					t.Errorf("branch %d: mode %q, warning %q, want %q and none", i, c.Mode, c.Warning, tt.mode)
				}
				if c.Pages != testWritten {
					t.Errorf("branch %d: layer of %d pages, want %d", i, c.Pages, testWritten)
				}
				branch.Close()
			}
			g.sane()
		})
	}
}

// The check must be able to fail: without protection the pages that are captured after the pause are of another time.
func TestUnprotectedWindowTears(t *testing.T) {
	g := runningGuest(t, guestConfig{})
	_, branch := g.capture(CaptureOptions{Mode: ModeLive, Unprotected: true})
	if n := torn(t, branch, g.at, testWritten); n == 0 {
		t.Error("a window that protects nothing tore no page: the other tests prove nothing")
	}
}

// A layer must hold the pages written before the instant and none that was first written after it.
func TestCaptureTakesWhatDiffers(t *testing.T) {
	needRoot(t)
	for _, mode := range []Mode{ModeLive, ModeDiff, ModeStop} {
		t.Run(string(mode), func(t *testing.T) {
			g := startGuest(t, base(t, testPages, testPages), guestConfig{Writers: areas(2, testPages)})
			g.do("read") // so that there are pages of the file to be told apart
			hooks := g.hooks()
			pause := hooks.Pause
			hooks.Pause = func(ctx context.Context) error { // the writers start after everything was protected
				g.do("start")
				g.advances(100)
				return pause(ctx)
			}
			c, err := Capture(t.Context(), g.target(), hooks, CaptureOptions{Mode: mode})
			if err != nil {
				t.Fatal(err)
			}
			branch := g.derive(c.Layer)
			var want []Extent
			for _, w := range g.at {
				n := (w.Pos + wordsPerPage - 1) / wordsPerPage
				if w.Round > 1 {
					n = w.Pages
				}
				want = append(want, Extent{w.First, n})
			}
			want = Normalize(want)
			if fmt.Sprint(c.Layer.Extents) != fmt.Sprint(want) {
				t.Errorf("layer holds %v, want %v", c.Layer.Extents, want)
			}
			if n := torn(t, branch, g.at, testPages); n != 0 {
				t.Errorf("%d pages are torn", n)
			}
		})
	}
}

// Without an inherited device there is a layer all the same, and a warning.
func TestCaptureFallsBack(t *testing.T) {
	g := runningGuest(t, guestConfig{})
	g.process.UFFDDev = 0
	c, branch := g.capture(CaptureOptions{})
	if c.Mode != ModeDiff || !strings.Contains(c.Warning, "has not inherited") {
		t.Errorf("mode %q, warning %q, want %q and the reason", c.Mode, c.Warning, ModeDiff)
	}
	if n := torn(t, branch, g.at, testWritten); n != 0 {
		t.Errorf("%d pages are torn", n)
	}
	if _, err := Capture(t.Context(), g.target(), g.hooks(), CaptureOptions{Mode: ModeLive}); !errors.Is(err, ErrNotTracked) {
		t.Errorf("live mode that was asked for: %v, want %v", err, ErrNotTracked)
	}
	if _, err := Capture(t.Context(), g.target(), g.hooks(), CaptureOptions{Mode: "magic"}); err == nil {
		t.Error("an unknown mode is accepted")
	}
	g.sane()
}

// A userfaultfd that is adopted once serves one window after the other, and one only.
func TestCaptureWithKeptUFFD(t *testing.T) {
	g := runningGuest(t, guestConfig{})
	u, err := Adopt(t.Context(), g.process)
	if err != nil {
		t.Fatal(err)
	}
	target := g.target()
	target.UFFD = u
	for range 5 {
		hooks := g.hooks()
		pause := hooks.Pause
		hooks.Pause = func(ctx context.Context) error {
			for _, second := range []Target{target, g.target()} { // by the same userfaultfd, and by another one
				_, err := Capture(ctx, second, Hooks{}, CaptureOptions{Mode: ModeLive})
				if !errors.Is(err, ErrWindowOpen) {
					t.Errorf("a second window: %v, want %v", err, ErrWindowOpen)
				}
			}
			return pause(ctx)
		}
		c, err := Capture(t.Context(), target, hooks, CaptureOptions{Mode: ModeLive})
		if err != nil {
			t.Fatal(err)
		}
		if n := torn(t, g.derive(c.Layer), g.at, testWritten); n != 0 {
			t.Errorf("%d pages are torn", n)
		}
	}
	g.sane()
	if err := errors.Join(u.Close(), u.Close()); err != nil {
		t.Error(err)
	}
	if _, err := Capture(t.Context(), target, g.hooks(), CaptureOptions{Mode: ModeLive}); !errors.Is(err, ErrNotTracked) {
		t.Errorf("with a closed userfaultfd: %v, want %v", err, ErrNotTracked)
	}
}

// A branch of a branch of a branch: every generation runs on from the instant of the one before.
func TestCaptureOfABranch(t *testing.T) {
	needRoot(t)
	img, cfg := base(t, testPages, testWritten), guestConfig{Writers: areas(2, testWritten)}
	for generation := range 6 {
		g := startGuest(t, img, cfg)
		g.do("start")
		g.advances(500)
		c, branch := g.capture(CaptureOptions{Mode: ModeLive, FillGaps: generation%2 == 1})
		if n := torn(t, branch, g.at, testWritten); n != 0 {
			t.Errorf("generation %d: %d pages are torn", generation, n)
		}
		g.sane()
		instant := g.at
		// The source's second branch is again the difference to its own image.
		if _, second := g.capture(CaptureOptions{Mode: ModeLive}); torn(t, second, g.at, testWritten) != 0 {
			t.Errorf("generation %d: the second branch is torn", generation)
		}
		g.kill()
		t.Logf("generation %d: %d pages over %d mappings", generation, c.Pages, img.Mappings())
		img, cfg.Writers = branch, instant
	}
}

func TestManyWindowsAtOnce(t *testing.T) {
	const n = 6
	var guests []*guest
	for range n {
		guests = append(guests, runningGuest(t, guestConfig{}))
	}
	var group errgroup.Group
	for _, g := range guests {
		group.Go(func() error {
			for range 3 {
				c, err := Capture(t.Context(), g.target(), g.hooks(), CaptureOptions{Mode: ModeLive})
				if err != nil {
					return err
				}
				img, err := g.image.Derive(c.Layer)
				if err != nil {
					return err
				}
				if n := torn(t, img, g.at, testWritten); n != 0 {
					return fmt.Errorf("guest %d: %d pages are torn", g.process.PID, n)
				}
				img.Close()
			}
			return nil
		})
	}
	if err := group.Wait(); err != nil {
		t.Error(err)
	}
	for _, g := range guests {
		g.sane()
	}
}

func TestCaptureOfTheDead(t *testing.T) {
	g := runningGuest(t, guestConfig{})
	g.kill()
	for _, mode := range []Mode{"", ModeLive, ModeDiff, ModeStop} {
		if _, err := Capture(t.Context(), g.target(), g.hooks(), CaptureOptions{Mode: mode}); !errors.Is(err, vmm.ErrGone) {
			t.Errorf("mode %q: %v, want %v", mode, err, vmm.ErrGone)
		}
	}
}

func TestCaptureOfAnotherImage(t *testing.T) {
	g := runningGuest(t, guestConfig{})
	g.image = base(t, testPages, 0)
	_, err := Capture(t.Context(), g.target(), g.hooks(), CaptureOptions{})
	if err == nil || !strings.Contains(err.Error(), "is that the image it was started from?") {
		t.Errorf("got error %v, want one that doubts the image", err)
	}
}

// patience is how long what must happen at once may take on a busy machine.
const patience = 15 * time.Second
