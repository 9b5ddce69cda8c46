package main

import (
	"time"

	"github.com/forkd/forkd/api"
	"github.com/forkd/forkd/client"
)

type snapshotCmd struct {
	Tag        string            `required:"" help:"Name of the snapshot."`
	Image      string            `required:"" help:"Name or id of an image."`
	MemMiB     int               `name:"mem-mib" placeholder:"MIB" help:"Memory of the machine. Default: the daemon's."`
	VCPUs      int               `name:"vcpus" placeholder:"N" help:"Virtual CPUs. Default: 1."`
	WarmUp     []string          `name:"warm-up" sep:"none" placeholder:"CMD" help:"Shell command to run before the freeze; it must exit 0. May be given again."`
	WarmUpEval []string          `name:"warm-up-eval" sep:"none" placeholder:"CODE" help:"Python to run in the resident interpreter before the freeze, after the commands. May be given again."`
	Probe      string            `placeholder:"CMD" help:"Shell command that exits 0 when the machine is ready. Default: it is when its agent answers."`
	Timeout    time.Duration     `help:"For boot and warm-up together. Default: the daemon's."`
	Env        map[string]string `mapsep:"none" placeholder:"K=V" help:"Environment of the warm-up and of every child. May be given again."`
	Pool       int               `placeholder:"N" help:"Children to keep ready."`
	Quiet      bool              `short:"q" help:"Print the tag only."`
}

// Run creates a snapshot and shows the steps.
func (c *snapshotCmd) Run(p *program) error {
	cl, err := p.client()
	if err != nil {
		return err
	}
	req := client.SnapshotRequest{Tag: c.Tag, Image: c.Image, MemMiB: c.MemMiB, VCPUs: c.VCPUs, Probe: c.Probe,
		TimeoutSecs: c.Timeout.Seconds(), Env: c.Env, PoolSize: c.Pool}
	for _, cmd := range c.WarmUp {
		req.WarmUp = append(req.WarmUp, client.WarmUp{Kind: api.WarmUpKindExec, Code: cmd})
	}
	for _, code := range c.WarmUpEval {
		req.WarmUp = append(req.WarmUp, client.WarmUp{Kind: api.WarmUpKindEval, Code: code})
	}
	steps := p.progress()
	snap, err := cl.CreateSnapshot(p.ctx, req, steps.report)
	steps.end()
	switch {
	case err != nil:
		return err
	case p.cli.JSON:
		return p.printJSON(snap)
	case c.Quiet:
		return p.lines([]string{snap.Tag})
	}
	return p.snapshotTable([]client.Snapshot{snap})
}
