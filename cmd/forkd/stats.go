package main

import (
	"strconv"

	"github.com/forkd/forkd/api"
	"github.com/forkd/forkd/client"
)

type statsCmd struct {
	IDs []string `arg:"" optional:"" name:"ids" help:"Ids of sandboxes. Default: all that run."`
}

// Run shows what sandboxes use of the host.
func (c *statsCmd) Run(p *program) error {
	cl, err := p.client()
	if err != nil {
		return err
	}
	targets := c.IDs
	if len(targets) == 0 {
		list, err := cl.Sandboxes(p.ctx, false)
		if err != nil {
			return err
		}
		for _, s := range list {
			if s.State == api.SandboxInfoStateRunning { // the others have no memory
				targets = append(targets, s.ID)
			}
		}
	}
	all := []client.Stats{}
	for _, id := range targets {
		s, err := cl.Stats(p.ctx, id)
		if len(c.IDs) == 0 && (client.IsCode(err, "sandbox_not_found") || client.IsCode(err, "sandbox_gone") || client.IsCode(err, "invalid_state")) {
			continue // it ended or was suspended after it was listed
		}
		if err != nil {
			return err
		}
		all = append(all, s)
	}
	if p.cli.JSON {
		return p.printJSON(all)
	}
	var rows [][]string
	for _, s := range all {
		rows = append(rows, []string{s.ID, size(s.GuestAnonKiB << 10), size(s.GuestSharedKiB << 10), size(s.GuestPSSKiB << 10), size(s.PSSKiB << 10), size(s.RSSKiB << 10),
			size(s.DiskReadBytes), size(s.DiskWrittenBytes), strconv.FormatFloat(s.CPUSecs, 'f', 2, 64) + " s", traffic(s.NetReceivedBytes), traffic(s.NetSentBytes)})
	}
	return p.table([]string{"ID", "OWN MEMORY", "SHARED", "GUEST SHARE", "PROCESS SHARE", "RESIDENT", "DISK READ", "WRITTEN", "CPU", "RECEIVED", "SENT"}, rows)
}

// traffic is a size, or "-" where there is no network.
func traffic(bytes *int64) string {
	if bytes == nil {
		return "-"
	}
	return size(*bytes)
}
