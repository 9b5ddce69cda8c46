package main

import (
	"context"
	"errors"
	"fmt"

	"github.com/forkd/forkd/client"
	"github.com/forkd/forkd/internal/bench"
)

type benchNoisyCmd struct {
	Tag            string `help:"Snapshot whose children make noise. Default: the only one that rests on no other."`
	Noisy          int    `default:"2" help:"Sandboxes that make noise at a time."`
	N              int    `short:"n" default:"200" help:"Requests in each round."`
	MemoryLimitMiB int    `name:"memory-limit-mib" placeholder:"MIB" help:"Memory limit of the noisy ones."`
	limitFlags
}

// Run measures what guests that do their worst do to others. Requests of others that fail, or others that end, make it fail.
func (c *benchNoisyCmd) Run(p *program) error {
	if c.N < 1 || c.Noisy < 1 || c.Noisy > 1000 {
		return badUsage("see `forkd bench noisy --help`", "-n %d --noisy %d: nothing can be measured so", c.N, c.Noisy)
	}
	cl, err := p.client()
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(p.ctx, benchLimit)
	defer cancel()
	opt := bench.NoisyOptions{Tag: c.Tag, Noisy: c.Noisy, N: c.N, Progress: p.say}
	if l := c.limits(c.MemoryLimitMiB); l != nil {
		opt.Limits = client.Limits(*l)
	}
	r, err := bench.Noisy(ctx, cl, opt)
	if err != nil {
		return err
	}
	if p.cli.JSON {
		err = p.printJSON(r)
	} else {
		err = p.printBenchNoisy(r)
	}
	for _, round := range append([]bench.NoisyRound{r.Quiet}, r.Rounds...) {
		if round.Failed > 0 || round.Disturbed > 0 {
			err = errors.Join(err, fmt.Errorf("%s: %d requests of others failed, %d others ended", round.Noise, round.Failed, round.Disturbed))
		}
	}
	return err
}

func (p *program) printBenchNoisy(r bench.NoisyReport) error {
	var rows [][]string
	for _, n := range append([]bench.NoisyRound{r.Quiet}, r.Rounds...) {
		times := func(ratio float64) string {
			if ratio == 0 {
				return ""
			}
			return fmt.Sprintf("%.1f x", ratio)
		}
		rows = append(rows, []string{n.Noise, millis(n.APIMS.P50), millis(n.APIMS.P99), times(n.APIRatio), millis(n.PingMS.P50), millis(n.PingMS.P99), times(n.PingRatio),
			fmt.Sprint(n.Failed), fmt.Sprint(n.Ended), fmt.Sprint(n.Disturbed)})
	}
	return p.table([]string{"GUESTS", "API P50", "P99", "TO QUIET", "PING P50", "P99", "TO QUIET", "FAILED", "ENDED", "OTHERS ENDED"}, rows)
}
