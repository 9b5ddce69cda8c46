package memory

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/forkd/forkd/internal/failpoint"
	"github.com/forkd/forkd/internal/vmm"
)

// failures are the points of a capture in each mode, and later hits of those that are hit often.
var failures = []struct {
	mode  Mode
	point string
	nth   int
}{
	{ModeLive, PointAdopted, 1},
	{ModeLive, PointArming, 1},
	{ModeLive, PointArming, 3},
	{ModeLive, PointAhead, 1},
	{ModeLive, PointPaused, 1},
	{ModeLive, PointHeld, 1},
	{ModeLive, PointResumed, 1},
	{ModeLive, PointSweep, 1},
	{ModeLive, PointSweep, 30},
	{ModeLive, PointDone, 1},
	{ModeDiff, PointAhead, 1},
	{ModeDiff, PointPaused, 1},
	{ModeDiff, PointHeld, 1},
	{ModeDiff, PointResumed, 1},
	{ModeDiff, PointDone, 1},
}

// A capture that fails anywhere must leave a guest that runs, that nothing holds up, and that can be captured again.
func TestCaptureFails(t *testing.T) {
	g := runningGuest(t, guestConfig{})
	for _, f := range failures {
		t.Run(fmt.Sprintf("%s at %s@%d", f.mode, f.point, f.nth), func(t *testing.T) {
			points := failpoint.New()
			points.On(f.point, f.nth, func(context.Context) error { return failpoint.ErrInjected })
			paused, resumed := 0, 0
			h := g.hooks()
			hooks := Hooks{
				Pause:  func(ctx context.Context) error { paused++; return h.Pause(ctx) },
				Resume: func(ctx context.Context) error { resumed++; return h.Resume(ctx) },
			}
			_, err := Capture(t.Context(), g.target(), hooks, CaptureOptions{Mode: f.mode, Failpoints: points})
			if !errors.Is(err, failpoint.ErrInjected) {
				t.Fatalf("got error %v, want %v", err, failpoint.ErrInjected)
			}
			if paused != resumed || paused > 1 {
				t.Errorf("paused %d times, resumed %d times", paused, resumed)
			}
			g.advances(testWritten)
			g.sane()
		})
	}
	_, branch := g.capture(CaptureOptions{Mode: ModeLive})
	if n := torn(t, branch, g.at, testWritten); n != 0 {
		t.Errorf("after all failures: %d pages are torn", n)
	}
}

func TestHooksFail(t *testing.T) {
	broken := errors.New("broken")
	tests := map[string]struct {
		pause, resume     error // what the hook returns after it has done its work
		resumeFailures    int
		wantBroken, stuck bool
	}{
		"pause fails":         {pause: broken, wantBroken: true},
		"resume fails once":   {resume: broken, resumeFailures: 1},
		"resume fails always": {resume: broken, resumeFailures: 9, wantBroken: true, stuck: true},
		"both fail":           {pause: errors.New("too"), resume: broken, resumeFailures: 9, wantBroken: true, stuck: true},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			g := runningGuest(t, guestConfig{})
			h := g.hooks()
			hooks := Hooks{
				Pause: func(ctx context.Context) error { return errors.Join(h.Pause(ctx), tt.pause) },
				Resume: func(ctx context.Context) error {
					if tt.resumeFailures--; tt.resumeFailures >= 0 {
						return tt.resume
					}
					return h.Resume(ctx)
				},
			}
			_, err := Capture(t.Context(), g.target(), hooks, CaptureOptions{Mode: ModeLive})
			if errors.Is(err, broken) != tt.wantBroken || errors.Is(err, ErrNotResumed) != tt.stuck {
				t.Errorf("got error %v, want broken: %t, not resumed: %t", err, tt.wantBroken, tt.stuck)
			}
			g.do("resume")
			g.advances(testWritten)
			g.sane()
		})
	}
}

// A hook that panics must not leave the guest stopped.
func TestPausePanics(t *testing.T) {
	g := runningGuest(t, guestConfig{})
	h := g.hooks()
	func() {
		defer func() { recover() }()
		Capture(t.Context(), g.target(), Hooks{
			Pause:  func(ctx context.Context) error { h.Pause(ctx); panic("pause") },
			Resume: h.Resume,
		}, CaptureOptions{Mode: ModeLive})
		t.Error("the panic was swallowed")
	}()
	g.advances(testWritten)
}

