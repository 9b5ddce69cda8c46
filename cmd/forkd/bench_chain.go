package main

import (
	"context"
	"errors"
	"fmt"

	"github.com/forkd/forkd/internal/bench"
)

type benchChainCmd struct {
	Tag      string `help:"Snapshot that is the chain's base. Default: the only one that rests on no other."`
	Depth    int    `default:"8" help:"Layers of the chain."`
	LayerMiB int    `name:"layer-mib" default:"8" help:"What is written in the guest for each layer."`
	N        int    `short:"n" default:"10" help:"Children of each end of the chain, one after the other."`
}

// Run measures children of a chain of snapshots through the daemon's API. Children that fail make it fail.
func (c *benchChainCmd) Run(p *program) error {
	if c.N < 1 || c.N > 1000 || c.Depth < 1 || c.Depth > 64 || c.LayerMiB < 1 {
		return badUsage("see `forkd bench chain --help`", "-n %d --depth %d --layer-mib %d: that can't be measured", c.N, c.Depth, c.LayerMiB)
	}
	cl, err := p.client()
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(p.ctx, benchLimit)
	defer cancel()
	r, err := bench.Chain(ctx, cl, bench.ChainOptions{Tag: c.Tag, Depth: c.Depth, LayerMiB: c.LayerMiB, N: c.N, Progress: p.say})
	if err != nil {
		return err
	}
	if p.cli.JSON {
		err = p.printJSON(r)
	} else {
		err = p.printBenchChain(r)
	}
	for _, run := range []bench.Run{r.Base.Cold, r.Tip.Cold, r.Base.Claim, r.Tip.Claim} {
		if run.Failed > 0 {
			err = errors.Join(err, fmt.Errorf("%d of %d children failed: %s", run.Failed, run.N, run.Errors[0].Error))
		}
	}
	return err
}

func (p *program) printBenchChain(r bench.ChainReport) error {
	base, tip := r.Base, r.Tip
	row := func(what, a, b, ratio string) []string { return []string{what, a, b, ratio} }
	times := func(ratio float64) string { return fmt.Sprintf("%.2f×", ratio) }
	mebibytes := func(f float64) string { return fmt.Sprintf("%.1f MiB", f) }
	err := p.table([]string{"REQUEST → FIRST ANSWER", "DEPTH 0", fmt.Sprintf("DEPTH %d", r.Depth), "RATIO"}, [][]string{
		row("cold, p50", millis(base.Cold.Answer.P50MS), millis(tip.Cold.Answer.P50MS), times(r.ColdRatio)),
		row("from the pool, p50", millis(base.Claim.Answer.P50MS), millis(tip.Claim.Answer.P50MS), times(r.ClaimRatio)),
		row("first one, memory not loaded", millis(base.FirstMS), millis(tip.FirstMS), ""),
		row("on disk", mebibytes(base.DiskMiB), mebibytes(tip.DiskMiB), ""),
		row("in memory, once loaded", mebibytes(base.ResidentMiB), mebibytes(tip.ResidentMiB), ""),
		row(fmt.Sprintf("guests' memory of %d children", tip.Shared.Children), mebibytes(base.Shared.GuestMiB), mebibytes(tip.Shared.GuestMiB), ""),
		row("a child's part of that", mebibytes(base.Shared.ChildPSSMiB), mebibytes(tip.Shared.ChildPSSMiB), ""),
	})
	fmt.Fprintf(p.stdout, "\nlayers: %.1f MiB of changed pages, %.1f MiB on disk; with the base %.2f times base and changed pages, in memory %.2f times\n",
		r.ChangedMiB, r.DiskMiB, r.DiskRatio, r.ResidentRatio)
	return err
}
