// Package bench measures what forkd is for, through the daemon's public API: from a request until a guest answered, with the failures
// counted, and the memory a child costs. It runs no machines by itself and asserts nothing: figures are for people, in bench/.
package bench

import (
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"sync"
	"time"

	"github.com/forkd/forkd/api"
	"github.com/forkd/forkd/client"
)

// Options say what to measure.
type Options struct {
	Tag      string
	N        int    // children at a time
	Rounds   int    // how often; 0: once. The times are over all
	Only     string // "cold", "claim", or "" for both
	Progress func(format string, args ...any)
}

// Report is the outcome, as `forkd bench --json` prints it.
type Report struct {
	Tag           string  `json:"tag"`
	Engine        string  `json:"engine"`
	EngineVersion string  `json:"engine_version"`
	Accel         string  `json:"accel"`
	MemMiB        int     `json:"mem_mib"`
	N             int     `json:"n"`
	Rounds        int     `json:"rounds"`
	BootWarmMS    float64 `json:"boot_warm_ms"`
	Cold          *Run    `json:"cold,omitempty"`       // the first answer is a ping's, as in the figures of other systems
	ColdWork      *Run    `json:"cold_work,omitempty"`  // the first answer is work: an eval, or an exec where there is no interpreter
	Claim         *Run    `json:"claim,omitempty"`      // from a full pool, a ping
	ClaimWork     *Run    `json:"claim_work,omitempty"` // from a full pool, work
	Memory        *Memory `json:"memory,omitempty"`
}

// Run is children asked for at the same time, each by a request of its own, in one round after the other.
type Run struct {
	N      int     `json:"n"` // of all rounds
	Failed int     `json:"failed"`
	Errors []Count `json:"errors,omitempty"`
	Ready  Times   `json:"ready"`  // until the request was answered: the guest had acknowledged its identity
	Answer Times   `json:"answer"` // until the guest answered its first question
}

// Times are milliseconds from a request on, of the requests that succeeded. AllMS is from the first request to the last answer, in the slowest
// round.
type Times struct {
	P50MS float64 `json:"p50_ms"`
	P90MS float64 `json:"p90_ms"`
	P99MS float64 `json:"p99_ms"`
	AllMS float64 `json:"all_ms"`
}

// Count is an error and how often it came.
type Count struct {
	Error string `json:"error"`
	Count int    `json:"count"`
}

// Memory is what children cost before their first eval.
type Memory struct {
	N          int   `json:"n"`
	AnonKiBP50 int64 `json:"anon_kib_p50"` // guest memory of its own
	PSSKiBP50  int64 `json:"pss_kib_p50"`  // the whole monitor with its share of what siblings share
	RSSKiBP50  int64 `json:"rss_kib_p50"`
}

// Child is one measured child.
type Child struct {
	ID            string
	Ready, Answer time.Duration // since its request
	End           time.Time
	Err           error
}

// Bench measures cold forks, the memory of the children, and claims from a full pool. It kills what it started and puts the pool's
// size back.
func Bench(ctx context.Context, c *client.Client, opt Options) (Report, error) {
	if opt.Progress == nil {
		opt.Progress = func(string, ...any) {}
	}
	info, err := c.SnapshotInfo(ctx, opt.Tag)
	if err != nil {
		return Report{}, err
	}
	opt.Rounds = max(opt.Rounds, 1)
	r := Report{Tag: opt.Tag, N: opt.N, Rounds: opt.Rounds, Engine: info.Engine, EngineVersion: info.EngineVersion, Accel: info.Accel, MemMiB: info.MemMiB,
		BootWarmMS: info.BootWarmMS}
	before := info.Pool.Size
	defer c.SetPool(context.WithoutCancel(ctx), opt.Tag, before) // best effort: the run's own error matters more
	work := WorkOf(info.Python)
	if opt.Only != "claim" {
		if _, err := c.SetPool(ctx, opt.Tag, 0); err != nil {
			return r, err
		}
		opt.Progress("forking %d children cold, each asked for a ping, then %d that are asked to work", opt.N, opt.N)
		if r.Cold, r.ColdWork, err = both(ctx, c, opt, "cold", work, func() error { return nil }); err != nil {
			return r, err
		}
		opt.Progress("measuring the memory of %d children", min(opt.N, 10))
		if r.Memory, err = MeasureMemory(ctx, c, opt.Tag, min(opt.N, 10)); err != nil {
			return r, err
		}
	}
	if opt.Only != "cold" {
		opt.Progress("claiming %d children from a full pool, each asked for a ping, then %d that are asked to work", opt.N, opt.N)
		fill := func() error { return FillPool(ctx, c, opt.Tag, opt.N) }
		if r.Claim, r.ClaimWork, err = both(ctx, c, opt, "pool", work, fill); err != nil {
			return r, err
		}
	}
	return r, ctx.Err()
}

