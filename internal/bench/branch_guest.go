package bench

import (
	"context"
	_ "embed"
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/forkd/forkd/client"
)

//go:embed branch_writer.py
var writerCode []byte

const (
	writerDir   = "/tmp/forkd-bench"
	writerLimit = 2 * time.Minute // until it has been through its memory once, or wrote down what it saw
	outputLimit = 8 << 20         // the most there is
)

// writer is a program in a guest that rewrites memory and notes when it stood still.
type writer struct {
	c   *client.Client
	id  string
	pid int
}

// writerResult is what the program saw.
type writerResult struct {
	Seconds float64    `json:"seconds"`
	Bytes   int64      `json:"bytes"`
	Rounds  int        `json:"rounds"`
	Gaps    [][2]int64 `json:"gaps"` // the guest's clock at its end, and how long it was; nanoseconds
}

// startWriter returns when the program has written all of its memory once.
func startWriter(ctx context.Context, c *client.Client, id string, dirtyMiB, rateMiB int) (*writer, error) {
	w := &writer{c: c, id: id}
	start := fmt.Sprintf("mkdir -p %[1]s && cat >%[1]s/writer.py && { setsid python3 %[1]s/writer.py %[2]d %[3]d %[1]s >%[1]s/log 2>&1 </dev/null & echo $!; }",
		writerDir, dirtyMiB, rateMiB)
	out, err := w.sh(ctx, start, writerCode)
	if err != nil {
		return nil, fmt.Errorf("start the program that writes: %w", err)
	}
	if w.pid, err = strconv.Atoi(out); err != nil {
		return nil, fmt.Errorf("process of the program that writes: %w", err)
	}
	return w, w.await(ctx, "ready")
}

// await waits for a file that the program makes.
func (w *writer) await(ctx context.Context, name string) error {
	_, err := w.sh(ctx, fmt.Sprintf("while ! test -e %[1]s/%[2]s; do kill -0 %[3]d 2>/dev/null || test -e %[1]s/%[2]s || { cat %[1]s/log >&2; exit 1; }; sleep 0.05; done",
		writerDir, name, w.pid), nil)
	if err != nil {
		return fmt.Errorf("the program that writes memory in sandbox %s (it needs python3 and that much memory): %w", w.id, err)
	}
	return nil
}

// clockAhead returns how far the guest's clock is ahead of this one's, from the quickest of some pings.
func (w *writer) clockAhead(ctx context.Context) (ahead time.Duration, err error) {
	const pings = 3
	best := time.Duration(-1)
	for range pings {
		before := time.Now()
		pong, err := w.c.Ping(ctx, w.id)
		if err != nil {
			return 0, err
		}
		if took := time.Since(before); best < 0 || took < best {
			best = took
			ahead = time.UnixMilli(pong.ClockUnixMS).Add(clockTick / 2).Sub(before.Add(took / 2))
		}
	}
	return ahead, nil
}

// stop ends the program and returns what it saw.
func (w *writer) stop(ctx context.Context) (r writerResult, err error) {
	if _, err := w.sh(ctx, fmt.Sprintf("kill -TERM %d", w.pid), nil); err != nil {
		return r, err
	}
	if err := w.await(ctx, "result"); err != nil {
		return r, err
	}
	out, err := w.sh(ctx, "cat "+writerDir+"/result", nil)
	if err != nil {
		return r, err
	}
	if err := json.Unmarshal([]byte(out), &r); err != nil {
		return r, fmt.Errorf("result of the program that writes: %w", err)
	}
	return r, nil
}

// sh runs a shell command in the guest and returns what it printed.
func (w *writer) sh(ctx context.Context, command string, stdin []byte) (string, error) {
	res, err := w.c.Exec(ctx, w.id, client.ExecRequest{Args: []string{"sh", "-c", command}, Stdin: stdin, Timeout: writerLimit, MaxOutputBytes: outputLimit})
	switch {
	case err != nil:
		return "", err
	case res.TimedOut:
		return "", errors.New("it took too long")
	case res.ExitCode != 0:
		return "", fmt.Errorf("exit code %d: %s", res.ExitCode, strings.TrimSpace(string(res.Stderr)))
	}
	return strings.TrimSpace(string(res.Stdout)), nil
}

// span is a time on this side's clock. The guest's clock may stand still in it.
type span struct {
	from, to  time.Time
	fromAhead time.Duration // of the guest's clock, at from
	toAhead   time.Duration
}

func (s span) length() time.Duration { return s.to.Sub(s.from) }

const (
	clockTick  = time.Millisecond     // of what a ping tells
	clockError = 5 * time.Millisecond // how far a moment of the guest may be off
)

// touches says whether one of the program's gaps reaches into the span.
func (s span) touches(gap [2]int64) bool {
	return gap[0] >= s.from.Add(s.fromAhead-clockError).UnixNano() && gap[0]-gap[1] <= s.to.Add(s.toAhead+clockError).UnixNano()
}

// longestGap returns the longest time in a span in which the program got nothing done, by the guest's clock.
func (r writerResult) longestGap(s span) (longest time.Duration) {
	for _, g := range r.Gaps {
		if s.touches(g) {
			longest = max(longest, time.Duration(g[1]))
		}
	}
	return longest
}

// stall returns the longest time in which the program got nothing done while its machine was branched. A clock that the pause stopped tells
// nothing of it, so the pause is added to whatever gap it may have been in.
func (r writerResult) stall(s sample, clockStops bool) time.Duration {
	if !clockStops {
		return r.longestGap(s.busy)
	}
	longest := s.pause()
	paused := span{from: s.resumed.Add(-s.pause() - clockError), to: s.resumed, fromAhead: s.busy.fromAhead, toAhead: s.busy.fromAhead}
	for _, g := range r.Gaps {
		length := time.Duration(g[1])
		if paused.touches(g) {
			length += s.pause()
		}
		if s.busy.touches(g) {
			longest = max(longest, length)
		}
	}
	return longest
}
