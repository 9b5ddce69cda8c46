package main

type killCmd struct {
	IDs []string `arg:"" optional:"" name:"ids" help:"Ids of sandboxes."`
	All bool     `help:"Kill all."`
	Tag string   `help:"Kill those of this snapshot."`
}

// Run kills sandboxes.
func (c *killCmd) Run(p *program) error {
	given := 0
	for _, is := range []bool{len(c.IDs) > 0, c.All, c.Tag != ""} {
		if is {
			given++
		}
	}
	if given != 1 {
		return badUsage("see `forkd kill --help`", "say which sandboxes to kill: ids, --all, or --tag T")
	}
	cl, err := p.client()
	if err != nil {
		return err
	}
	targets := c.IDs
	if len(targets) == 0 {
		list, err := cl.Sandboxes(p.ctx, false)
		if err != nil {
			return err
		}
		targets = ids(ofTag(list, c.Tag))
	}
	return p.each(targets, "killed", func(id string) error { return cl.Kill(p.ctx, id) })
}