func TestDeadline(t *testing.T) {
	g := runningGuest(t, guestConfig{})
	for _, f := range failures {
		if f.mode != ModeLive {
			continue
		}
		t.Run(fmt.Sprintf("%s@%d", f.point, f.nth), func(t *testing.T) {
			points := failpoint.New()
			points.On(f.point, f.nth, func(ctx context.Context) error { <-ctx.Done(); return nil })
			start := time.Now()
			_, err := Capture(t.Context(), g.target(), g.hooks(), CaptureOptions{Mode: ModeLive, Deadline: time.Second, Failpoints: points})
			if f.point != PointDone && !errors.Is(err, errDeadline) {
				t.Errorf("got error %v, want %v", err, errDeadline)
			}
			if took := time.Since(start); took > patience {
				t.Errorf("took %v, the deadline was a second", took)
			}
			g.advances(testWritten)
			g.sane()
		})
	}
}

// A guest that dies anywhere in a capture must yield a clean error at once.
func TestGuestDiesInCapture(t *testing.T) {
	for _, f := range failures {
		t.Run(fmt.Sprintf("%s at %s@%d", f.mode, f.point, f.nth), func(t *testing.T) {
			g := runningGuest(t, guestConfig{})
			points := failpoint.New()
			points.On(f.point, f.nth, func(context.Context) error { g.kill(); return nil })
			start := time.Now()
			_, err := Capture(t.Context(), g.target(), g.hooks(), CaptureOptions{Mode: f.mode, Failpoints: points})
			if !errors.Is(err, vmm.ErrGone) {
				t.Errorf("got error %v, want %v", err, vmm.ErrGone)
			}
			if took := time.Since(start); took > patience {
				t.Errorf("took %v", took)
			}
		})
	}
}

// If we are killed anywhere in a capture the guest must go on, whole, and the next daemon must be able to capture it.
func TestKilledInCapture(t *testing.T) {
	for _, f := range failures {
		t.Run(fmt.Sprintf("%s at %s@%d", f.mode, f.point, f.nth), func(t *testing.T) {
			g := runningGuest(t, guestConfig{})
			h := startHandler(t, g, f.mode, fmt.Sprintf("%s@%d=kill", f.point, f.nth))
			if err := h.serve(g); err != nil {
				t.Fatal(err)
			}
			g.do("resume") // as a daemon that comes back does
			g.advances(2 * testWritten)
			_, branch := g.capture(CaptureOptions{Mode: ModeLive})
			if n := torn(t, branch, g.at, testWritten); n != 0 {
				t.Errorf("the guest's next branch has %d torn pages", n)
			}
			g.sane()
		})
	}
}

// runHandler is the helper "handler": a process that captures a guest whose base is descriptor 3. It asks for pause and resume
// on its standard output and gets the answer on its standard input.
func runHandler(args []string) error {
	var id vmm.Process
	if err := json.Unmarshal([]byte(args[0]), &id); err != nil {
		return err
	}
	points, err := failpoint.Parse(args[2])
	if err != nil {
		return err
	}
	img, err := NewImage(os.NewFile(3, "base"))
	if err != nil {
		return err
	}
	answers := bufio.NewReader(os.Stdin)
	ask := func(what string) func(context.Context) error {
		return func(context.Context) error {
			fmt.Println(what)
			_, err := answers.ReadString('\n')
			return err
		}
	}
	_, err = Capture(context.Background(), Target{Process: id, Image: img}, Hooks{Pause: ask("pause"), Resume: ask("resume")},
		CaptureOptions{Mode: Mode(args[1]), Failpoints: points})
	return err
}

type handler struct {
	stdin  io.WriteCloser
	stdout *bufio.Reader
	wait   func() error
}

func startHandler(t *testing.T, g *guest, mode Mode, points string) *handler {
	t.Helper()
	id, err := json.Marshal(g.process)
	if err != nil {
		t.Fatal(err)
	}
	cmd := helperCommand("handler", string(id), string(mode), points)
	cmd.ExtraFiles = []*os.File{g.image.Base()}
	cmd.Stderr = os.Stderr
	h := &handler{wait: cmd.Wait}
	if h.stdin, err = cmd.StdinPipe(); err != nil {
		t.Fatal(err)
	}
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	h.stdout = bufio.NewReader(stdout)
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	return h
}

// serve does what the handler asks for until it has been killed.
func (h *handler) serve(g *guest) error {
	for {
		command, err := h.stdout.ReadString('\n')
		if err != nil {
			break
		}
		g.do(strings.TrimSpace(command))
		fmt.Fprintln(h.stdin)
	}
	if err := h.wait(); err == nil || !strings.Contains(err.Error(), "killed") {
		return fmt.Errorf("handler ended with %v, want it killed", err)
	}
	return nil
}
