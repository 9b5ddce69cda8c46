package sandbox

import (
	"context"
	"errors"
	"fmt"
	"net"
	"sync"
	"time"

	"github.com/forkd/forkd/internal/netpolicy"
	"github.com/forkd/forkd/internal/vmm"
)

// Networks makes networks for machines. internal/hostnet has it.
type Networks interface {
	// Acquire returns a network that nothing passes. It must be quick: networks are made ahead.
	Acquire(context.Context) (Network, error)
	// Adopt takes over the network of a monitor that an earlier daemon started, and sees to it that its policy is p. It returns nil when the
	// monitor has none.
	Adopt(pid int, p netpolicy.Policy) (Network, error)
	KernelWord() string // tells a guest that boots its network
}

// Network is the network of one machine.
type Network interface {
	NIC() *vmm.NIC // for the monitor
	Started()      // the monitor has it
	GuestAddr() string
	// SetPolicy replaces what the guest may reach, in one step.
	SetPolicy(context.Context, netpolicy.Policy) error
	Status() (netpolicy.Status, error)
	// Dial connects to a TCP port of the guest.
	Dial(ctx context.Context, port int) (net.Conn, error)
	// Release gives the network up, without waiting. Preconditions: the monitor has ended or was never started.
	Release()
}

// checkNetwork says why children of a snapshot can't have a policy.
func (m *Manager) checkNetwork(name string, has bool, p netpolicy.Policy) error {
	if _, err := p.Parse(); err != nil {
		return newError(CodeInvalidArgument, err, "see docs/guide/network.md", "%s", name)
	}
	switch {
	case p.IsNone() && p.BandwidthMbit == 0:
		return nil
	case m.cfg.Networks == nil:
		return newError(CodeNetworkUnavailable, m.cfg.NoNetworks, "`forkd doctor` says what is missing; without a network ask for none",
			"%s can't have the network policy %q: there are no networks on this host", name, p)
	case !has:
		return newError(CodeInvalidState, nil, "make it anew on a host with networks, or ask for none", "%s has no network device, and can't have the network policy %q", name, p)
	}
	return nil
}

// inherited is the policy that what a caller makes from a snapshot has from it. What another tenant's snapshot may open of the host is not
// inherited: decision 0008.
func (f *frozen) inherited(who Caller) netpolicy.Policy {
	p := f.network
	p.Privileged = p.Privileged && who.Tenant == f.tenant
	return p
}

// network is the policy for children of a snapshot: the one that was asked for, or else the one that they inherit.
func (m *Manager) network(who Caller, f *frozen, asked *netpolicy.Policy) (netpolicy.Policy, error) {
	p := f.inherited(who)
	if asked != nil {
		p = *asked
	}
	return p, m.checkNetwork("snapshot "+f.name(), f.manifest.Shape.Net, p)
}

// connect gives a machine that is about to be started a network with a policy. A machine with a device and a host without networks is not
// plugged in. undo gets what takes it back.
func (m *Manager) connect(ctx context.Context, c *child, shape vmm.Shape, p netpolicy.Policy, undo *cleanup) error {
	if err := m.checkNetwork("machine "+c.id, shape.Net, p); err != nil {
		return err
	}
	if m.cfg.Networks == nil || !shape.Net {
		return nil
	}
	network, err := m.cfg.Networks.Acquire(ctx)
	if err != nil {
		return newError(CodeNetworkUnavailable, err, "`forkd doctor` says what may be missing", "no network for machine %s", c.id)
	}
	undo.add(func() error { network.Release(); return nil })
	c.network = network
	return network.SetPolicy(ctx, p)
}

// nic is what a machine's monitor is plugged into; nil: nothing.
func (c *child) nic() *vmm.NIC {
	if c.network == nil {
		return nil
	}
	return c.network.NIC()
}

// plugged says that the monitor has started.
func (c *child) plugged() {
	if c.network != nil {
		c.network.Started()
	}
}

// disconnect gives the network up. Preconditions: the monitor has ended.
func (c *child) disconnect() {
	if c.network != nil {
		c.network.Release()
	}
}

