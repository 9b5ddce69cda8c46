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
	StateBytes int64    // of what it was last suspended to, on disk
	Traffic    *Traffic // nil: it has no network
}

// Traffic is what went over a sandbox's network since it was started or resumed.
type Traffic struct{ SentBytes, ReceivedBytes uint64 } // by the guest

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
	if c.network != nil {
		status, err := c.network.Status()
		if err != nil {
			return Usage{}, fault(err, "traffic of sandbox %s", id)
		}
		u.Traffic = &Traffic{SentBytes: status.SentBytes, ReceivedBytes: status.ReceivedBytes}
	}
	if state := b.state.Load(); state != nil {
		m.mu.Lock()
		u.StateBytes = state.stored.Memory.PhysicalBytes + state.stored.Device.Bytes
		m.mu.Unlock()
	}
	return u, nil
}

// lookAge is how old figures may be that take a look at every sandbox.
const lookAge = 15 * time.Second

// looks remembers such figures for a while.
type looks struct {
	mu     sync.Mutex
	at     time.Time
	bytes  int64             // of anonymous memory
	denied uint64            // connections that policies did not let through, also of sandboxes that are gone: what was seen of them
	seen   map[string]uint64 // of them, by the sandboxes that are there
}

// look adds up what is the sandboxes' own memory, and what their networks denied.
func (m *Manager) look() (anonymous int64, denied uint64) {
	l := &m.looks
	l.mu.Lock()
	defer l.mu.Unlock()
	if !l.at.IsZero() && time.Since(l.at) < lookAge {
		return l.bytes, l.denied
	}
	l.at, l.bytes = time.Now(), 0
	seen := map[string]uint64{}
	for _, b := range m.allBoxes() {
		c, err := b.running()
		if err != nil {
			continue
		}
		bytes, _ := memory.Anonymous(c.machine.Process().PID) // one that ends meanwhile has none
		l.bytes += bytes
		if c.network == nil {
			continue
		}
		if status, err := c.network.Status(); err == nil {
			before := l.seen[b.id]
			if status.DeniedAttempts < before { // it was resumed, with a new network
				before = 0
			}
			l.denied += status.DeniedAttempts - before
			seen[b.id] = status.DeniedAttempts
		}
	}
	l.seen = seen
	return l.bytes, l.denied
}
