package main

type workspaceResumeCmd struct {
	Names []string `arg:"" help:"Names of workspaces."`
}

// Run brings workspaces back.
func (c *workspaceResumeCmd) Run(p *program) error {
	cl, err := p.client()
	if err != nil {
		return err
	}
	return p.each(c.Names, "resumed", func(name string) error {
		_, err := cl.ResumeWorkspace(p.ctx, name)
		return err
	})
}
