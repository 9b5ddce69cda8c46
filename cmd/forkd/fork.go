package main

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/forkd/forkd/api"
	"github.com/forkd/forkd/client"
)

type forkCmd struct {
	Tag            string            `required:"" help:"Tag of the snapshot."`
	N              int               `short:"n" default:"1" help:"How many, 1 to 1000."`
	Timeout        time.Duration     `help:"Kill them after this long. Default: never."`
	Env            map[string]string `mapsep:"none" placeholder:"K=V" help:"Environment of every command in them. May be given again."`
	Metadata       map[string]string `mapsep:"none" placeholder:"K=V" help:"Words of your own to keep with them. May be given again."`
	MemoryLimitMiB int               `name:"memory-limit-mib" placeholder:"MIB" help:"Limit of the memory that each may add to the snapshot's."`
	Pool           bool              `xor:"path" help:"Only take children that are ready in the pool."`
	Cold           bool              `xor:"path" help:"Start new ones even when the pool has some."`
	Quiet          bool              `short:"q" help:"Print ids only."`

	// Published flags. The isolation and the branches that they ask for are always there.
	PerChildNetns bool `hidden:""`
	LiveFork      bool `hidden:""`
	SettleSecs    int  `hidden:"" help:"Stay for this long, then kill the sandboxes."`
}

// Run forks. What is ready is printed also when others failed.
func (c *forkCmd) Run(p *program) error {
	if c.N < 1 || c.N > 1000 {
		return badUsage("give -n from 1 to 1000", "-n %d sandboxes can't be started", c.N)
	}
	cl, err := p.client()
	if err != nil {
		return err
	}
	req := client.ForkRequest{SnapshotTag: c.Tag, N: client.Int(c.N), Env: c.Env, Metadata: c.Metadata, TimeoutSecs: c.Timeout.Seconds()}
	if c.MemoryLimitMiB != 0 {
		req.MemoryLimitMiB = client.Int(c.MemoryLimitMiB)
	}
	switch {
	case c.Pool:
		req.Path = api.ForkRequestPathPool
	case c.Cold:
		req.Path = api.ForkRequestPathCold
	}
	sandboxes, err := cl.Fork(p.ctx, req)
	var partial *client.PartialError
	if err != nil && !errors.As(err, &partial) {
		return err
	}
	if printErr := p.printForked(sandboxes, partial, c.Quiet); printErr != nil {
		return printErr
	}
	if c.SettleSecs > 0 {
		return errors.Join(err, p.settle(cl, sandboxes, time.Duration(c.SettleSecs)*time.Second))
	}
	return err
}

func (p *program) printForked(sandboxes []client.Sandbox, partial *client.PartialError, quiet bool) error {
	if p.cli.JSON {
		report := api.ForkReport{Sandboxes: sandboxes, Errors: []api.ForkError{}}
		if partial != nil {
			report.Errors = partial.Failures
		}
		return p.printJSON(report)
	}
	if partial != nil {
		for _, f := range partial.Failures {
			p.say("sandbox %d: %s", f.Index, f.Error)
		}
	}
	if quiet {
		return p.lines(ids(sandboxes))
	}
	return p.sandboxTable(sandboxes)
}

// settle is how published clients hold sandboxes: as long as this process lives.
func (p *program) settle(cl *client.Client, sandboxes []client.Sandbox, d time.Duration) error {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-p.ctx.Done():
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(p.ctx), 30*time.Second)
	defer cancel()
	var errs []error
	for _, s := range sandboxes {
		if err := cl.Kill(ctx, s.ID); err != nil && !client.IsCode(err, "sandbox_not_found") && !client.IsCode(err, "sandbox_gone") {
			errs = append(errs, fmt.Errorf("kill %s: %w", s.ID, err))
		}
	}
	return errors.Join(errs...)
}

func ids(sandboxes []client.Sandbox) []string {
	var out []string
	for _, s := range sandboxes {
		out = append(out, s.ID)
	}
	return out
}
