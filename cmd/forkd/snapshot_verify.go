package main

type snapshotVerifyCmd struct {
	Tags []string `arg:"" help:"Tags of snapshots."`
}

// Run verifies snapshots; it names each that is sound, and says of each other what is wrong.
func (c *snapshotVerifyCmd) Run(p *program) error {
	cl, err := p.client()
	if err != nil {
		return err
	}
	return p.each(c.Tags, "sound", func(tag string) error { return cl.VerifySnapshot(p.ctx, tag) })
}
