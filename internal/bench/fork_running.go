package bench

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/forkd/forkd/client"
)

// ForkRunningOptions say how a running sandbox is forked.
type ForkRunningOptions struct {
	Tag      string // of the source; "": the only snapshot that rests on no other
	N        int    // children of each request
	Rounds   int    // requests of each kind, in turns
	DirtyMiB int    // memory that a program in the source rewrites meanwhile
	RateMiB  int    // how fast, a second; 0: as fast as it can
	Progress func(format string, args ...any)
}

// ForkRunningReport is the outcome, as `forkd bench fork-running --json` prints it.
type ForkRunningReport struct {
	Subject
	N         int     `json:"n"`
	Rounds    int     `json:"rounds"`
	DirtyMiB  int     `json:"dirty_mib"`
	RateMiB   int     `json:"rate_mib_per_s"`
	PauseMS   Millis  `json:"pause_ms"`   // of the source
	RunningMS Millis  `json:"running_ms"` // from the request until all children of the running sandbox had answered a ping
	ColdMS    Millis  `json:"cold_ms"`    // the same for children of a snapshot of that sandbox, which was there before
	Ratio     float64 `json:"ratio"`      // running to cold, medians
	Failed    int     `json:"failed"`     // requests of either kind
	Errors    []Count `json:"errors,omitempty"`
}

// ForkRunning measures forks of a running sandbox in which a program rewrites memory, beside cold forks of a snapshot of it. It removes what it
// made.
func ForkRunning(ctx context.Context, c *client.Client, opt ForkRunningOptions) (_ ForkRunningReport, err error) {
	if opt.Progress == nil {
		opt.Progress = func(string, ...any) {}
	}
	subject, err := subjectOf(ctx, c, opt.Tag)
	if err != nil {
		return ForkRunningReport{}, err
	}
	r := ForkRunningReport{Subject: subject, N: opt.N, Rounds: opt.Rounds, DirtyMiB: opt.DirtyMiB, RateMiB: opt.RateMiB}
	if opt.DirtyMiB >= r.MemMiB {
		return r, fmt.Errorf("%d MiB can't be rewritten in a guest of %d MiB: give less, or a snapshot with more memory", opt.DirtyMiB, r.MemMiB)
	}
	source, err := forkOne(ctx, c, r.Tag)
	if err != nil {
		return r, err
	}
	defer func() { err = errors.Join(err, c.Kill(context.WithoutCancel(ctx), source)) }()
	if _, err := startWriter(ctx, c, source, opt.DirtyMiB, opt.RateMiB); err != nil {
		return r, err
	}
	snap, err := c.Branch(ctx, source, client.BranchRequest{Wait: client.Bool(true)})
	if err != nil {
		return r, fmt.Errorf("a snapshot to compare with: %w", err)
	}
	defer func() {
		err = errors.Join(err, c.DeleteSnapshot(context.WithoutCancel(ctx), snap.Tag, client.DeleteUnused))
	}()

	opt.Progress("forking a sandbox that rewrites %d MiB, and a snapshot of it, %d children each, %d times", opt.DirtyMiB, opt.N, opt.Rounds)
	var pauses, running, cold []time.Duration
	errs := map[string]int{}
	for range opt.Rounds {
		var forked client.ForkedRunning
		took, err := allAnswer(ctx, c, func() (_ []client.Sandbox, err error) {
			forked, err = c.ForkRunning(ctx, source, client.ForkRunningRequest{N: client.Int(opt.N)})
			return forked.Sandboxes, err
		})
		if err != nil {
			errs[err.Error()]++
		} else {
			running = append(running, took)
			pauses = append(pauses, time.Duration(forked.PauseMS*float64(time.Millisecond)))
		}
		took, err = allAnswer(ctx, c, func() ([]client.Sandbox, error) {
			return c.Fork(ctx, client.ForkRequest{SnapshotTag: snap.Tag, N: client.Int(opt.N), Path: "cold"})
		})
		if err != nil {
			errs[err.Error()]++
		} else {
			cold = append(cold, took)
		}
		if err := ctx.Err(); err != nil {
			return r, err
		}
	}
	r.PauseMS, r.RunningMS, r.ColdMS = millis(pauses), millis(running), millis(cold)
	r.Ratio = ratio(r.RunningMS.P50, r.ColdMS.P50)
	r.Errors = counts(errs)
	for _, e := range r.Errors {
		r.Failed += e.Count
	}
	return r, nil
}

// allAnswer returns how long it took until all children that fork makes had answered a ping. It kills them.
func allAnswer(ctx context.Context, c *client.Client, fork func() ([]client.Sandbox, error)) (took time.Duration, err error) {
	start := time.Now()
	list, err := fork()
	children := make([]Child, len(list))
	for i, s := range list {
		children[i].ID = s.ID
	}
	defer func() { err = errors.Join(err, KillAll(context.WithoutCancel(ctx), c, children)) }()
	if err != nil {
		return 0, err
	}
	errs := make([]error, len(list))
	var wg sync.WaitGroup
	for i, s := range list {
		wg.Go(func() { errs[i] = firstAnswer(ctx, c, s.ID, AnswerPing) })
	}
	wg.Wait()
	return time.Since(start), errors.Join(errs...)
}
