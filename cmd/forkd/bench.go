package main

import (
	"fmt"

	"github.com/forkd/forkd/internal/bench"
)

type benchCmd struct {
	Tag  string `required:"" help:"Tag of the snapshot."`
	N    int    `short:"n" default:"100" help:"Children at a time, 1 to 1000."`
	Only string `enum:"cold,claim,both" default:"both" help:"What to measure: ${enum}."`
}

// Help says what is counted.
func (c *benchCmd) Help() string {
	return "Times N requests that are made at once, from each request to the guest's first answer, cold and from a full pool. It kills " +
		"what it starts, and puts the pool's size back."
}

// Run measures. A child that failed makes the exit code that of a partial fork.
func (c *benchCmd) Run(p *program) error {
	if c.N < 1 || c.N > 1000 {
		return badUsage("give -n from 1 to 1000", "-n %d children can't be measured", c.N)
	}
	cl, err := p.client()
	if err != nil {
		return err
	}
	only := c.Only
	if only == "both" {
		only = ""
	}
	report, err := bench.Bench(p.ctx, cl, bench.Options{Tag: c.Tag, N: c.N, Only: only, Progress: p.say})
	if err != nil {
		return err
	}
	if err := p.printBench(report); err != nil {
		return err
	}
	failed := 0
	for _, run := range []*bench.Run{report.Cold, report.Claim} {
		if run != nil {
			failed += run.Failed
		}
	}
	if failed > 0 {
		return &codedError{code: exitPartial, err: fmt.Errorf("%d children failed", failed)}
	}
	return nil
}

func (p *program) printBench(r bench.Report) error {
	if p.cli.JSON {
		return p.printJSON(r)
	}
	p.say("%s on %s %s (%s), %d MiB; boot and warm-up of the parent: %s", r.Tag, r.Engine, r.EngineVersion, r.Accel, r.MemMiB, millis(r.BootWarmMS))
	var rows [][]string
	for _, run := range []struct {
		name string
		of   *bench.Run
	}{{"cold", r.Cold}, {"claim", r.Claim}} {
		if run.of == nil {
			continue
		}
		for _, e := range run.of.Errors {
			p.say("%s: %d times: %s", run.name, e.Count, e.Error)
		}
		for _, t := range []struct {
			name string
			of   bench.Times
		}{{"ready", run.of.Ready}, {"answer", run.of.Answer}} {
			rows = append(rows, []string{run.name, fmt.Sprintf("%d of %d", run.of.N-run.of.Failed, run.of.N), t.name,
				millis(t.of.P50MS), millis(t.of.P90MS), millis(t.of.P99MS), millis(t.of.AllMS)})
		}
	}
	if err := p.table([]string{"PATH", "WELL", "UNTIL", "P50", "P90", "P99", "ALL"}, rows); err != nil {
		return err
	}
	if m := r.Memory; m != nil {
		p.say("memory of a child before its first eval: %s of its own in the guest, %s for its process", size(m.AnonKiBP50<<10), size(m.PSSKiBP50<<10))
	}
	return nil
}
