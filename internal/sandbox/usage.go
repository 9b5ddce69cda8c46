package sandbox

import (
	"context"
	"sync"
	"time"

	"github.com/forkd/forkd/internal/memory"
	"github.com/forkd/forkd/internal/procstat"
)

// Usage is what a running sandbox uses of the host.
type Usage struct {
	memory.Usage
	Process    procstat.Usage
	StateBytes int64 // of what it was last suspended to, on disk
}

// Usage measures a sandbox's monitor.
func (m *Manager) Usage(ctx context.Context, id string) (Usage, error) {
	b, c, err := m.running(ctx, id)
	if err != nil {
		return Usage{}, err
	}
	var img *memory.Image
	if c.image != nil {
		img = c.image.Image()
	}
	var u Usage
	pid := c.machine.Process().PID
	u.Usage, err = memory.Measure(pid, img)
	if err == nil {
		u.Process, err = procstat.Read(pid)
	}
	if err != nil {
		if _, _, gone := m.running(ctx, id); gone != nil {
			return Usage{}, gone
		}
		return Usage{}, fault(err, "figures of sandbox %s", id)
	}
	if state := b.state.Load(); state != nil {
		m.mu.Lock()
		u.StateBytes = state.stored.Memory.PhysicalBytes + state.stored.Device.Bytes
		m.mu.Unlock()
	}
	return u, nil
}

// anonymousAge is how old the figure of anonymous memory may be: it takes a look at every process.
const anonymousAge = 15 * time.Second

// ownMemory remembers the anonymous memory of all sandboxes for a while.
type ownMemory struct {
	mu    sync.Mutex
	at    time.Time
	bytes int64
}

// anonymous adds up the memory that is the sandboxes' own.
func (m *Manager) anonymous() int64 {
	m.own.mu.Lock()
	defer m.own.mu.Unlock()
	if !m.own.at.IsZero() && time.Since(m.own.at) < anonymousAge {
		return m.own.bytes
	}
	total := int64(0)
	for _, b := range m.allBoxes() {
		if c, err := b.running(); err == nil {
			bytes, _ := memory.Anonymous(c.machine.Process().PID) // one that ends meanwhile has none
			total += bytes
		}
	}
	m.own.at, m.own.bytes = time.Now(), total
	return total
}
