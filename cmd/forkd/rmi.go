package main

import "github.com/forkd/forkd/client"

type rmiCmd struct {
	Tags    []string `arg:"" help:"Tags of snapshots."`
	Cascade bool     `xor:"mode" help:"Delete the snapshots that rest on them too."`
	Force   bool     `xor:"mode" help:"Kill the sandboxes that run from them first."`
}

// Run deletes snapshots.
func (c *rmiCmd) Run(p *program) error {
	cl, err := p.client()
	if err != nil {
		return err
	}
	mode := client.DeleteUnused
	switch {
	case c.Cascade:
		mode = client.DeleteCascade
	case c.Force:
		mode = client.DeleteForce
	}
	return p.each(c.Tags, "deleted", func(tag string) error { return cl.DeleteSnapshot(p.ctx, tag, mode) })
}
