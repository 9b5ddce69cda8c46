package main

import "fmt"

type logsCmd struct {
	ID string `arg:"" help:"Id of the sandbox."`
}

// Run prints a sandbox's console.
func (c *logsCmd) Run(p *program) error {
	cl, err := p.client()
	if err != nil {
		return err
	}
	console, err := cl.Logs(p.ctx, c.ID)
	if err != nil {
		return err
	}
	if p.cli.JSON {
		return p.printJSON(map[string]string{"id": c.ID, "console": string(console)})
	}
	if _, err := p.stdout.Write(console); err != nil {
		return fmt.Errorf("write the console: %w", err)
	}
	return nil
}
