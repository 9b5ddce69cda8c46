package main

type workspaceRmCmd struct {
	Names []string `arg:"" help:"Names of workspaces."`
}

// Run ends workspaces.
func (c *workspaceRmCmd) Run(p *program) error {
	cl, err := p.client()
	if err != nil {
		return err
	}
	return p.each(c.Names, "removed", func(name string) error { return cl.DeleteWorkspace(p.ctx, name) })
}
