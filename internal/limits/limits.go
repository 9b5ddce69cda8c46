// Package limits bounds what a monitor may take of the host, by control groups of version 1 or 2, and says which bound ended it.
//
// A Root is a group of the daemon's own. Below it each machine has one, made before its monitor, which is started inside it. What is left of an
// earlier daemon is found there and removed. This package knows no machines and decides no limits.
package limits

import (
	"errors"
	"fmt"
)

// Limits bound one group. Zero values are no limits.
type Limits struct {
	MemoryMiB int     `json:"memory_mib,omitempty"`   // all that is charged to the group: private guest memory, the monitor, page tables
	CPUs      float64 `json:"cpus,omitempty"`         // of processor time a second
	PIDs      int     `json:"pids,omitempty"`         // processes and threads
	IOMiBPerS int     `json:"io_mib_per_s,omitempty"` // read from, and as much written to, the disk that the Root was opened with
}

// Or returns the limits with those of other where there are none.
func (l Limits) Or(other Limits) Limits {
	if l.MemoryMiB == 0 {
		l.MemoryMiB = other.MemoryMiB
	}
	if l.CPUs == 0 {
		l.CPUs = other.CPUs
	}
	if l.PIDs == 0 {
		l.PIDs = other.PIDs
	}
	if l.IOMiBPerS == 0 {
		l.IOMiBPerS = other.IOMiBPerS
	}
	return l
}

// ErrUnavailable says that this host can't keep a limit.
var ErrUnavailable = errors.New("this host can't keep that limit")

// controller is what a kind of limit needs.
type controller string

const (
	memory controller = "memory"
	cpu    controller = "cpu"
	pids   controller = "pids"
	io     controller = "io" // "blkio" in version 1
)

// controllers are all that a group uses where they are there.
func controllers() []controller { return []controller{memory, cpu, pids, io} }

// wants says which limit is set for a controller, for messages; "" for none.
func (l Limits) wants(c controller) string {
	switch {
	case c == memory && l.MemoryMiB > 0:
		return fmt.Sprintf("memory limit of %d MiB", l.MemoryMiB)
	case c == cpu && l.CPUs > 0:
		return fmt.Sprintf("limit of %g CPUs", l.CPUs)
	case c == pids && l.PIDs > 0:
		return fmt.Sprintf("limit of %d processes", l.PIDs)
	case c == io && l.IOMiBPerS > 0:
		return fmt.Sprintf("disk limit of %d MiB/s", l.IOMiBPerS)
	}
	return ""
}

// setting is a file of a group and what to write there.
type setting struct {
	file, value string
	how         how
}

// how strictly a setting is meant.
type how int

const (
	must    how = iota
	mayLack     // not every kernel has that file
	mayFail     // it is tried again
)

// cpuPeriod is the usual one, in microseconds.
const cpuPeriod = 100_000

// settings are the files for one controller's limit, in the order in which to write them.
func (r *Root) settings(c controller, l Limits) []setting {
	if r.version == 1 {
		return settingsV1(c, l, r.device)
	}
	return settingsV2(c, l, r.device)
}

func settingsV1(c controller, l Limits, device string) []setting {
	switch c {
	case memory:
		bytes := number(int64(l.MemoryMiB)<<20, "-1")
		// The sum with swap is never less than the first: which of them can go first depends on whether it is more or less than before.
		return []setting{{"memory.limit_in_bytes", bytes, mayFail}, {"memory.memsw.limit_in_bytes", bytes, mayLack}, {"memory.limit_in_bytes", bytes, must}}
	case cpu:
		return []setting{{"cpu.cfs_period_us", fmt.Sprint(cpuPeriod), must}, {"cpu.cfs_quota_us", number(int64(l.CPUs*cpuPeriod), "-1"), must}}
	case pids:
		return []setting{{"pids.max", number(int64(l.PIDs), "max"), must}}
	}
	value := fmt.Sprintf("%s %d", device, int64(l.IOMiBPerS)<<20)
	return []setting{{"blkio.throttle.read_bps_device", value, must}, {"blkio.throttle.write_bps_device", value, must}}
}

func settingsV2(c controller, l Limits, device string) []setting {
	switch c {
	case memory:
		set := []setting{{"memory.max", number(int64(l.MemoryMiB)<<20, "max"), must}}
		swap := "0"
		if l.MemoryMiB == 0 {
			swap = "max"
		}
		return append(set, setting{"memory.swap.max", swap, mayLack}, setting{"memory.oom.group", "1", mayLack})
	case cpu:
		return []setting{{"cpu.max", fmt.Sprintf("%s %d", number(int64(l.CPUs*cpuPeriod), "max"), cpuPeriod), must}}
	case pids:
		return []setting{{"pids.max", number(int64(l.PIDs), "max"), must}}
	}
	rate := number(int64(l.IOMiBPerS)<<20, "max")
	return []setting{{"io.max", fmt.Sprintf("%s rbps=%s wbps=%s", device, rate, rate), must}}
}

// number is a value, or the word for none.
func number(n int64, none string) string {
	if n <= 0 {
		return none
	}
	return fmt.Sprint(n)
}
