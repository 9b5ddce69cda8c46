package main

import (
	"time"

	"github.com/forkd/forkd/api"
	"github.com/forkd/forkd/client"
)

type snapshotDiffCmd struct {
	From    string            `required:"" placeholder:"TAG" help:"Tag of the snapshot to start from."`
	Tag     string            `required:"" help:"Name of the new snapshot."`
	Exec    []string          `sep:"none" placeholder:"CMD" help:"Shell command to run in it; it must exit 0. May be given again."`
	Eval    []string          `sep:"none" placeholder:"CODE" help:"Python to run in its resident interpreter, after the commands. May be given again."`
	Timeout time.Duration     `help:"For all of it together. Default: the daemon's."`
	Env     map[string]string `mapsep:"none" placeholder:"K=V" help:"Environment of the commands and of every child. May be given again."`
	Quiet   bool              `short:"q" help:"Print the tag only."`
}

// Help says what it is for.
func (c *snapshotDiffCmd) Help() string {
	return "Starts a child of a snapshot, runs the commands in it and freezes it under another tag. The new snapshot rests on the old one " +
		"and stores only what they changed: forkd snapshot-diff --from py --tag pandas --exec 'pip install pandas'"
}

// Run makes the snapshot and shows the steps.
func (c *snapshotDiffCmd) Run(p *program) error {
	if len(c.Exec)+len(c.Eval) == 0 {
		return badUsage("see `forkd snapshot-diff --help`", "say what is to be run: --exec CMD or --eval CODE")
	}
	cl, err := p.client()
	if err != nil {
		return err
	}
	steps := p.progress()
	snap, err := cl.SnapshotDiff(p.ctx, c.From, client.DiffRequest{Tag: c.Tag, Steps: warmUps(c.Exec, c.Eval), TimeoutSecs: c.Timeout.Seconds(), Env: c.Env}, steps.report)
	steps.end()
	if err != nil {
		return err
	}
	return p.printSnapshot(snap, c.Quiet)
}

// warmUps is what is to be run before a freeze: the commands, then the code.
func warmUps(commands, code []string) []client.WarmUp {
	var out []client.WarmUp
	for _, cmd := range commands {
		out = append(out, client.WarmUp{Kind: api.WarmUpKindExec, Code: cmd})
	}
	for _, c := range code {
		out = append(out, client.WarmUp{Kind: api.WarmUpKindEval, Code: c})
	}
	return out
}
