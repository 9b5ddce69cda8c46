package main

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"time"
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
	d, err := p.openDaemon(&c.daemonFlags, p.logger("text", "warn"), c.All)
	if err != nil {
		return err
	}
	recovery, err := d.manager.Recover(p.ctx)
	if err != nil {
		err = fmt.Errorf("recover what a dead daemon left: %w", err)
	}
	ended := 0
	if c.All && err == nil {
		ended = recovery.Adopted
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(p.ctx), time.Minute)
	defer cancel()
	if err := errors.Join(err, d.manager.Shutdown(ctx), d.close()); err != nil {
		return err
	}
	out := []struct {
		name  string
		what  string
		count int
	}{
		{"processes", "processes without a record, killed", recovery.Reaped},
		{"aborted", "half-started sandboxes, ended", recovery.Aborted},
		{"lost", "sandboxes that had ended, recorded", recovery.Lost},
		{"snapshots", "half-made snapshots, removed", recovery.Snapshots},
		{"finished", "snapshots, completed", recovery.Finished},
		{"dirs", "run directories, removed", recovery.Dirs},
		{"ended", "running sandboxes, ended", ended},
		{"running", "running sandboxes, left alone", recovery.Adopted - ended},
	}
	if p.cli.JSON {
		result := map[string]int{}
		for _, o := range out {
			result[o.name] = o.count
		}
		return p.printJSON(result)
	}
	var rows [][]string
	for _, o := range out {
		if o.count > 0 {
			rows = append(rows, []string{strconv.Itoa(o.count), o.what})
		}
	}
	if len(rows) == 0 {
		p.say("nothing was left over")
		return nil
	}
	return p.table([]string{"COUNT", "WHAT"}, rows)
}
