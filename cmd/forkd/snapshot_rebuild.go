package main

import (
	"fmt"

	"github.com/forkd/forkd/client"
)

type snapshotRebuildCmd struct {
	Tag    string `arg:"" help:"Tag of the snapshot to make anew. It stays as it is."`
	To     string `placeholder:"TAG" help:"Name of the new snapshot. Default: the old one's with -rebuilt behind it."`
	Engine string `enum:",qemu,firecracker" default:"" help:"Engine it is meant for: a daemon that runs another one makes nothing (qemu, firecracker)."`
	Quiet  bool   `short:"q" help:"Print the tag only."`
}

// Help says what is repeated.
func (c *snapshotRebuildCmd) Help() string {
	return "A snapshot can only be forked by the engine, version and kind of processor that it was made with. This repeats what it was made by, " +
		"as it was recorded: the image, the environment, the readiness probe and the steps of the warm-up, also those of forkd snapshot-diff. " +
		"What a running sandbox did before it was branched is not recorded: such a snapshot can't be made anew."
}

// Run repeats the recipe.
func (c *snapshotRebuildCmd) Run(p *program) error {
	cl, err := p.client()
	if err != nil {
		return err
	}
	if err := c.checkEngine(p, cl); err != nil {
		return err
	}
	old, err := cl.SnapshotInfo(p.ctx, c.Tag)
	if err != nil {
		return err
	}
	for _, below := range append(old.Ancestors, old.Tag) {
		s, err := cl.SnapshotInfo(p.ctx, below)
		if err != nil {
			return fmt.Errorf("what snapshot %s rests on: %w", c.Tag, err)
		}
		if s.BranchedFrom != "" {
			return &codedError{code: exitError, err: fmt.Errorf("snapshot %s can't be made anew: %s was branched from sandbox %s, and what that one did is not recorded",
				c.Tag, below, s.BranchedFrom), hint: "rebuild the snapshot that the sandbox was forked from, and do there what the sandbox did"}
		}
	}
	to := c.To
	if to == "" {
		to = c.Tag + "-rebuilt"
	}
	req := client.SnapshotRequest{Tag: to, Image: old.Recipe.Image, MemMiB: old.MemMiB, VCPUs: old.VCPUs,
		WarmUp: old.Recipe.WarmUp, Probe: old.Recipe.Probe, Env: old.Recipe.Env, Limits: old.Limits}
	if old.HasNetwork {
		req.Network = old.Network
	}
	return p.createSnapshot(cl, req, c.Quiet)
}

// checkEngine refuses to make with one engine what was meant for another.
func (c *snapshotRebuildCmd) checkEngine(p *program, cl *client.Client) error {
	if c.Engine == "" {
		return nil
	}
	v, err := cl.Version(p.ctx)
	if err != nil {
		return err
	}
	if v.Engine != c.Engine {
		return &codedError{code: exitError, err: fmt.Errorf("this daemon runs %s, not %s", v.Engine, c.Engine),
			hint: "start one with `forkd serve --engine " + c.Engine + "`"}
	}
	return nil
}
