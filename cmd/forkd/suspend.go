package main

import "github.com/forkd/forkd/client"

type suspendCmd struct {
	IDs            []string `arg:"" name:"ids" help:"Ids of sandboxes."`
	IncludeSecrets bool     `help:"Write the secrets that they hold to disk with their memory."`
}

// Help says what becomes of a sandbox.
func (c *suspendCmd) Help() string {
	return "A suspended sandbox is on disk and takes no memory. Its deadline stands still, and it survives the daemon and the host. " +
		"`forkd resume` brings it back under the same id; one that was started with --auto-resume comes back when it is used."
}

// Run freezes sandboxes to disk; one that can't be does not keep the others.
func (c *suspendCmd) Run(p *program) error {
	cl, err := p.client()
	if err != nil {
		return err
	}
	return p.each(c.IDs, "suspended", func(id string) error {
		_, err := cl.Suspend(p.ctx, id, client.SuspendRequest{IncludeSecrets: c.IncludeSecrets})
		return err
	})
}
