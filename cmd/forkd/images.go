package main

import (
	"fmt"

	"github.com/forkd/forkd/client"
)

type imagesCmd struct {
	Quiet bool `short:"q" help:"Print tags only."`
}

// Run lists the snapshots.
func (c *imagesCmd) Run(p *program) error {
	cl, err := p.client()
	if err != nil {
		return err
	}
	list, err := cl.Snapshots(p.ctx)
	switch {
	case err != nil:
		return err
	case p.cli.JSON:
		return p.printJSON(list)
	case c.Quiet:
		var tags []string
		for _, s := range list {
			tags = append(tags, s.Tag)
		}
		return p.lines(tags)
	}
	if err := p.snapshotTable(list); err != nil {
		return err
	}
	for _, s := range list {
		if s.Warning != "" {
			p.say("%s: %s", s.Tag, s.Warning)
		}
	}
	return nil
}

// snapshotStatus is one or two words for whether a snapshot can be used.
func snapshotStatus(s client.Snapshot) string {
	if !s.Bootable && s.Status == "ready" {
		return "not bootable"
	}
	return string(s.Status)
}

func (p *program) snapshotTable(list []client.Snapshot) error {
	var rows [][]string
	for _, s := range list {
		rows = append(rows, []string{s.Tag, dash(s.Image), size(s.MemoryLogicalBytes), size(s.MemoryPhysicalBytes), s.Engine + "/" + s.Accel,
			fmt.Sprintf("%d of %d", s.Pool.Ready, s.Pool.Size), snapshotStatus(s), ago(s.CreatedAtUnix)})
	}
	return p.table([]string{"TAG", "IMAGE", "MEMORY", "ON DISK", "ENGINE", "POOL", "STATUS", "CREATED"}, rows)
}
