package main

import (
	"time"

	"github.com/forkd/forkd/client"
)

type workspaceCreateCmd struct {
	Name           string            `arg:"" help:"Its name."`
	Tag            string            `required:"" help:"Tag of the snapshot to start from."`
	AutoSuspend    time.Duration     `placeholder:"D" help:"Suspend it when nothing was asked of it for so long."`
	AutoResume     bool              `help:"Bring it back when it is used while it is suspended."`
	Timeout        time.Duration     `help:"End it after this long, not counting the time it is suspended. Default: never."`
	Env            map[string]string `mapsep:"none" placeholder:"K=V" help:"Environment of every command in it. May be given again."`
	Metadata       map[string]string `mapsep:"none" placeholder:"K=V" help:"Words of your own to keep with it. May be given again."`
	MemoryLimitMiB int               `name:"memory-limit-mib" placeholder:"MIB" help:"Limit of the memory that it may add to the snapshot's."`
	Secret         map[string]string `mapsep:"none" placeholder:"NAME=VALUE" help:"A file below /run/forkd/secrets of it, in its memory only; @FILE reads the value from a file, @- from standard input. May be given again."`
	SecretEnv      bool              `help:"Have the secrets in the environment of commands and code too, by their names."`
	limitFlags
	Quiet bool `short:"q" help:"Print the id of the sandbox only."`
}

// Run starts a workspace.
func (c *workspaceCreateCmd) Run(p *program) error {
	secrets, err := p.readSecrets(c.Secret)
	if err != nil {
		return err
	}
	cl, err := p.client()
	if err != nil {
		return err
	}
	req := client.WorkspaceRequest{Name: c.Name, SnapshotTag: c.Tag, AutoSuspendSecs: c.AutoSuspend.Seconds(), AutoResume: c.AutoResume,
		TimeoutSecs: c.Timeout.Seconds(), Env: c.Env, Metadata: c.Metadata, Secrets: secrets, SecretEnv: c.SecretEnv, Limits: c.limits(0)}
	if c.MemoryLimitMiB != 0 {
		req.MemoryLimitMiB = client.Int(c.MemoryLimitMiB)
	}
	w, err := cl.CreateWorkspace(p.ctx, req)
	switch {
	case err != nil:
		return err
	case p.cli.JSON:
		return p.printJSON(w)
	case c.Quiet:
		return p.lines([]string{w.ID})
	}
	return p.workspaceTable([]client.Workspace{w})
}
