package main

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"time"

	"github.com/forkd/forkd/internal/sandbox"
)

type cleanupCmd struct {
	daemonFlags
	All bool `help:"End sandboxes that still run as well."`
}

// Help says when this is needed.
func (c *cleanupCmd) Help() string {
	return "A daemon does this by itself when it starts. This is for a host on which none is to run any more: it removes half-made " +
		"snapshots, processes and files that a dead daemon left, and with --all the sandboxes too. It refuses while a daemon runs."
}

// Run does what a daemon does when it starts and stops, without serving.
func (c *cleanupCmd) Run(p *program) error {
	if err := c.fillDefaults(p.getenv); err != nil {
		return err
	}
	c.Jailer = "" // nothing is started: one that can't be used here is no reason to leave anything
	d, err := p.openDaemon(&c.daemonFlags, p.logger("text", "warn"), c.All)
	if err != nil {
		return err
	}
	recovery, err := d.manager.Recover(p.ctx)
	if err != nil {
		err = fmt.Errorf("recover what a dead daemon left: %w", err)
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(p.ctx), time.Minute)
	defer cancel()
	if err := errors.Join(err, d.manager.Shutdown(ctx), d.close()); err != nil {
		return err
	}
	return p.printCleanup(recovery, c.All)
}

func (p *program) printCleanup(r sandbox.Recovery, all bool) error {
	running, ended := r.Adopted, 0
	if all {
		running, ended = 0, r.Adopted
	}
	found := []struct {
		name, what string
		count      int
	}{
		{"processes", "processes without a record, killed", r.Reaped},
		{"aborted", "half-started sandboxes, ended", r.Aborted},
		{"lost", "sandboxes that had ended, recorded", r.Lost},
		{"snapshots", "half-made snapshots, removed", r.Snapshots},
		{"finished", "snapshots, completed", r.Finished},
		{"dirs", "run directories, removed", r.Dirs},
		{"ended", "running sandboxes, ended", ended},
		{"running", "running sandboxes, left alone", running},
	}
	counts := map[string]int{}
	var rows [][]string
	for _, f := range found {
		counts[f.name] = f.count
		if f.count > 0 {
			rows = append(rows, []string{strconv.Itoa(f.count), f.what})
		}
	}
	switch {
	case p.cli.JSON:
		return p.printJSON(counts)
	case len(rows) == 0:
		p.say("nothing was left over")
		return nil
	}
	return p.table([]string{"COUNT", "WHAT"}, rows)
}
