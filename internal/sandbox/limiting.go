package sandbox

import (
	"errors"
	"fmt"

	"github.com/forkd/forkd/internal/limits"
	"github.com/forkd/forkd/internal/vmm"
)

// leastMemoryMiB is what a limit must leave a machine: its monitor takes most of that. With less it would be killed before it answers.
const leastMemoryMiB = 64

// Most that a limit may be: what is more is a mistake.
const (
	mostCPUs  = 1024
	mostPIDs  = 1 << 20
	leastPIDs = 32 // threads of a monitor
	leastCPUs = 0.01
)

// checkLimits refuses limits that make no sense. What this host can keep is looked at when it is known what is to be limited.
func checkLimits(l limits.Limits) error {
	switch {
	case l.MemoryMiB < 0 || l.PIDs < 0 || l.CPUs < 0 || l.IOMiBPerS < 0:
		return invalid("0 is for none", "a limit is negative")
	case l.CPUs > 0 && l.CPUs < leastCPUs || l.CPUs > mostCPUs:
		return invalid("", "a limit of %g CPUs: choose %g to %d", l.CPUs, leastCPUs, mostCPUs)
	case l.PIDs > 0 && l.PIDs < leastPIDs || l.PIDs > mostPIDs:
		return invalid("a monitor has that many threads itself", "a limit of %d processes: choose %d to %d", l.PIDs, leastPIDs, mostPIDs)
	}
	return nil
}

// limitsOf are the limits of a sandbox: what was asked for, else those of the snapshot, else the daemon's. It refuses what can't be kept.
func (m *Manager) limitsOf(f *frozen, asked limits.Limits) (limits.Limits, error) {
	l := asked.Or(f.manifest.Recipe.Limits)
	if mib := l.MemoryMiB; mib > 0 && mib < leastMemoryMiB {
		return l, invalid(fmt.Sprintf("ask for at least %d MiB", leastMemoryMiB),
			"a memory limit of %d MiB can't be kept: the monitor of a sandbox takes up to %d beside what its guest changes", mib, leastMemoryMiB)
	}
	if err := m.cfg.Groups.Can(m.toSet(f, l)); err != nil {
		return l, newError(CodeLimitsUnavailable, err, "`forkd doctor` says what this host lacks; or fork without that limit", "children of snapshot %s can't be limited", f.name())
	}
	return l.Or(m.cfg.Groups.Default(m.limits.Default)), nil
}

// toSet are those of a child's limits that have to be set: not one of memory that it can't exceed anyway, where it could not be set.
func (m *Manager) toSet(f *frozen, l limits.Limits) limits.Limits {
	if l.MemoryMiB >= f.manifest.Shape.MemMiB+monitorAtMost && m.cfg.Groups.Can(limits.Limits{MemoryMiB: l.MemoryMiB}) != nil {
		l.MemoryMiB = 0
	}
	return l
}

// cgroup makes the group of a machine, and opens what its monitor is started with; done closes that.
func (m *Manager) cgroup(id string, l limits.Limits) (g *limits.Group, at *vmm.Cgroup, done func(), err error) {
	if g, err = m.cfg.Groups.Make(id, l); err != nil || g == nil {
		return nil, nil, func() {}, err
	}
	dir, tasks, err := g.Files()
	if err != nil {
		return nil, nil, nil, errors.Join(err, g.Remove())
	}
	return g, &vmm.Cgroup{Dir: dir, Tasks: tasks}, func() {
		_ = dir.Close() // nil is an error that does no harm
		for _, f := range tasks {
			_ = f.Close()
		}
	}, nil
}

// limited says which limit ended a machine; "" when none did.
func limited(g *limits.Group) string {
	if g.Events().OOMKills == 0 {
		return ""
	}
	if mib := g.Limits().MemoryMiB; mib > 0 {
		return fmt.Sprintf("out of memory: the sandbox came to its memory limit of %d MiB, and its monitor was killed", mib)
	}
	return "out of memory: the host had none left, and killed the monitor"
}

// blame adds to the error of a start that a limit was the reason.
func (c *child) blame(err error) error {
	if why := limited(c.group); err != nil && why != "" {
		return fmt.Errorf("%s: %w", why, err)
	}
	return err
}

// ended turns the end of the machine into that of its sandbox. Preconditions: the machine has ended.
func (c *child) ended() (State, string) {
	exit := c.machine.Exit()
	if why := limited(c.group); why != "" && exit.Reason == vmm.ExitCrashed {
		return StateFailed, why
	}
	return endOf(exit)
}
