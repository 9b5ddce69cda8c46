package main

import (
	"fmt"
	"time"
)

type pingCmd struct {
	ID string `arg:"" help:"Id of the sandbox."`
}

// Run pings a sandbox's agent.
func (c *pingCmd) Run(p *program) error {
	cl, err := p.client()
	if err != nil {
		return err
	}
	pong, err := cl.Ping(p.ctx, c.ID)
	switch {
	case err != nil:
		return err
	case p.cli.JSON:
		return p.printJSON(pong)
	}
	_, err = fmt.Fprintf(p.stdout, "pong from %s in %s: agent %s, pid %d, clock %s, up %s\n", c.ID, millis(pong.LatencyMS), pong.AgentVersion, pong.PID,
		time.UnixMilli(pong.ClockUnixMS).UTC().Format(time.RFC3339), span(time.Duration(pong.UptimeMS)*time.Millisecond))
	return err
}
