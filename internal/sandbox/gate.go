package sandbox

import (
	"container/list"
	"context"
	"sync"
)

// gate hands out slots: to one tenant's users after the other's, to those of one in the order in which they asked, and to background work only
// when no user waits. Background work never takes the last slot of several, so that a user finds one free.
type gate struct {
	slots    int
	maxQueue int // of each tenant

	mu        sync.Mutex
	active    int       // slots in use
	lowActive int       // of them, by background work
	lanes     list.List // of *lane: tenants whose users wait, the one first whose turn is next
	byOwner   map[string]*lane
	low       list.List     // of *ticket
	calm      chan struct{} // closed when no user has a slot or waits for one; nil: nobody wants to know
}

// lane is the queue of one tenant's users.
type lane struct {
	owner   string
	tickets list.List     // of *ticket; never empty
	element *list.Element // of the gate's lanes
}

// ticket is a place in the queue of a gate, and then a slot.
type ticket struct {
	gate    *gate
	low     bool
	owner   string
	granted chan struct{} // closed when it is a slot
	element *list.Element // nil once granted or given up; guarded by gate.mu
	once    sync.Once
}

func newGate(slots, maxQueue int) *gate {
	return &gate{slots: max(slots, 1), maxQueue: maxQueue, byOwner: map[string]*lane{}}
}

// full reports whether more work of a tenant would have to wait behind a queue of its own that is full. One request's work may exceed the queue:
// it is bounded by the request's own limit.
func (g *gate) full(owner string) bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	l := g.byOwner[owner]
	return l != nil && l.tickets.Len() >= g.maxQueue
}

// enqueue takes a place in a tenant's queue. The ticket must be released, whether or not it was waited for.
func (g *gate) enqueue(owner string) *ticket {
	g.mu.Lock()
	defer g.mu.Unlock()
	t := &ticket{gate: g, owner: owner, granted: make(chan struct{})}
	l := g.byOwner[owner]
	if l == nil {
		l = &lane{owner: owner}
		l.element = g.lanes.PushBack(l)
		g.byOwner[owner] = l
	}
	t.element = l.tickets.PushBack(t)
	g.grantLocked()
	return t
}

// enqueueLow is enqueue for work in the background.
func (g *gate) enqueueLow() *ticket {
	g.mu.Lock()
	defer g.mu.Unlock()
	t := &ticket{gate: g, low: true, granted: make(chan struct{})}
	t.element = g.low.PushBack(t)
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
			g.dropLocked(t)
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

// dropLocked takes a ticket out of its queue.
func (g *gate) dropLocked(t *ticket) {
	if t.low {
		g.low.Remove(t.element)
	} else if l := g.byOwner[t.owner]; l != nil {
		l.tickets.Remove(t.element)
		if l.tickets.Len() == 0 {
			g.lanes.Remove(l.element)
			delete(g.byOwner, l.owner)
		}
	}
	t.element = nil
}

// idle returns a channel that is closed once no user has a slot or waits for one.
func (g *gate) idle() <-chan struct{} {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.calm == nil {
		g.calm = make(chan struct{})
	}
	calm := g.calm
	g.tellCalmLocked()
	return calm
}

func (g *gate) tellCalmLocked() {
	if g.calm != nil && g.active == g.lowActive && g.lanes.Len() == 0 {
		close(g.calm)
		g.calm = nil
	}
}

func (g *gate) grantLocked() {
	defer g.tellCalmLocked()
	for g.active < g.slots && g.lanes.Len() > 0 {
		l := g.lanes.Front().Value.(*lane)
		g.lanes.MoveToBack(l.element)
		g.grantOneLocked(l.tickets.Front().Value.(*ticket))
	}
	for g.active < g.slots && g.lanes.Len() == 0 && g.low.Len() > 0 && g.lowActive < max(g.slots-1, 1) {
		g.lowActive++
		g.grantOneLocked(g.low.Front().Value.(*ticket))
	}
}

func (g *gate) grantOneLocked(t *ticket) {
	g.dropLocked(t)
	g.active++
	close(t.granted)
}

// load returns the slots in use and the users that wait.
func (g *gate) load() (active, queued int) {
	g.mu.Lock()
	defer g.mu.Unlock()
	for _, l := range g.byOwner {
		queued += l.tickets.Len()
	}
	return g.active, queued
}
