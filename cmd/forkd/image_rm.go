package main

type imageRmCmd struct {
	Names []string `arg:"" name:"images" help:"Names or ids."`
}

// Run removes images; one that can't be removed does not keep the others.
func (c *imageRmCmd) Run(p *program) error {
	cl, err := p.client()
	if err != nil {
		return err
	}
	return p.each(c.Names, "removed", func(name string) error { return cl.DeleteImage(p.ctx, name) })
}
