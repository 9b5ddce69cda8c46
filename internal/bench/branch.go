package bench

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"iter"
	"slices"
	"time"

	"github.com/forkd/forkd/api"
	"github.com/forkd/forkd/client"
)

// BranchOptions say how running sandboxes are branched.
type BranchOptions struct {
	Tag      string // "": the only snapshot that rests on no other
	DirtyMiB int    // memory that a program in the source rewrites meanwhile
	RateMiB  int    // how fast, a second; 0: as fast as it can
	N        int    // branches in each mode
	Modes    []client.BranchMode
	Progress func(format string, args ...any)
}

// BranchReport is the outcome, as `forkd bench branch --json` prints it.
type BranchReport struct {
	Subject
	DirtyMiB int                   `json:"dirty_mib"`
	RateMiB  int                   `json:"rate_mib_per_s"`
	Modes    map[string]*BranchRun `json:"modes"`
}

// BranchRun is n branches of one running sandbox, one after the other.
type BranchRun struct {
	N             int     `json:"n"`
	Failed        int     `json:"failed"`
	Errors        []Count `json:"errors,omitempty"`
	Warnings      []Count `json:"warnings,omitempty"` // such as that the mode is not to be had here
	PauseMS       Millis  `json:"pause_ms"`           // the monitor did not run the guest
	GuestStallMS  Millis  `json:"guest_stall_ms"`     // a program in the guest got nothing done, at most: by its clock, and the pause where that stopped the clock
	GuestClockMS  Millis  `json:"guest_clock_ms"`     // the longest such time by the guest's clock while the request lasted
	ClockStops    bool    `json:"guest_clock_stops"`  // the guest's clock stands still in a pause
	IdleStallMS   Millis  `json:"idle_stall_ms"`      // the longest in as long a time before, without a branch: what the host does to any guest
	ReadyMS       Millis  `json:"ready_ms"`           // from the request until the snapshot was on disk
	LayerMiB      float64 `json:"layer_mib"`          // memory that the snapshot holds; the median
	WroteMiBPerS  float64 `json:"wrote_mib_per_s"`    // what the program managed
	RewroteRounds int     `json:"rewrote_rounds"`     // how often it went through its memory
}

// Subject is what is measured on.
type Subject struct {
	Tag           string `json:"tag"`
	Engine        string `json:"engine"`
	EngineVersion string `json:"engine_version"`
	Accel         string `json:"accel"`
	MemMiB        int    `json:"mem_mib"`
	python        bool
}

// Millis are percentiles in milliseconds.
type Millis struct {
	P50 float64 `json:"p50"`
	P90 float64 `json:"p90"`
	P99 float64 `json:"p99"`
}

func millis(d []time.Duration) Millis {
	t := percentiles(slices.Clone(d))
	return Millis{t.P50MS, t.P90MS, t.P99MS}
}

// Branch measures what it does to a running sandbox to be branched while a program in it rewrites memory. Each mode has a source of its own;
// what was made is removed again.
func Branch(ctx context.Context, c *client.Client, opt BranchOptions) (BranchReport, error) {
	if opt.Progress == nil {
		opt.Progress = func(string, ...any) {}
	}
	subject, err := subjectOf(ctx, c, opt.Tag)
	if err != nil {
		return BranchReport{}, err
	}
	r := BranchReport{Subject: subject, DirtyMiB: opt.DirtyMiB, RateMiB: opt.RateMiB, Modes: map[string]*BranchRun{}}
	if opt.DirtyMiB >= r.MemMiB {
		return r, fmt.Errorf("%d MiB can't be rewritten in a guest of %d MiB: give less, or a snapshot with more memory", opt.DirtyMiB, r.MemMiB)
	}
	opt.Tag = r.Tag
	for _, mode := range opt.Modes {
		opt.Progress("branching a sandbox that rewrites %d MiB, %d times, %s", opt.DirtyMiB, opt.N, mode)
		run, err := branchMode(ctx, c, opt, mode)
		if err != nil {
			return r, fmt.Errorf("branches, %s: %w", mode, err)
		}
		r.Modes[string(mode)] = run
	}
	return r, ctx.Err()
}

// subjectOf looks at the snapshot, or finds the only one that can be meant.
func subjectOf(ctx context.Context, c *client.Client, tag string) (Subject, error) {
	if tag == "" {
		list, err := c.Snapshots(ctx)
		if err != nil {
			return Subject{}, err
		}
		list = slices.DeleteFunc(list, func(s client.Snapshot) bool { return s.ParentTag != "" || s.Status != "ready" })
		if len(list) != 1 {
			return Subject{}, fmt.Errorf("%d snapshots rest on no other: say with --tag which one to measure (`forkd tree` lists them)", len(list))
		}
		tag = list[0].Tag
	}
	info, err := c.SnapshotInfo(ctx, tag)
	return Subject{Tag: tag, Engine: info.Engine, EngineVersion: info.EngineVersion, Accel: info.Accel, MemMiB: info.MemMiB, python: info.Python}, err
}

// sample is one branch.
type sample struct {
	idle, busy span
	resumed    time.Time // when the answer came that says that the source runs again
	snap       client.SnapshotDetail
	err        error
}

