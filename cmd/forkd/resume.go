package main

type resumeCmd struct {
	IDs []string `arg:"" name:"ids" help:"Ids of sandboxes."`
}

// Run brings suspended sandboxes back.
func (c *resumeCmd) Run(p *program) error {
	cl, err := p.client()
	if err != nil {
		return err
	}
	return p.each(c.IDs, "resumed", func(id string) error {
		_, err := cl.Resume(p.ctx, id)
		return err
	})
}
