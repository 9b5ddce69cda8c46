package main

type snapshotShareCmd struct {
	Tags []string `arg:"" help:"Tags of snapshots of the default tenant."`
	Off  bool     `help:"Share them no longer. What was made from them stays."`
}

// Run shares snapshots with all tenants.
func (c *snapshotShareCmd) Run(p *program) error {
	cl, err := p.client()
	if err != nil {
		return err
	}
	return p.each(c.Tags, shared(c.Off), func(tag string) error { return cl.ShareSnapshot(p.ctx, tag, !c.Off) })
}

func shared(off bool) string {
	if off {
		return "unshared"
	}
	return "shared"
}
