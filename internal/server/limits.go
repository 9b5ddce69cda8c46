package server

import (
	"github.com/forkd/forkd/api"
	"github.com/forkd/forkd/internal/limits"
)

// limitsOf reads limits. memory_limit_mib, which is published, is one of them; where both are given they are to be the same.
func limitsOf(b *api.Limits, published *int) (limits.Limits, error) {
	mib, err := memoryLimit(published)
	if err != nil {
		return limits.Limits{}, err
	}
	if b == nil {
		return limits.Limits{MemoryMiB: mib}, nil
	}
	for _, f := range []struct {
		name  string
		value int
	}{{"limits.memory_mib", b.MemoryMiB}, {"limits.pids", b.Pids}, {"limits.io_mib_per_s", b.IoMiBPerS}} {
		if err := between(f.name, f.value, 0, maxSize); err != nil {
			return limits.Limits{}, err
		}
	}
	if mib != 0 && b.MemoryMiB != 0 && mib != b.MemoryMiB {
		return limits.Limits{}, invalid("give one of them", "memory_limit_mib is %d and limits.memory_mib is %d", mib, b.MemoryMiB)
	}
	l := limits.Limits{MemoryMiB: b.MemoryMiB, CPUs: b.Cpus, PIDs: b.Pids, IOMiBPerS: b.IoMiBPerS}
	return l.Or(limits.Limits{MemoryMiB: mib}), nil
}

// limitsInfo shows limits; nil for none.
func limitsInfo(l limits.Limits) *api.Limits {
	if l == (limits.Limits{}) {
		return nil
	}
	return &api.Limits{MemoryMiB: l.MemoryMiB, Cpus: l.CPUs, Pids: l.PIDs, IoMiBPerS: l.IOMiBPerS}
}