func branchMode(ctx context.Context, c *client.Client, opt BranchOptions, mode client.BranchMode) (_ *BranchRun, err error) {
	source, err := forkOne(ctx, c, opt.Tag)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, c.Kill(context.WithoutCancel(ctx), source)) }()
	w, err := startWriter(ctx, c, source, opt.DirtyMiB, opt.RateMiB)
	if err != nil {
		return nil, err
	}
	stream, err := c.Events(ctx)
	if err != nil {
		return nil, err
	}
	defer func() { _ = stream.Close() }()
	next, end := iter.Pull2(stream.All())
	defer end()
	b := &brancher{w: w, mode: mode, next: next}
	samples := make([]sample, opt.N)
	rest := leastRest
	for i := range samples {
		if samples[i], err = b.branch(ctx, rest); err != nil {
			return nil, err
		}
		rest = max(leastRest, samples[i].busy.length())
	}
	result, err := w.stop(ctx)
	if err != nil {
		return nil, err
	}
	return summariseBranches(samples, result), nil
}

// leastRest is how long the source is left alone between two branches, at least: else as long as a branch takes.
const leastRest = 250 * time.Millisecond

// brancher branches a sandbox over and over.
type brancher struct {
	w    *writer
	mode client.BranchMode
	next func() (client.Event, error, bool)
}

// branch rests, branches, and removes the branch. Its error is one that makes it useless to go on. The guest is asked for its clock before the
// rest and after what is measured, with some time between: an answer is work for its one processor, too.
func (b *brancher) branch(ctx context.Context, rest time.Duration) (s sample, err error) {
	ahead, err := b.w.clockAhead(ctx)
	if err != nil {
		return s, err
	}
	if err := pauseFor(ctx, settle); err != nil {
		return s, err
	}
	s.idle = span{from: time.Now(), fromAhead: ahead, toAhead: ahead}
	if err := pauseFor(ctx, rest); err != nil {
		return s, err
	}
	s.idle.to = time.Now()
	s.busy = span{from: s.idle.to, fromAhead: ahead}
	made, err := b.w.c.Branch(ctx, b.w.id, client.BranchRequest{Mode: b.mode, Wait: client.Bool(false)})
	s.resumed = time.Now()
	if err != nil {
		s.err = err
	} else if s.err, err = b.await(made.Tag); err != nil {
		return s, err
	}
	s.busy.to = time.Now()
	if err := pauseFor(ctx, settle); err != nil {
		return s, err
	}
	if s.busy.toAhead, err = b.w.clockAhead(ctx); err != nil || s.err != nil {
		return s, err
	}
	if s.snap, err = b.w.c.SnapshotInfo(ctx, made.Tag); err != nil {
		return s, err
	}
	return s, b.w.c.DeleteSnapshot(ctx, made.Tag, client.DeleteUnused)
}

// settle keeps what is asked of a guest apart from what is measured: more than the clocks may be off.
const settle = 4 * clockError

func pauseFor(ctx context.Context, d time.Duration) error {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// await waits until a snapshot is on disk; failed is why it is not.
func (b *brancher) await(tag string) (failed, err error) {
	for {
		event, err, ok := b.next()
		switch {
		case err != nil:
			return nil, err
		case !ok:
			return nil, errors.New("the daemon's events ended")
		case event.Tag != tag:
		case event.Kind == api.EventKindSnapshotReady:
			return nil, nil
		case event.Kind == api.EventKindSnapshotFailed:
			return fmt.Errorf("it could not be stored: %s", event.Reason), nil
		}
	}
}

// clockStops says whether the guest's clock lost the time of the pauses.
func clockStops(samples []sample) bool {
	var paused, lost time.Duration
	for _, s := range samples {
		if s.err == nil {
			paused += s.pause()
			lost += s.busy.fromAhead - s.busy.toAhead
		}
	}
	return lost > paused/2
}

func (s sample) pause() time.Duration {
	return time.Duration(s.snap.PauseMS * float64(time.Millisecond))
}

// summariseBranches puts together what the host and the guest saw.
func summariseBranches(samples []sample, saw writerResult) *BranchRun {
	run := &BranchRun{N: len(samples), RewroteRounds: saw.Rounds, ClockStops: clockStops(samples)}
	if saw.Seconds > 0 {
		run.WroteMiBPerS = round2(float64(saw.Bytes) / (1 << 20) / saw.Seconds)
	}
	var pause, stall, seen, idle, ready []time.Duration
	var layer []int64
	errs, warnings := map[string]int{}, map[string]int{}
	for _, s := range samples {
		idle = append(idle, saw.longestGap(s.idle))
		if s.err != nil {
			run.Failed++
			errs[s.err.Error()]++
			continue
		}
		pause, seen, ready = append(pause, s.pause()), append(seen, saw.longestGap(s.busy)), append(ready, s.busy.length())
		stall = append(stall, saw.stall(s, run.ClockStops))
		layer = append(layer, cmp.Or(s.snap.DiffPhysicalBytes, s.snap.MemoryPhysicalBytes))
		if s.snap.Warning != "" {
			warnings[s.snap.Warning]++
		}
	}
	slices.Sort(layer)
	run.PauseMS, run.GuestStallMS, run.GuestClockMS, run.IdleStallMS, run.ReadyMS = millis(pause), millis(stall), millis(seen), millis(idle), millis(ready)
	run.LayerMiB = mib(Percentile(layer, 50))
	run.Errors, run.Warnings = counts(errs), counts(warnings)
	return run
}