// both measures pings, then work, each after prepare, and kills the children.
func both(ctx context.Context, c *client.Client, opt Options, path string, work Answer, prepare func() error) (ping, worked *Run, err error) {
	for _, m := range []struct {
		answer Answer
		run    **Run
	}{{AnswerPing, &ping}, {work, &worked}} {
		var all []Child
		var longest float64
		for range opt.Rounds {
			if err := prepare(); err != nil {
				return ping, worked, err
			}
			children, run := Measure(ctx, c, opt.Tag, path, opt.N, m.answer)
			all = append(all, children...)
			longest = max(longest, run.Answer.AllMS)
			if err := KillAll(ctx, c, children); err != nil {
				return ping, worked, err
			}
		}
		run := Summarise(all, time.Now())
		run.Answer.AllMS = longest
		*m.run = &run
	}
	return ping, worked, nil
}

// Answer is the first thing a child is asked for.
type Answer string

// Answers.
const (
	AnswerPing Answer = "ping"
	AnswerEval Answer = "eval"
	AnswerExec Answer = "exec"
)

// WorkOf is the least work a child can be asked for: an eval where it has an interpreter.
func WorkOf(python bool) Answer {
	if python {
		return AnswerEval
	}
	return AnswerExec
}

// Measure asks for n children at once, each by a request of its own, and for a first answer of each.
func Measure(ctx context.Context, c *client.Client, tag, path string, n int, answer Answer) ([]Child, Run) {
	children := make([]Child, n)
	var wg sync.WaitGroup
	start := time.Now()
	for i := range children {
		wg.Go(func() { children[i] = MeasureOne(ctx, c, tag, path, answer) })
	}
	wg.Wait()
	return children, Summarise(children, start)
}

// MeasureOne asks for one child and its first answer.
func MeasureOne(ctx context.Context, c *client.Client, tag, path string, answer Answer) (child Child) {
	start := time.Now()
	defer func() { child.End = time.Now() }()
	list, err := c.Fork(ctx, client.ForkRequest{SnapshotTag: tag, N: client.Int(1), Path: api.ForkRequestPath(path)})
	if err != nil {
		child.Err = err
		return child
	}
	child.ID, child.Ready = list[0].ID, time.Since(start)
	child.Err = firstAnswer(ctx, c, child.ID, answer)
	child.Answer = time.Since(start)
	return child
}

func firstAnswer(ctx context.Context, c *client.Client, id string, answer Answer) error {
	switch answer {
	case AnswerPing:
		_, err := c.Ping(ctx, id)
		return err
	case AnswerEval:
		res, err := c.Eval(ctx, id, client.EvalRequest{Code: "6 * 7"})
		if err == nil && (res.Result == nil || *res.Result != "42") {
			err = fmt.Errorf("eval of 6 * 7 in %s: %+v", id, res)
		}
		return err
	}
	res, err := c.Exec(ctx, id, client.ExecRequest{Args: []string{"true"}})
	if err == nil && res.ExitCode != 0 {
		err = fmt.Errorf("exec of true in %s: exit code %d", id, res.ExitCode)
	}
	return err
}

