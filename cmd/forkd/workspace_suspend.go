package main

import "github.com/forkd/forkd/client"

type workspaceSuspendCmd struct {
	Names          []string `arg:"" help:"Names of workspaces."`
	IncludeSecrets bool     `help:"Write the secrets that they hold to disk with their memory."`
}

// Run freezes workspaces to disk.
func (c *workspaceSuspendCmd) Run(p *program) error {
	cl, err := p.client()
	if err != nil {
		return err
	}
	return p.each(c.Names, "suspended", func(name string) error {
		_, err := cl.SuspendWorkspace(p.ctx, name, client.SuspendRequest{IncludeSecrets: c.IncludeSecrets})
		return err
	})
}
