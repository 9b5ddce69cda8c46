package main

import (
	"context"
	"errors"
	"fmt"

	"github.com/forkd/forkd/internal/bench"
)

type benchRunningCmd struct {
	Tag      string `help:"Snapshot whose child is forked while it runs. Default: the only one that rests on no other."`
	N        int    `short:"n" default:"5" help:"Children of each request."`
	Rounds   int    `default:"10" help:"Requests of each kind."`
	DirtyMiB int    `name:"dirty-mib" default:"60" help:"Memory that a program in the sandbox rewrites meanwhile."`
	RateMiB  int    `name:"rate-mib" default:"50" help:"How fast, a second; 0: as fast as it can."`
}

// Run measures forks of a running sandbox through the daemon's API. Requests that fail make it fail.
func (c *benchRunningCmd) Run(p *program) error {
	switch {
	case c.N < 1 || c.N > 1000 || c.Rounds < 1 || c.Rounds > 1000:
		return badUsage("choose 1 to 1000", "-n %d --rounds %d: that can't be measured", c.N, c.Rounds)
	case c.DirtyMiB < 1 || c.RateMiB < 0:
		return badUsage("see `forkd bench fork-running --help`", "--dirty-mib %d --rate-mib %d: nothing can be written so", c.DirtyMiB, c.RateMiB)
	}
	cl, err := p.client()
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(p.ctx, benchLimit)
	defer cancel()
	r, err := bench.ForkRunning(ctx, cl, bench.ForkRunningOptions{Tag: c.Tag, N: c.N, Rounds: c.Rounds, DirtyMiB: c.DirtyMiB, RateMiB: c.RateMiB, Progress: p.say})
	if err != nil {
		return err
	}
	if p.cli.JSON {
		err = p.printJSON(r)
	} else {
		row := func(what string, m bench.Millis) []string {
			return []string{what, millis(m.P50), millis(m.P90), millis(m.P99)}
		}
		err = p.table([]string{fmt.Sprintf("%d CHILDREN", r.N), "P50", "P90", "P99"}, [][]string{
			row("pause of the source", r.PauseMS),
			row("of the running sandbox, all answer", r.RunningMS),
			row("of a snapshot of it, all answer", r.ColdMS),
		})
		fmt.Fprintf(p.stdout, "\nrunning to snapshot: %.2f×\n", r.Ratio)
	}
	if r.Failed > 0 {
		err = errors.Join(err, fmt.Errorf("%d of %d requests failed: %s", r.Failed, 2*r.Rounds, r.Errors[0].Error))
	}
	return err
}
