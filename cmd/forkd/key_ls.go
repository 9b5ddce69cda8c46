package main

import (
	"strconv"
	"time"
)

type keyLsCmd struct {
	Quiet bool `short:"q" help:"Print ids only."`
}

// Run lists the keys.
func (c *keyLsCmd) Run(p *program) error {
	cl, err := p.client()
	if err != nil {
		return err
	}
	list, err := cl.Keys(p.ctx)
	switch {
	case err != nil:
		return err
	case p.cli.JSON:
		return p.printJSON(list)
	}
	var ids []string
	var rows [][]string
	for _, k := range list {
		expires, most := "never", "-"
		if k.ExpiresAtUnix > 0 {
			expires = time.Unix(k.ExpiresAtUnix, 0).UTC().Format(time.DateTime)
		}
		if k.MaxSandboxes > 0 {
			most = strconv.Itoa(k.MaxSandboxes)
		}
		ids = append(ids, k.ID)
		rows = append(rows, []string{k.ID, k.Name, k.Tenant, string(k.Scope), string(k.Status), ago(k.CreatedAtUnix), expires, most})
	}
	if c.Quiet {
		return p.lines(ids)
	}
	return p.table([]string{"ID", "NAME", "TENANT", "SCOPE", "STATUS", "CREATED", "EXPIRES", "MAX SANDBOXES"}, rows)
}
