package main

import (
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/forkd/forkd/client"
)

type snapshotInfoCmd struct {
	Tag string `arg:"" help:"Tag of the snapshot."`
}

// Run shows one snapshot.
func (c *snapshotInfoCmd) Run(p *program) error {
	cl, err := p.client()
	if err != nil {
		return err
	}
	s, err := cl.SnapshotInfo(p.ctx, c.Tag)
	if err != nil {
		return err
	}
	if p.cli.JSON {
		return p.printJSON(s)
	}
	parent := ""
	if s.ParentTag != nil {
		parent = *s.ParentTag
	}
	return p.facts([][2]string{
		{"tag", s.Tag}, {"id", s.ID}, {"status", string(s.Status)}, {"warning", s.Warning}, {"bootable", yesNo(s.Bootable)},
		{"image", s.Image}, {"created", time.Unix(s.CreatedAtUnix, 0).Format(time.RFC3339)},
		{"machine", fmt.Sprintf("%d MiB, %d vCPU", s.MemMiB, s.VCPUs)}, {"engine", strings.TrimSpace(s.Engine + " " + s.EngineVersion + " " + s.Accel)},
		{"network", networkText(s)}, {"limits", limitsText(s.Limits)},
		{"python", yesNo(s.Python)}, {"resident", yesNo(s.Resident)},
		{"memory", fmt.Sprintf("%s, %s on disk", size(s.MemoryLogicalBytes), size(s.MemoryPhysicalBytes))}, {"device state", size(s.VmstateBytes)},
		{"boot and warm-up", millis(s.BootWarmMS)},
		{"pool", fmt.Sprintf("%d of %d ready", s.Pool.Ready, s.Pool.Size)}, {"pool problem", s.Pool.Problem},
		{"parent", parent}, {"depth", strconv.Itoa(s.ChainDepth)}, {"ancestors", strings.Join(s.Ancestors, " → ")}, {"dependents", strings.Join(s.Dependents, ", ")},
		{"branched from", s.BranchedFrom}, {"pause", nonzero(s.PauseMS, millis)}, {"changed", changed(s)},
		{"content hash", s.ContentHash}, {"directory", s.Dir},
	})
}

// networkText is what children may reach that are forked without a policy of their own.
func networkText(s client.SnapshotDetail) string {
	if !s.HasNetwork {
		return "no device"
	}
	return policyText(s.Network)
}

// changed is what a branch changed; "" for what is none.
func changed(s client.SnapshotDetail) string {
	if s.DiffLogicalBytes == 0 {
		return ""
	}
	return fmt.Sprintf("%s, %s of it not zeros", size(s.DiffLogicalBytes), size(s.DiffPhysicalBytes))
}

// nonzero shows a value that stands for nothing when it is 0.
func nonzero(v float64, show func(float64) string) string {
	if v == 0 {
		return ""
	}
	return show(v)
}
