package main

type workspaceSuspendCmd struct {
	Names []string `arg:"" help:"Names of workspaces."`
}

// Run freezes workspaces to disk.
func (c *workspaceSuspendCmd) Run(p *program) error {
	cl, err := p.client()
	if err != nil {
		return err
	}
	return p.each(c.Names, "suspended", func(name string) error {
		_, err := cl.SuspendWorkspace(p.ctx, name)
		return err
	})
}
