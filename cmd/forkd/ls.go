package main

import (
	"strconv"
	"strings"

	"github.com/forkd/forkd/client"
)

type lsCmd struct {
	All   bool   `short:"a" help:"Those that ended and are still remembered too."`
	Tag   string `help:"Only those of this snapshot."`
	Quiet bool   `short:"q" help:"Print ids only."`
}

// Run lists the sandboxes.
func (c *lsCmd) Run(p *program) error {
	cl, err := p.client()
	if err != nil {
		return err
	}
	list, err := cl.Sandboxes(p.ctx, c.All)
	if err != nil {
		return err
	}
	list = ofTag(list, c.Tag)
	switch {
	case p.cli.JSON:
		return p.printJSON(list)
	case c.Quiet:
		return p.lines(ids(list))
	}
	return p.sandboxTable(list)
}

// ofTag keeps the sandboxes of a snapshot; all of them for "".
func ofTag(list []client.Sandbox, tag string) []client.Sandbox {
	kept := []client.Sandbox{}
	for _, s := range list {
		if tag == "" || s.SnapshotTag == tag {
			kept = append(kept, s)
		}
	}
	return kept
}

// stateText is a sandbox's state, with what is the matter with it.
func stateText(s client.Sandbox) string {
	text := string(s.State)
	for _, c := range s.Conditions {
		text += ", " + strings.ReplaceAll(string(c.Kind), "_", " ")
	}
	return text
}

func (p *program) sandboxTable(list []client.Sandbox) error {
	var rows [][]string
	for _, s := range list {
		pid := "-"
		if s.PID != 0 {
			pid = strconv.Itoa(s.PID)
		}
		rows = append(rows, []string{s.ID, dash(s.SnapshotTag), stateText(s), dash(s.Path), millis(s.ReadyMS), pid, ago(s.CreatedAtUnix), until(s.DeadlineUnix), dash(s.Name)})
	}
	return p.table([]string{"ID", "SNAPSHOT", "STATE", "PATH", "READY AFTER", "PID", "CREATED", "DEADLINE", "NAME"}, rows)
}