// reconnect takes over the network of a machine that outlived the daemon. Without networks now, the kernel goes on to hold its policy.
func (m *Manager) reconnect(c *child, p netpolicy.Policy) error {
	if m.cfg.Networks == nil {
		c.unreachable = true
		return nil
	}
	network, err := m.cfg.Networks.Adopt(c.machine.Process().PID, p)
	if err == nil && network == nil && !p.IsNone() {
		err = errors.New("it has none")
	}
	if err != nil {
		return fmt.Errorf("its network can't be taken over: %w", err)
	}
	c.network = network
	return nil
}

// SetNetwork changes what a sandbox may reach, at once if it runs. Connections that are not allowed any more end.
func (m *Manager) SetNetwork(ctx context.Context, id string, p netpolicy.Policy) (Sandbox, error) {
	ctx, done, err := m.enter(ctx)
	if err != nil {
		return Sandbox{}, err
	}
	defer done()
	b, err := m.find(ctx, id)
	if err != nil {
		return Sandbox{}, err
	}
	if err := m.checkNetwork("sandbox "+b.id, b.frozen.manifest.Shape.Net, p); err != nil {
		return Sandbox{}, err
	}
	if err := m.setNetwork(ctx, b, p); err != nil {
		return Sandbox{}, fault(err, "network of sandbox %s", id)
	}
	return b.view(), nil
}

// setNetwork records the policy and then has the kernel hold it. What could not be recorded or held is as before.
func (m *Manager) setNetwork(ctx context.Context, b *box, p netpolicy.Policy) error {
	unlock, err := b.hold(ctx)
	if err != nil {
		return err
	}
	defer unlock()
	if b.ending {
		return context.Cause(b.life)
	}
	ctx = context.WithoutCancel(ctx)
	var network Network
	if State(b.rec.State) != StateSuspended {
		c, err := b.runningLocked()
		if err != nil {
			return err
		}
		if network = c.network; network == nil && (c.unreachable || !p.IsNone() || p.BandwidthMbit > 0) {
			return m.noNetwork(b, c)
		}
	}
	old := b.rec.Network
	if err := m.db.SetNetwork(ctx, b.id, p); err != nil {
		return err
	}
	err = m.hit(ctx, pointNetworkRecorded)
	if err == nil && network != nil {
		err = network.SetPolicy(ctx, p)
	}
	if err != nil {
		return errors.Join(err, m.db.SetNetwork(ctx, b.id, old))
	}
	b.rec.Network = p
	return m.hit(ctx, pointNetworkHeld) // it is done all the same
}

// hold takes b.mu. A sandbox that is suspended is not being resumed then: its machine would run with the policy before.
func (b *box) hold(ctx context.Context) (unlock func(), err error) {
	b.mu.Lock()
	if State(b.rec.State) != StateSuspended {
		return b.mu.Unlock, nil
	}
	b.mu.Unlock()
	unfreeze, err := b.lock(ctx)
	if err != nil {
		return nil, err
	}
	b.mu.Lock()
	return func() { b.mu.Unlock(); unfreeze() }, nil
}

// noNetwork says why the policy of a sandbox that runs can't be changed.
func (m *Manager) noNetwork(b *box, c *child) error {
	if c.unreachable {
		return newError(CodeNetworkUnavailable, m.cfg.NoNetworks, "start the daemon with networks, or kill the sandbox: until then it may reach what it could before",
			"the network of sandbox %s was made by an earlier daemon, and this one has none", b.id)
	}
	return newError(CodeNetworkUnavailable, m.cfg.NoNetworks, "fork its snapshot again", "sandbox %s runs without a network", b.id)
}

// NetworkStatus tells what a sandbox may reach, and what it tried in vain.
func (m *Manager) NetworkStatus(ctx context.Context, id string) (netpolicy.Status, error) {
	b, err := m.find(ctx, id)
	if err != nil {
		return netpolicy.Status{}, err
	}
	b.mu.Lock()
	c, policy := b.child, b.rec.Network
	b.mu.Unlock()
	if c == nil || c.network == nil {
		return netpolicy.Status{Policy: policy}, nil
	}
	status, err := c.network.Status() // with the policy that is held, whatever was recorded
	return status, fault(err, "network of sandbox %s", id)
}

