package enginebench

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"sync"
	"time"

	"github.com/forkd/forkd/internal/vmm"
	"github.com/forkd/forkd/internal/vmm/probeguest"
)

// What is measured of starts.
const (
	startMiB   = 256
	parallel   = 8  // starts at a time
	coldRounds = 20 // of one fork; of more, fewer
	poolSize   = 40
)

func cpus() int { return runtime.NumCPU() }

// starts measures forks of an idle guest.
func (r *rig) starts(ctx context.Context, _ Options, report *Report) error {
	f, err := r.freeze(ctx, startMiB)
	if err != nil {
		return err
	}
	defer f.close()
	for _, n := range []int{1, 10, 100} {
		r.say("%d forks at once", n)
		s, err := r.cold(ctx, f, n)
		if err != nil {
			return fmt.Errorf("%d at once: %w", n, err)
		}
		report.Starts = append(report.Starts, s)
	}
	r.say("claims from a pool of %d", poolSize)
	s, err := r.claims(ctx, f)
	if err != nil {
		return fmt.Errorf("from a pool: %w", err)
	}
	report.Starts = append(report.Starts, s)
	return nil
}

// fork starts one child and waits for its guest's answer; the guest then halts.
func (r *rig) fork(ctx context.Context, f *frozen) (_ vmm.Machine, load, all time.Duration, err error) {
	begin := time.Now()
	m, err := r.child(ctx, f.shape, f.image, f.state)
	if err != nil {
		return nil, 0, 0, err
	}
	load = time.Since(begin)
	if err := run(ctx, m, probeguest.Halt); err != nil {
		return nil, 0, 0, errors.Join(err, m.Kill())
	}
	return m, load, time.Since(begin), nil
}

// cold forks n children at once, round after round.
func (r *rig) cold(ctx context.Context, f *frozen, n int) (Start, error) {
	s := Start{From: "cold", N: n, Rounds: max(coldRounds/n, 3), Parallel: min(n, parallel), MemMiB: startMiB}
	var each, loads, rounds []time.Duration
	for range s.Rounds {
		var mu sync.Mutex
		var machines []vmm.Machine
		var failed error
		var wg sync.WaitGroup
		slots := make(chan struct{}, parallel)
		begin := time.Now()
		for range n {
			slots <- struct{}{}
			wg.Go(func() {
				m, load, all, err := r.fork(ctx, f)
				<-slots
				mu.Lock()
				defer mu.Unlock()
				if failed = errors.Join(failed, err); err == nil {
					machines, each, loads = append(machines, m), append(each, all), append(loads, load)
				}
			})
		}
		wg.Wait()
		rounds = append(rounds, time.Since(begin))
		for _, m := range machines {
			failed = errors.Join(failed, m.Kill())
		}
		if failed != nil {
			return s, failed
		}
	}
	s.P50MS, s.P90MS, s.MaxMS = quantile(each, 0.5), quantile(each, 0.9), quantile(each, 1)
	s.AllP50MS, s.AllMaxMS, s.LoadP50MS = quantile(rounds, 0.5), quantile(rounds, 1), quantile(loads, 0.5)
	return s, nil
}

// claims resumes children that were started, heard and stopped ahead.
func (r *rig) claims(ctx context.Context, f *frozen) (_ Start, err error) {
	s := Start{From: "pool", N: 1, Rounds: poolSize, Parallel: 1, MemMiB: startMiB}
	var pool []vmm.Machine
	defer func() {
		for _, m := range pool {
			err = errors.Join(err, m.Kill())
		}
	}()
	for range poolSize {
		m, err := r.child(ctx, f.shape, f.image, f.state)
		if err != nil {
			return s, err
		}
		pool = append(pool, m)
		if err := errors.Join(m.Resume(ctx), ask(ctx, m, []byte{probeguest.Echo}, probeguest.Echo), m.Pause(ctx)); err != nil {
			return s, err
		}
	}
	var each []time.Duration
	for _, m := range pool {
		begin := time.Now()
		if err := run(ctx, m, probeguest.Halt); err != nil {
			return s, err
		}
		each = append(each, time.Since(begin))
	}
	s.P50MS, s.P90MS, s.MaxMS = quantile(each, 0.5), quantile(each, 0.9), quantile(each, 1)
	return s, nil
}
