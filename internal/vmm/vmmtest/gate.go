package vmmtest

import (
	"net"
	"sync"
	"time"
)

// gate is the vCPU of a fake machine: guest code runs only inside it.
type gate struct {
	mu     sync.Mutex
	cond   *sync.Cond
	opened bool
	since  time.Time     // when it was opened
	ran    time.Duration // how long it was open before that
	inside int
}

func newGate() *gate {
	g := &gate{}
	g.cond = sync.NewCond(&g.mu)
	return g
}

func (g *gate) open() {
	g.mu.Lock()
	defer g.mu.Unlock()
	if !g.opened {
		g.opened, g.since = true, time.Now()
	}
	g.cond.Broadcast()
}

// shut returns when nobody is inside.
func (g *gate) shut() {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.opened {
		g.opened, g.ran = false, g.ran+time.Since(g.since)
	}
	for g.inside > 0 {
		g.cond.Wait()
	}
}

// time is how long the gate was open in all.
func (g *gate) time() time.Duration {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.opened {
		return g.ran + time.Since(g.since)
	}
	return g.ran
}

// setTime sets what time returns. Preconditions: the gate is shut.
func (g *gate) setTime(ran time.Duration) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.ran = ran
}

func (g *gate) isOpen() bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.opened
}

// enter waits until the gate is open. Whoever is inside must not block on anything outside.
func (g *gate) enter() {
	g.mu.Lock()
	defer g.mu.Unlock()
	for !g.opened {
		g.cond.Wait()
	}
	g.inside++
}

func (g *gate) leave() {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.inside--
	g.cond.Broadcast()
}

// through runs a piece of guest code.
func (g *gate) through(do func()) {
	g.enter()
	defer g.leave()
	do()
}

// gatedConn is a guest port as the guest sees it: while the machine is paused nothing comes in, and nothing goes out.
type gatedConn struct {
	net.Conn
	gate *gate
}

func (c gatedConn) Read(b []byte) (int, error) {
	n, err := c.Conn.Read(b)
	c.gate.through(func() {})
	return n, err
}

func (c gatedConn) Write(b []byte) (int, error) {
	c.gate.through(func() {})
	return c.Conn.Write(b)
}