// Summarise counts failures and computes percentiles. start is when the first request was made.
func Summarise(children []Child, start time.Time) Run {
	run := Run{N: len(children)}
	var ready, answer []time.Duration
	var last time.Duration
	errs := map[string]int{}
	for _, c := range children {
		if c.Err != nil {
			run.Failed++
			errs[c.Err.Error()]++
			continue
		}
		ready, answer = append(ready, c.Ready), append(answer, c.Answer)
		last = max(last, c.End.Sub(start))
	}
	for text, n := range errs {
		run.Errors = append(run.Errors, Count{text, n})
	}
	run.Ready, run.Answer = percentiles(ready), percentiles(answer)
	run.Answer.AllMS = ms(last)
	if n := len(ready); n > 0 {
		run.Ready.AllMS = ms(slices.Max(ready))
	}
	return run
}

func percentiles(d []time.Duration) Times {
	slices.Sort(d)
	return Times{P50MS: ms(Percentile(d, 50)), P90MS: ms(Percentile(d, 90)), P99MS: ms(Percentile(d, 99))}
}

// Percentile returns the nearest-rank percentile p (0 to 100) of sorted values, the zero value for none.
func Percentile[T any](sorted []T, p float64) (v T) {
	if len(sorted) == 0 {
		return v
	}
	rank := int(math.Ceil(p / 100 * float64(len(sorted))))
	return sorted[max(rank, 1)-1]
}

func ms(d time.Duration) float64 { return math.Round(d.Seconds()*1e5) / 100 }

// MeasureMemory forks n children, reads what they cost before they were asked anything, and kills them.
func MeasureMemory(ctx context.Context, c *client.Client, tag string, n int) (*Memory, error) {
	list, err := c.Fork(ctx, client.ForkRequest{SnapshotTag: tag, N: client.Int(n), Path: "cold"})
	children := make([]Child, len(list))
	for i, s := range list {
		children[i].ID = s.ID
	}
	defer KillAll(context.WithoutCancel(ctx), c, children)
	if err != nil {
		return nil, fmt.Errorf("fork %d children: %w", n, err)
	}
	var anon, pss, rss []int64
	for _, s := range list {
		st, err := c.Stats(ctx, s.ID)
		if err != nil {
			return nil, err
		}
		anon, pss, rss = append(anon, st.GuestAnonKiB), append(pss, st.PSSKiB), append(rss, st.RSSKiB)
	}
	for _, v := range [][]int64{anon, pss, rss} {
		slices.Sort(v)
	}
	return &Memory{N: n, AnonKiBP50: Percentile(anon, 50), PSSKiBP50: Percentile(pss, 50), RSSKiBP50: Percentile(rss, 50)}, nil
}

// poolPoll is how often the pool is looked at while it fills.
const poolPoll = 100 * time.Millisecond

// FillPool sets the pool's size and waits until it is full.
func FillPool(ctx context.Context, c *client.Client, tag string, size int) error {
	if _, err := c.SetPool(ctx, tag, size); err != nil {
		return err
	}
	tick := time.NewTicker(poolPoll)
	defer tick.Stop()
	for {
		p, err := c.Pool(ctx, tag)
		switch {
		case err != nil:
			return err
		case p.Ready >= size:
			return nil
		case p.Problem != "":
			return fmt.Errorf("fill the pool of %s: %d of %d ready: %s", tag, p.Ready, size, p.Problem)
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return fmt.Errorf("fill the pool of %s: %d of %d ready: %w", tag, p.Ready, size, ctx.Err())
		}
	}
}

// killers is how many children are killed at a time.
const killers = 8

// KillAll kills children, also those that failed after they had an id.
func KillAll(ctx context.Context, c *client.Client, children []Child) error {
	ids := make(chan string)
	errs := make([]error, killers)
	var wg sync.WaitGroup
	for i := range killers {
		wg.Go(func() {
			for id := range ids {
				if err := c.Kill(ctx, id); err != nil && !client.IsCode(err, "sandbox_not_found") {
					errs[i] = errors.Join(errs[i], err)
				}
			}
		})
	}
	for _, child := range children {
		if child.ID != "" {
			ids <- child.ID
		}
	}
	close(ids)
	wg.Wait()
	return errors.Join(errs...)
}
