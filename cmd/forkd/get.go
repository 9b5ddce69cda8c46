package main

import (
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/forkd/forkd/client"
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
	return p.facts([][2]string{
		{"id", s.ID}, {"name", s.Name}, {"snapshot", fmt.Sprintf("%s (%s)", s.SnapshotTag, s.SnapshotID)}, {"state", string(s.State)}, {"reason", s.Reason}, {"conditions", conditionsText(s)},
		{"created", time.Unix(s.CreatedAtUnix, 0).Format(time.RFC3339)}, {"suspended", suspendedAt(s)}, {"deadline", until(s.DeadlineUnix)},
		{"started", s.Path}, {"ready after", millis(s.ReadyMS)}, {"pid", strconv.Itoa(s.PID)}, {"limits", limitsText(s.Limits)}, {"network", policyText(s.Network)}, {"confinement", string(s.Confinement)},
		{"idle", idleRule(s)}, {"branches", strconv.Itoa(s.BranchCount)}, {"env", pairs(s.Env)}, {"metadata", pairs(s.Metadata)},
	})
}

// conditionsText says what is the matter with a sandbox.
func conditionsText(s client.Sandbox) string {
	var all []string
	for _, c := range s.Conditions {
		all = append(all, c.Detail)
	}
	return strings.Join(all, "; ")
}

// idleRule says what becomes of a sandbox that nobody uses.
func idleRule(s client.Sandbox) string {
	var rules []string
	if s.AutoSuspendSecs > 0 {
		rules = append(rules, "suspended after "+millis(s.AutoSuspendSecs*1000))
	}
	if s.AutoResume {
		rules = append(rules, "resumed when it is used")
	}
	return strings.Join(rules, ", ")
}

// suspendedAt is when a sandbox was suspended; "" when it is not.
func suspendedAt(s client.Sandbox) string {
	if s.SuspendedAtUnix == 0 {
		return ""
	}
	return time.Unix(s.SuspendedAtUnix, 0).Format(time.RFC3339)
}

// pairs shows a map in a fixed order.
func pairs(m map[string]string) string {
	var out []string
	for _, k := range slices.Sorted(maps.Keys(m)) {
		out = append(out, k+"="+m[k])
	}
	return strings.Join(out, " ")
}
