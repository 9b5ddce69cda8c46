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
	Tag            string            `help:"Tag of the snapshot; with --from: keep that instant under it."`
	From           string            `placeholder:"ID" help:"Fork this running sandbox as it is now, instead of a snapshot."`
	N              int               `short:"n" default:"1" help:"How many, 1 to 1000."`
	Timeout        time.Duration     `help:"Kill them after this long. Default: never."`
	Env            map[string]string `mapsep:"none" placeholder:"K=V" help:"Environment of every command in them. May be given again."`
	Metadata       map[string]string `mapsep:"none" placeholder:"K=V" help:"Words of your own to keep with them. May be given again."`
	MemoryLimitMiB int               `name:"memory-limit-mib" placeholder:"MIB" help:"Limit of the memory that each may add to the snapshot's, with its monitor."`
	limitFlags
	Pool           bool              `xor:"path" help:"Only take children that are ready in the pool."`
	Cold           bool              `xor:"path" help:"Start new ones even when the pool has some."`
	Name           string            `help:"A name for the sandbox; only with -n 1. It is a workspace then."`
	AutoSuspend    time.Duration     `placeholder:"D" help:"Suspend them when nothing was asked of them for so long."`
	AutoResume     bool              `help:"Bring them back when they are used while they are suspended."`
	Quiet          bool              `short:"q" help:"Print ids only."`
	Secret         map[string]string `mapsep:"none" placeholder:"NAME=VALUE" help:"A file below /run/forkd/secrets of each, in its memory only; @FILE reads the value from a file, @- from standard input. May be given again."`
	SecretEnv      bool              `help:"Have the secrets in the environment of commands and code too, by their names."`
	IncludeSecrets bool              `help:"With --from: they may have the secrets that it holds."`

	networkFlags

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
	if c.From != "" && (len(c.Secret) > 0 || c.SecretEnv) {
		return badUsage("hand them over by exec", "--secret and --secret-env are for forks of snapshots")
	}
	if c.Tag == "" && c.From == "" {
		return badUsage("see `forkd fork --help`", "missing flags: --tag=TAG or --from=ID")
	}
	cl, err := p.client()
	if err != nil {
		return err
	}
	sandboxes, err := c.fork(p, cl)
	var partial *client.PartialError
	if err != nil && !errors.As(err, &partial) {
		return err
	}
	if c.From == "" || !p.cli.JSON { // else it is printed with what only such a fork has
		if printErr := p.printForked(sandboxes, partial, c.Quiet); printErr != nil {
			return printErr
		}
	}
	if c.SettleSecs > 0 {
		return errors.Join(err, p.settle(cl, sandboxes, time.Duration(c.SettleSecs)*time.Second))
	}
	return err
}

// fork starts the sandboxes.
func (c *forkCmd) fork(p *program, cl *client.Client) ([]client.Sandbox, error) {
	policy, err := c.networkFlags.policy()
	if err != nil {
		return nil, err
	}
	if c.From != "" {
		return c.forkRunning(p, cl, policy)
	}
	secrets, err := p.readSecrets(c.Secret)
	if err != nil {
		return nil, err
	}
	req := client.ForkRequest{Network: policy, Secrets: secrets, SecretEnv: c.SecretEnv, SnapshotTag: c.Tag, N: client.Int(c.N), Env: c.Env, Metadata: c.Metadata, TimeoutSecs: c.Timeout.Seconds(),
		Name: c.Name, AutoSuspendSecs: c.AutoSuspend.Seconds(), AutoResume: c.AutoResume, Limits: c.limits(0)}
	if c.MemoryLimitMiB != 0 {
		req.MemoryLimitMiB = client.Int(c.MemoryLimitMiB)
	}
	switch {
	case c.Pool:
		req.Path = api.ForkRequestPathPool
	case c.Cold:
		req.Path = api.ForkRequestPathCold
	}
	return cl.Fork(p.ctx, req)
}

// forkRunning starts the sandboxes from one that runs.
func (c *forkCmd) forkRunning(p *program, cl *client.Client, policy *client.NetworkPolicy) ([]client.Sandbox, error) {
	if c.Pool || c.Cold || c.Name != "" || c.AutoSuspend != 0 || c.AutoResume {
		return nil, badUsage("see `forkd fork --help`", "--pool, --cold, --name, --auto-suspend and --auto-resume don't go with --from")
	}
	req := client.ForkRunningRequest{Network: policy, N: client.Int(c.N), Tag: c.Tag, Env: c.Env, Metadata: c.Metadata, TimeoutSecs: c.Timeout.Seconds(), IncludeSecrets: c.IncludeSecrets, Limits: c.limits(0)}
	if c.MemoryLimitMiB != 0 {
		req.MemoryLimitMiB = client.Int(c.MemoryLimitMiB)
	}
	forked, err := cl.ForkRunning(p.ctx, c.From, req)
	var partial *client.PartialError
	if err != nil && !errors.As(err, &partial) {
		return nil, err
	}
	if p.cli.JSON {
		report := api.ForkRunningReport{Sandboxes: forked.Sandboxes, Errors: []api.ForkError{}, PauseMS: forked.PauseMS, SnapshotID: forked.SnapshotID}
		if forked.Tag != "" {
			report.Tag = &forked.Tag
		}
		if partial != nil {
			report.Errors = partial.Failures
		}
		return forked.Sandboxes, errors.Join(p.printJSON(report), err)
	}
	p.say("sandbox %s stood still for %s", c.From, millis(forked.PauseMS))
	return forked.Sandboxes, err
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
