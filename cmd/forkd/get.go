package main

import (
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"
)

type getCmd struct {
	ID string `arg:"" help:"Id of the sandbox."`
}

// Run shows one sandbox.
func (c *getCmd) Run(p *program) error {
	cl, err := p.client()
	if err != nil {
		return err
	}
	s, err := cl.Sandbox(p.ctx, c.ID)
	if err != nil {
		return err
	}
	if p.cli.JSON {
		return p.printJSON(s)
	}
	limit := ""
	if s.MemoryLimitMiB != nil {
		limit = fmt.Sprintf("%d MiB", *s.MemoryLimitMiB)
	}
	return p.facts([][2]string{
		{"id", s.ID}, {"snapshot", fmt.Sprintf("%s (%s)", s.SnapshotTag, s.SnapshotID)}, {"state", string(s.State)}, {"reason", s.Reason},
		{"created", time.Unix(s.CreatedAtUnix, 0).Format(time.RFC3339)}, {"deadline", until(s.DeadlineUnix)},
		{"started", s.Path}, {"ready after", millis(s.ReadyMS)}, {"pid", strconv.Itoa(s.PID)}, {"memory limit", limit},
		{"branches", strconv.Itoa(s.BranchCount)}, {"env", pairs(s.Env)}, {"metadata", pairs(s.Metadata)},
	})
}

// pairs shows a map in a fixed order.
func pairs(m map[string]string) string {
	var out []string
	for _, k := range slices.Sorted(maps.Keys(m)) {
		out = append(out, k+"="+m[k])
	}
	return strings.Join(out, " ")
}
