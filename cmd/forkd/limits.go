package main

import (
	"fmt"
	"strings"

	"github.com/forkd/forkd/api"
)

// limitFlags are what sandboxes may take of the host.
type limitFlags struct {
	CPUs      float64 `name:"cpus" placeholder:"N" help:"Processor time that each may take, as 1.5."`
	PIDsLimit int     `name:"pids-limit" placeholder:"N" help:"Processes and threads that the monitor of each may have."`
	IOMiBPerS int     `name:"io-mib-per-s" placeholder:"MIB" help:"What each may read from, and write to, the daemon's disk a second."`
}

// limits are for a request; nil when none was given.
func (f limitFlags) limits(memoryMiB int) *api.Limits {
	if f == (limitFlags{}) && memoryMiB == 0 {
		return nil
	}
	return &api.Limits{MemoryMiB: memoryMiB, Cpus: f.CPUs, Pids: f.PIDsLimit, IoMiBPerS: f.IOMiBPerS}
}

// limitsText shows limits to people.
func limitsText(l *api.Limits) string {
	if l == nil {
		return ""
	}
	var out []string
	if l.MemoryMiB > 0 {
		out = append(out, fmt.Sprintf("%d MiB", l.MemoryMiB))
	}
	if l.Cpus > 0 {
		out = append(out, fmt.Sprintf("%g CPUs", l.Cpus))
	}
	if l.Pids > 0 {
		out = append(out, fmt.Sprintf("%d processes", l.Pids))
	}
	if l.IoMiBPerS > 0 {
		out = append(out, fmt.Sprintf("%d MiB/s of disk", l.IoMiBPerS))
	}
	return strings.Join(out, ", ")
}
