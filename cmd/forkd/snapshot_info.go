package main

import (
	"fmt"
	"strings"
	"time"
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
		{"python", yesNo(s.Python)}, {"resident", yesNo(s.Resident)},
		{"memory", fmt.Sprintf("%s, %s on disk", size(s.MemoryLogicalBytes), size(s.MemoryPhysicalBytes))}, {"device state", size(s.VmstateBytes)},
		{"boot and warm-up", millis(s.BootWarmMS)},
		{"pool", fmt.Sprintf("%d of %d ready", s.Pool.Ready, s.Pool.Size)}, {"pool problem", s.Pool.Problem},
		{"parent", parent}, {"ancestors", strings.Join(s.Ancestors, " → ")}, {"dependents", strings.Join(s.Dependents, ", ")},
		{"branched from", s.BranchedFrom}, {"content hash", s.ContentHash}, {"directory", s.Dir},
	})
}
