package sandbox

import (
	"container/list"
	"context"
	"sync"
)

// gate hands out slots: to users in the order in which they asked, to background work only when no user waits. Background work never
// takes the last slot of several, so that a user finds one free.
type gate struct {
	slots    int
	maxQueue int

	mu        sync.Mutex
	active    int       // slots in use
	lowActive int       // of them, by background work
	users     list.List // of *ticket
	low       list.List // of *ticket
}

// ticket is a place in the queue of a gate, and then a slot.
type ticket struct {
	gate    *gate
	low     bool
	granted chan struct{} // closed when it is a slot
	element *list.Element // nil once granted or given up; guarded by gate.mu
	once    sync.Once
}

func newGate(slots, maxQueue int) *gate { return &gate{slots: max(slots, 1), maxQueue: maxQueue} }

// full reports whether more work would have to wait behind a queue that is full. One request's work may exceed the queue: it is
// bounded by the request's own limit.
func (g *gate) full() bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.users.Len() >= g.maxQueue
}

// enqueue takes a place in the queue. The ticket must be released, whether or not it was waited for.
func (g *gate) enqueue(low bool) *ticket {
	g.mu.Lock()
	defer g.mu.Unlock()
	t := &ticket{gate: g, low: low, granted: make(chan struct{})}
	queue := &g.users
	if low {
		queue = &g.low
	}
	t.element = queue.PushBack(t)
	g.grantLocked()
	return t
}

// wait returns when the ticket is a slot, or with the cause of ctx's end.
func (t *ticket) wait(ctx context.Context) error {
	select {
	case <-t.granted:
		return nil
	default:
	}
	select {
	case <-t.granted:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// release gives the slot or the place back. Releasing twice is harmless.
func (t *ticket) release() {
	t.once.Do(func() {
		g := t.gate
		g.mu.Lock()
		defer g.mu.Unlock()
		if t.element != nil {
			queue := &g.users
			if t.low {
				queue = &g.low
			}
			queue.Remove(t.element)
			t.element = nil
			g.grantLocked()
			return
		}
		g.active--
		if t.low {
			g.lowActive--
		}
		g.grantLocked()
	})
}

func (g *gate) grantLocked() {
	for g.active < g.slots && g.users.Len() > 0 {
		g.grantFrontLocked(&g.users)
		g.active++
	}
	for g.active < g.slots && g.users.Len() == 0 && g.low.Len() > 0 && g.lowActive < max(g.slots-1, 1) {
		g.grantFrontLocked(&g.low)
		g.active++
		g.lowActive++
	}
}

func (g *gate) grantFrontLocked(queue *list.List) {
	t := queue.Remove(queue.Front()).(*ticket)
	t.element = nil
	close(t.granted)
}

// load returns the slots in use and the users that wait.
func (g *gate) load() (active, queued int) {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.active, g.users.Len()
}
