package main

import (
	"github.com/forkd/forkd/client"
)

type branchCmd struct {
	ID     string `arg:"" help:"Id of the sandbox."`
	Tag    string `help:"Name of the snapshot. Default: one that is made up."`
	Live   bool   `xor:"mode" help:"Take the memory while the sandbox goes on. This is the default."`
	Diff   bool   `xor:"mode" help:"Copy what changed ahead, and the rest while the sandbox stands still."`
	Full   bool   `xor:"mode" help:"As --live, but store a snapshot that rests on no other."`
	NoWait bool   `help:"Return when the sandbox runs again; the snapshot can be forked, and is ready a while later."`
	Quiet  bool   `short:"q" help:"Print the tag only."`

	IncludeSecrets bool `help:"The snapshot may have the secrets that the sandbox holds."`
}

// Run freezes a running sandbox.
func (c *branchCmd) Run(p *program) error {
	req := client.BranchRequest{Tag: c.Tag, Wait: client.Bool(!c.NoWait), IncludeSecrets: c.IncludeSecrets}
	switch {
	case c.Live:
		req.Mode = client.BranchLive
	case c.Diff:
		req.Mode = client.BranchDiff
	case c.Full:
		req.Mode = client.BranchFull
	}
	return p.branch(c.ID, req, c.Quiet)
}

// branch freezes a sandbox and shows the snapshot.
func (p *program) branch(id string, req client.BranchRequest, quiet bool) error {
	cl, err := p.client()
	if err != nil {
		return err
	}
	snap, err := cl.Branch(p.ctx, id, req)
	switch {
	case err != nil:
		return err
	case p.cli.JSON:
		return p.printJSON(snap)
	}
	if snap.Warning != "" {
		p.say("%s: %s", snap.Tag, snap.Warning)
	}
	if quiet {
		return p.lines([]string{snap.Tag})
	}
	if snap.PauseMS > 0 { // not told yet when nobody waits
		p.say("sandbox %s stood still for %s", id, millis(snap.PauseMS))
	}
	return p.snapshotTable([]client.Snapshot{snap})
}
