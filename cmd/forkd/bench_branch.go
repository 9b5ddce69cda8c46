package main

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"

	"github.com/forkd/forkd/client"
	"github.com/forkd/forkd/internal/bench"
)

type benchBranchCmd struct {
	Tag      string `help:"Snapshot whose child is branched. Default: the only one that rests on no other."`
	DirtyMiB int    `name:"dirty-mib" default:"60" help:"Memory that a program in the sandbox rewrites meanwhile."`
	RateMiB  int    `name:"rate-mib" default:"50" help:"How fast, a second; 0: as fast as it can."`
	N        int    `short:"n" default:"20" help:"Branches in each mode."`
	Mode     string `enum:",live,diff,full" default:"" help:"Measure this mode only: live, diff or full."`
}

// Run measures branches of a running sandbox through the daemon's API. Branches that fail make it fail.
func (c *benchBranchCmd) Run(p *program) error {
	switch {
	case c.N < 1 || c.N > 1000:
		return badUsage("choose 1 to 1000", "-n %d: not a number of branches that can be made", c.N)
	case c.DirtyMiB < 1 || c.RateMiB < 0:
		return badUsage("see `forkd bench branch --help`", "--dirty-mib %d --rate-mib %d: nothing can be written so", c.DirtyMiB, c.RateMiB)
	}
	cl, err := p.client()
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(p.ctx, benchLimit)
	defer cancel()
	modes := []client.BranchMode{client.BranchLive, client.BranchDiff, client.BranchFull}
	if c.Mode != "" {
		modes = []client.BranchMode{client.BranchMode(c.Mode)}
	}
	r, err := bench.Branch(ctx, cl, bench.BranchOptions{Tag: c.Tag, DirtyMiB: c.DirtyMiB, RateMiB: c.RateMiB, N: c.N, Modes: modes, Progress: p.say})
	if err != nil {
		return err
	}
	if p.cli.JSON {
		err = p.printJSON(r)
	} else {
		err = p.printBenchBranch(r)
	}
	for _, mode := range slices.Sorted(maps.Keys(r.Modes)) {
		if run := r.Modes[mode]; run.Failed > 0 {
			err = errors.Join(err, fmt.Errorf("%s: %d of %d branches failed: %s", mode, run.Failed, run.N, run.Errors[0].Error))
		}
	}
	return err
}

func (p *program) printBenchBranch(r bench.BranchReport) error {
	var rows [][]string
	for _, mode := range slices.Sorted(maps.Keys(r.Modes)) {
		run := r.Modes[mode]
		for _, m := range []struct {
			what string
			of   bench.Millis
		}{{"pause", run.PauseMS}, {"longest stall of a program in the guest", run.GuestStallMS}, {"the same without a branch", run.IdleStallMS}, {"on disk", run.ReadyMS}} {
			rows = append(rows, []string{mode + ": " + m.what, fmt.Sprint(run.N), fmt.Sprint(run.Failed), millis(m.of.P50), millis(m.of.P90), millis(m.of.P99)})
		}
	}
	if err := p.table([]string{"BRANCH", "N", "FAILED", "P50", "P90", "P99"}, rows); err != nil {
		return err
	}
	fmt.Fprintln(p.stdout)
	for _, mode := range slices.Sorted(maps.Keys(r.Modes)) {
		run := r.Modes[mode]
		fmt.Fprintf(p.stdout, "%s: %.1f MiB of memory in a branch; the guest wrote %.1f MiB a second\n", mode, run.LayerMiB, run.WroteMiBPerS)
		for _, w := range run.Warnings {
			fmt.Fprintf(p.stdout, "%s: %s (%d times)\n", mode, w.Error, w.Count)
		}
	}
	return nil
}