// dialLimit is how long a guest may take to accept a connection.
const dialLimit = 10 * time.Second

// maxDials is how many connections to a guest may wait for it to accept them at a time.
const maxDials = 64

// DialGuest connects to a TCP port of a sandbox, whatever its policy is: that is about what a guest begins. The connection ends with the sandbox,
// when it is suspended, and with the daemon; until it is closed the sandbox counts as used.
func (m *Manager) DialGuest(ctx context.Context, id string, port int) (net.Conn, error) {
	if port < 1 || port > 65535 {
		return nil, invalid("choose 1 to 65535", "port %d", port)
	}
	ctx, done, err := m.enter(ctx)
	if err != nil {
		return nil, err
	}
	defer done()
	b, c, idle, err := m.engage(ctx, id)
	if err != nil {
		return nil, err
	}
	if c.network == nil {
		idle()
		return nil, newError(CodeNetworkUnavailable, m.cfg.NoNetworks, "its snapshot was made without a network device, or this daemon has no networks: see `forkd doctor`",
			"sandbox %s has no network, and so no ports", id)
	}
	conn, err := c.dial(ctx, port)
	if err != nil {
		idle()
		if ctx.Err() != nil {
			return nil, context.Cause(ctx)
		}
		if errors.Is(err, errDials) {
			return nil, newError(CodeGuestUnreachable, err, "does anything accept them? let some end first", "port %d of sandbox %s is not tried", port, id)
		}
		return nil, newError(CodeGuestUnreachable, err, "does anything listen there, on all addresses and not on 127.0.0.1 only?", "port %d of sandbox %s can't be reached", port, id)
	}
	g := &guestConn{Conn: conn, idle: idle}
	for _, life := range []context.Context{b.life, c.life, m.life} {
		g.stops = append(g.stops, context.AfterFunc(life, func() { _ = g.Close() }))
	}
	return g, nil
}

// errDials is why a guest that accepts nothing is left alone.
var errDials = fmt.Errorf("%d connections wait for it to accept them already", maxDials)

// dial connects to a port of the guest in as much time, and with as many others, as it may have.
func (c *child) dial(ctx context.Context, port int) (net.Conn, error) {
	defer c.dials.Add(-1)
	if c.dials.Add(1) > maxDials {
		return nil, errDials
	}
	ctx, cancel := context.WithTimeout(ctx, dialLimit)
	defer cancel()
	return c.network.Dial(ctx, port)
}

// guestConn is a connection to a guest's port.
type guestConn struct {
	net.Conn
	idle  func()
	stops []func() bool
	once  sync.Once
}

// Close implements net.Conn.
func (g *guestConn) Close() error {
	err := g.Conn.Close()
	g.once.Do(func() {
		for _, stop := range g.stops {
			stop()
		}
		g.idle()
	})
	return err
}

// CloseWrite ends what is sent, as on a *net.TCPConn.
func (g *guestConn) CloseWrite() error {
	if half, ok := g.Conn.(interface{ CloseWrite() error }); ok {
		return half.CloseWrite()
	}
	return nil
}

// connectParent gives a parent a network device, where machines can have one, with the policy that its snapshot is to have.
func (c *creation) connectParent(ctx context.Context, parent *child) error {
	info, err := c.m.engine.Probe(ctx)
	if err != nil {
		return err
	}
	c.shape.Net = c.m.cfg.Networks != nil && info.Features.Net
	return c.m.connect(ctx, parent, c.shape, c.req.Network, c.undo)
}

// cmdline is what a parent's agent is told.
func (c *creation) cmdline() []string {
	words := c.image.Cmdline()
	if c.shape.Net {
		words = append(words, c.m.cfg.Networks.KernelWord())
	}
	return words
}
