package main

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/forkd/forkd/client"
	"github.com/forkd/forkd/internal/bench"
	"github.com/forkd/forkd/internal/thread"
)

type benchNoisyCmd struct {
	Tag            string   `help:"Snapshot whose children make noise. Default: the only one that rests on no other."`
	Noisy          int      `default:"2" help:"Sandboxes that make noise at a time."`
	N              int      `short:"n" default:"400" help:"Requests of each kind, with and without noise."`
	Noise          []string `placeholder:"KIND" help:"Only this: spins, forks, fills-memory, fills-disk or floods-network. May be given again."`
	MemoryLimitMiB int      `name:"memory-limit-mib" placeholder:"MIB" help:"Memory limit of the noisy ones."`
	limitFlags
}

// Run measures what guests that do their worst do to others. Requests of others that fail, or others that end, make it fail.
func (c *benchNoisyCmd) Run(p *program) error {
	if c.N < 1 || c.Noisy < 1 || c.Noisy > 1000 {
		return badUsage("see `forkd bench noisy --help`", "-n %d --noisy %d: nothing can be measured so", c.N, c.Noisy)
	}
	for _, n := range c.Noise {
		if !slices.Contains(bench.NoiseNames(), n) {
			return badUsage("there are "+strings.Join(bench.NoiseNames(), ", "), "--noise %s is not known", n)
		}
	}
	cl, err := p.client()
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(p.ctx, benchLimit)
	defer cancel()
	thread.Ahead() // its own delays are not what is measured
	opt := bench.NoisyOptions{Tag: c.Tag, Noisy: c.Noisy, N: c.N, Noises: c.Noise, Progress: p.say}
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
	for _, n := range r.Noises {
		if failed := n.Quiet.Failed + n.Loud.Failed; failed > 0 || n.Disturbed > 0 {
			err = errors.Join(err, fmt.Errorf("%s: %d requests of others failed, %d others ended", n.Noise, failed, n.Disturbed))
		}
	}
	return err
}

func (p *program) printBenchNoisy(r bench.NoisyReport) error {
	var rows [][]string
	for _, n := range r.Noises {
		pair := func(of func(bench.NoisyPhase) bench.Millis) (p50, p99 string) {
			quiet, loud := of(n.Quiet), of(n.Loud)
			return millis(quiet.P50) + " → " + millis(loud.P50), millis(quiet.P99) + " → " + millis(loud.P99)
		}
		apiP50, apiP99 := pair(func(p bench.NoisyPhase) bench.Millis { return p.APIMS })
		pingP50, pingP99 := pair(func(p bench.NoisyPhase) bench.Millis { return p.PingMS })
		_, client := pair(func(p bench.NoisyPhase) bench.Millis { return p.ClientMS })
		rows = append(rows, []string{n.Noise, apiP50, apiP99, fmt.Sprintf("%.1f x", n.APIRatio), pingP50, pingP99, fmt.Sprintf("%.1f x", n.PingRatio), client,
			fmt.Sprint(n.Loud.Failed), fmt.Sprint(n.Ended), fmt.Sprint(n.Disturbed)})
	}
	return p.table([]string{"GUESTS", "API P50", "P99", "", "PING P50", "P99", "", "CLIENT LATE P99", "FAILED", "ENDED", "OTHERS ENDED"}, rows)
}
