package main

import "github.com/forkd/forkd/client"

type imagePruneCmd struct {
	Quiet bool `short:"q" help:"Print ids only."`
}

// Help says what goes.
func (c *imagePruneCmd) Help() string {
	return "A build under the same name takes the name away from the image before. That one stays as long as snapshots need it; this removes " +
		"those that nothing needs any more."
}

// Run removes images that are left over.
func (c *imagePruneCmd) Run(p *program) error {
	cl, err := p.client()
	if err != nil {
		return err
	}
	removed, err := cl.PruneImages(p.ctx)
	switch {
	case err != nil:
		return err
	case p.cli.JSON:
		return p.printJSON(map[string][]client.Image{"removed": removed})
	case c.Quiet:
		var ids []string
		for _, img := range removed {
			ids = append(ids, img.ID)
		}
		return p.lines(ids)
	case len(removed) == 0:
		p.say("nothing was left over")
		return nil
	}
	return p.imageTable(removed)
}
