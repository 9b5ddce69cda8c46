package main

import (
	"time"

	"github.com/forkd/forkd/client"
)

// snapshotCmd creates a snapshot when it is not told otherwise.
type snapshotCmd struct {
	Create  snapshotCreateCmd  `cmd:"" default:"withargs" help:"Boot an image, warm it up and freeze it. This is the default."`
	Rebuild snapshotRebuildCmd `cmd:"" help:"Make a snapshot anew by its recipe, such as for another engine or host."`
}

type snapshotCreateCmd struct {
	Tag            string            `required:"" help:"Name of the snapshot."`
	Image          string            `required:"" xor:"source" help:"Name or id of an image."`
	FromSandbox    string            `required:"" xor:"source" placeholder:"ID" help:"Freeze a running sandbox instead, as forkd branch does."`
	MemMiB         int               `name:"mem-mib" placeholder:"MIB" help:"Memory of the machine. Default: the daemon's."`
	VCPUs          int               `name:"vcpus" placeholder:"N" help:"Virtual CPUs. Default: 1."`
	WarmUp         []string          `name:"warm-up" sep:"none" placeholder:"CMD" help:"Shell command to run before the freeze; it must exit 0. May be given again."`
	WarmUpEval     []string          `name:"warm-up-eval" sep:"none" placeholder:"CODE" help:"Python to run in the resident interpreter before the freeze, after the commands. May be given again."`
	Probe          string            `placeholder:"CMD" help:"Shell command that exits 0 when the machine is ready. Default: it is when its agent answers."`
	Timeout        time.Duration     `help:"For boot and warm-up together. Default: the daemon's."`
	Env            map[string]string `mapsep:"none" placeholder:"K=V" help:"Environment of the warm-up and of every child. May be given again."`
	Pool           int               `placeholder:"N" help:"Children to keep ready."`
	MemoryLimitMiB int               `name:"memory-limit-mib" placeholder:"MIB" help:"Limit of the memory that each child may add to the snapshot's, unless its fork says otherwise; the next flags likewise."`
	limitFlags
	networkFlags
	Quiet bool `short:"q" help:"Print the tag only."`
}

// Run creates a snapshot and shows the steps.
func (c *snapshotCreateCmd) Run(p *program) error {
	if c.FromSandbox != "" {
		return c.fromSandbox(p)
	}
	cl, err := p.client()
	if err != nil {
		return err
	}
	policy, err := c.networkFlags.policy()
	if err != nil {
		return err
	}
	req := client.SnapshotRequest{Network: policy, Tag: c.Tag, Image: c.Image, MemMiB: c.MemMiB, VCPUs: c.VCPUs, Probe: c.Probe,
		TimeoutSecs: c.Timeout.Seconds(), Env: c.Env, PoolSize: c.Pool, Limits: c.limits(c.MemoryLimitMiB), WarmUp: warmUps(c.WarmUp, c.WarmUpEval)}
	return p.createSnapshot(cl, req, c.Quiet)
}

// createSnapshot shows the steps and the result.
func (p *program) createSnapshot(cl *client.Client, req client.SnapshotRequest, quiet bool) error {
	steps := p.progress()
	snap, err := cl.CreateSnapshot(p.ctx, req, steps.report)
	steps.end()
	if err != nil {
		return err
	}
	return p.printSnapshot(snap, quiet)
}

func (c *snapshotCreateCmd) fromSandbox(p *program) error {
	if c.MemMiB != 0 || c.VCPUs != 0 || len(c.WarmUp)+len(c.WarmUpEval)+len(c.Env) > 0 || c.Probe != "" || c.Timeout != 0 || c.Pool != 0 || c.limits(c.MemoryLimitMiB) != nil ||
		c.Network != "" || len(c.Allow) > 0 || c.Bandwidth != 0 {
		return badUsage("only --tag and -q go with --from-sandbox", "a sandbox is frozen as it is")
	}
	return p.branch(c.FromSandbox, client.BranchRequest{Tag: c.Tag}, c.Quiet)
}

// printSnapshot shows a snapshot that was just made.
func (p *program) printSnapshot(snap client.Snapshot, quiet bool) error {
	switch {
	case p.cli.JSON:
		return p.printJSON(snap)
	case quiet:
		return p.lines([]string{snap.Tag})
	}
	return p.snapshotTable([]client.Snapshot{snap})
}
