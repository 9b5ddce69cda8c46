package main

import "github.com/forkd/forkd/client"

type workspaceLsCmd struct {
	Quiet bool `short:"q" help:"Print names only."`
}

// Run lists the workspaces.
func (c *workspaceLsCmd) Run(p *program) error {
	cl, err := p.client()
	if err != nil {
		return err
	}
	list, err := cl.Workspaces(p.ctx)
	switch {
	case err != nil:
		return err
	case p.cli.JSON:
		return p.printJSON(list)
	case c.Quiet:
		var names []string
		for _, w := range list {
			names = append(names, w.Name)
		}
		return p.lines(names)
	}
	return p.workspaceTable(list)
}

func (p *program) workspaceTable(list []client.Workspace) error {
	var rows [][]string
	for _, w := range list {
		rows = append(rows, []string{w.Name, w.ID, dash(w.SourceSnapshotTag), string(w.Status), ago(w.CreatedAtUnix), ago(w.LastActiveUnix), dash(w.Reason)})
	}
	return p.table([]string{"NAME", "ID", "SNAPSHOT", "STATUS", "CREATED", "LAST CHANGE", "REASON"}, rows)
}
