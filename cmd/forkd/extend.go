package main

import (
	"time"

	"github.com/forkd/forkd/client"
)

type extendCmd struct {
	ID      string        `arg:"" help:"Id of the sandbox."`
	Timeout time.Duration `required:"" help:"Time from now; 0 removes the deadline."`
}

// Run moves a deadline.
func (c *extendCmd) Run(p *program) error {
	cl, err := p.client()
	if err != nil {
		return err
	}
	s, err := cl.Extend(p.ctx, c.ID, c.Timeout)
	switch {
	case err != nil:
		return err
	case p.cli.JSON:
		return p.printJSON(s)
	}
	return p.sandboxTable([]client.Sandbox{s})
}
