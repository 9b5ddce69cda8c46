package main

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/forkd/forkd/internal/bench"
)

// benchLimit bounds a whole benchmark.
const benchLimit = 30 * time.Minute

// benchCmd measures forks when it is not told what to measure.
type benchCmd struct {
	Fork    benchForkCmd    `cmd:"" default:"withargs" help:"Forks of a snapshot, cold and from a pool. This is the default."`
	Branch  benchBranchCmd  `cmd:"" help:"Branches of a running sandbox: its pause, and the stall that a program in it sees."`
	Chain   benchChainCmd   `cmd:"" help:"Forks of a snapshot that rests on many others, beside those of one that rests on none."`
	Engine  benchEngineCmd  `cmd:"" help:"An engine alone: starts, claims and branches of guests without a kernel."`
	Noisy   benchNoisyCmd   `cmd:"" help:"Others' requests while guests spin, fork, and fill their memory and disk."`
	Running benchRunningCmd `cmd:"" name:"fork-running" help:"Forks of a running sandbox, beside cold forks of a snapshot of it."`
}

type benchForkCmd struct {
	Tag  string `required:"" help:"Snapshot whose children are measured."`
	N    int    `short:"n" default:"10" help:"Children at a time, each asked for by a request of its own."`
	Only string `enum:",cold,claim" default:"" help:"Measure cold forks or claims from a full pool only."`

	Rounds int `default:"1" help:"How often that is done; the times are over all."`
}

// Run measures forks of a snapshot through the daemon's API. Children that fail make it fail.
func (c *benchForkCmd) Run(p *program) error {
	if c.N < 1 || c.N > 1000 {
		return badUsage("choose 1 to 1000", "-n %d: not a number of children that can be started", c.N)
	}
	if c.Rounds < 1 || c.Rounds > 1000 {
		return badUsage("choose 1 to 1000", "--rounds %d: not a number of rounds", c.Rounds)
	}
	cl, err := p.client()
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(p.ctx, benchLimit)
	defer cancel()
	r, err := bench.Bench(ctx, cl, bench.Options{Tag: c.Tag, N: c.N, Rounds: c.Rounds, Only: c.Only, Progress: p.say})
	if err != nil {
		return err
	}
	if p.cli.JSON {
		err = p.printJSON(r)
	} else {
		err = p.printBench(r)
	}
	for _, run := range []*bench.Run{r.Cold, r.ColdWork, r.Claim, r.ClaimWork} {
		if run != nil && run.Failed > 0 {
			err = errors.Join(err, fmt.Errorf("%d of %d children failed: %s", run.Failed, run.N, run.Errors[0].Error))
		}
	}
	return err
}

func (p *program) printBench(r bench.Report) error {
	var rows [][]string
	add := func(name string, run *bench.Run) {
		if run == nil {
			return
		}
		row := func(what string, t bench.Times) {
			rows = append(rows, []string{name + what, fmt.Sprint(run.N), fmt.Sprint(run.Failed), millis(t.P50MS), millis(t.P90MS), millis(t.P99MS), millis(t.AllMS)})
		}
		row(": identity acknowledged", run.Ready)
		row(": first answer", run.Answer)
	}
	add("cold, ping", r.Cold)
	add("cold, work", r.ColdWork)
	add("from the pool, ping", r.Claim)
	add("from the pool, work", r.ClaimWork)
	if err := p.table([]string{"FORK", "CHILDREN", "FAILED", "P50", "P90", "P99", "ALL"}, rows); err != nil {
		return err
	}
	if r.Memory != nil {
		fmt.Fprintf(p.stdout, "\nmemory a child adds: %s of the guest's, %s with its monitor and its share of the parent's\n",
			size(r.Memory.AnonKiBP50<<10), size(r.Memory.PSSKiBP50<<10))
	}
	return nil
}
