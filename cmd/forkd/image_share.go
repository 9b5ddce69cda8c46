package main

type imageShareCmd struct {
	Names []string `arg:"" name:"images" help:"Names or ids."`
	Off   bool     `help:"Share them no longer. Snapshots made from them stay."`
}

// Run shares images with all tenants.
func (c *imageShareCmd) Run(p *program) error {
	cl, err := p.client()
	if err != nil {
		return err
	}
	return p.each(c.Names, shared(c.Off), func(name string) error { return cl.ShareImage(p.ctx, name, !c.Off) })
}
