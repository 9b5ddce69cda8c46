package sandbox

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"github.com/forkd/forkd/internal/guest/agentclient"
	"github.com/forkd/forkd/internal/guest/agentproto"
	"github.com/forkd/forkd/internal/limits"
	"github.com/forkd/forkd/internal/memory"
	"github.com/forkd/forkd/internal/netpolicy"
	"github.com/forkd/forkd/internal/vmm"
)

// child is a machine with its agent: a sandbox's, or a pool member's.
type child struct {
	id, dir string
	machine vmm.Machine
	agent   *agentclient.Client
	tap     *tap
	image   *memory.Ref // what its memory was when it started; nil when that can't be told, after a restart of the daemon
	drop    func()      // called when the machine is gone and its image given back; nil: nothing
	grant   *grant
	group   *limits.Group // nil: none
	network Network       // nil: none
	dials   atomic.Int32  // connections to it that are being made
	heard   *hearing

	// It may have a network that an earlier daemon made, and this one, without networks, can't change.
	unreachable bool

	life context.Context // ends when the machine is not its sandbox's any more; its cause is an *Error
	end  context.CancelCauseFunc
}

func newChild(id, dir string, g *grant) *child {
	c := &child{id: id, dir: dir, grant: g, heard: newHearing()}
	c.life, c.end = context.WithCancelCause(context.Background())
	return c
}

// dispose ends the machine and removes all it had. It may be called twice.
func (c *child) dispose() error {
	// The agent's connection goes last: closing it first would only make the guest busy.
	err := c.machine.Kill()
	c.tap.free() // nothing may wait for a line that leads nowhere
	err = errors.Join(err, ignoreClosed(c.agent.Close()))
	if err == nil {
		c.disconnect()
		err = errors.Join(os.RemoveAll(c.dir), c.group.Remove()) // else the directory stays, for the next Recover to find the process by
	}
	c.giveBack()
	c.grant.release()
	return err
}

// giveBack gives back the image.
func (c *child) giveBack() {
	if c.image != nil {
		c.image.Release()
	}
	if c.drop != nil {
		c.drop()
	}
}

// letGo closes our side and leaves the machine alone.
func (c *child) letGo() error {
	if c.image != nil {
		c.image.Release()
	}
	return ignoreClosed(c.agent.Close())
}

func ignoreClosed(err error) error {
	if errors.Is(err, net.ErrClosed) {
		return nil
	}
	return err
}

// launchPoints are the failpoints on the way of a launch.
type launchPoints struct{ prepared, loaded, identified string }

// launch starts a machine from a snapshot and gives it an identity. On an error nothing is left of it; the grant stays the caller's.
func (m *Manager) launch(ctx context.Context, f *frozen, id string, g *grant, who individual, l limits.Limits, points launchPoints) (*child, error) {
	ctx, cancel := context.WithTimeout(ctx, m.limits.LaunchTimeout)
	defer cancel()
	flat := m.noOverlay.Load()
	c, err := m.launchOnce(ctx, f, id, g, who, l, points)
	if flat || !errors.Is(err, memory.ErrNotPermitted) {
		return c, err
	}
	if !m.noOverlay.Swap(true) { // the first of those that found it out at once
		m.log.Warn("layers can't be mapped on this host: chains are flattened in memory instead, which shares less", "error", err)
	}
	return m.launchOnce(ctx, f, id, g, who, l, points)
}

func (m *Manager) launchOnce(ctx context.Context, f *frozen, id string, g *grant, who individual, l limits.Limits, points launchPoints) (_ *child, err error) {
	begin := time.Now()
	if err := f.live.await(ctx); err != nil {
		return nil, err
	}
	undo := &cleanup{}
	defer func() {
		if err != nil {
			m.warn(undo.run(), "unwind the start of a machine", id)
		}
	}()
	files, err := m.restoreFiles(ctx, f)
	if err != nil {
		return nil, err
	}
	c := newChild(id, m.machineDir(id), g)
	if c.image, err = m.resident(ctx, f); err != nil {
		return nil, err
	}
	c.drop = func() { m.dropUnkept(f) }
	undo.add(func() error { c.giveBack(); return nil })
	resident := time.Now()
	if err := os.Mkdir(c.dir, 0o700); err != nil {
		return nil, fmt.Errorf("machine directory: %w", err)
	}
	undo.add(func() error { return os.RemoveAll(c.dir) })
	var at *vmm.Cgroup
	var close func()
	if c.group, at, close, err = m.cgroup(id, m.toSet(f, l)); err != nil {
		return nil, err
	}
	defer close()
	undo.add(c.group.Remove)
	defer func() { err = c.blame(err) }() // before it is removed
	if err := m.connect(ctx, c, f.manifest.Shape, who.network, undo); err != nil {
		return nil, err
	}
	if err := m.startMachine(ctx, c, f, files, at, undo, points); err != nil {
		return nil, err
	}
	loaded := time.Now()
	m.newAgent(c, false)
	undo.add(func() error { return ignoreClosed(c.agent.Close()) })
	if err := m.awaken(ctx, c, who); err != nil {
		return nil, err
	}
	m.log.Debug("launched", "id", id, "tag", f.name(), "image", resident.Sub(begin), "load", loaded.Sub(resident), "identity", time.Since(loaded))
	return c, m.hit(ctx, points.identified)
}

// startMachine brings the machine up to the point at which it is loaded and paused.
func (m *Manager) startMachine(ctx context.Context, c *child, f *frozen, files restoreFiles, at *vmm.Cgroup, undo *cleanup, points launchPoints) error {
	img := c.image.Image()
	cfg := vmm.PrepareConfig{Dir: c.dir, Shape: f.manifest.Shape, Memory: img.Base(), Rootfs: files.rootfs, UFFD: m.uffd, Cgroup: at, NIC: c.nic()}
	for _, l := range img.Layers() {
		cfg.Layers = append(cfg.Layers, l.File)
	}
	prepared, err := m.engine.Prepare(ctx, cfg)
	if err != nil {
		return err
	}
	c.plugged()
	kill := prepared.Kill
	undo.add(func() error { return kill() })
	if err := m.hit(ctx, points.prepared); err != nil {
		return err
	}
	info, err := m.engine.Probe(ctx)
	if err != nil {
		return err
	}
	if !info.Features.LayersLoaded {
		if err := m.overlay(ctx, prepared.Process(), img, nil); err != nil {
			return err
		}
	}
	kill = func() error { return nil } // Load ends the monitor itself when it fails
	c.machine, err = prepared.Load(ctx, files.device)
	if err != nil {
		return err
	}
	kill = c.machine.Kill
	if info.Features.LayersLoaded {
		if err := m.overlay(ctx, c.machine.Process(), img, nil); err != nil {
			return err
		}
	}
	return m.hit(ctx, points.loaded)
}

// individual is what makes a machine one of its own.
type individual struct {
	name  string // instance id and host name
	env   []string
	hooks bool
	same  bool // it was that individual before: host name and machine id stay

	network netpolicy.Policy // what it may reach when it is launched
}

func (w individual) identity() agentproto.Identity {
	id := newIdentity(w.name, w.env, w.hooks)
	if w.same {
		id.Hostname, id.MachineID = "", ""
	}
	return id
}

// tapGrace bounds the wait for the first bytes to the agent before the guest is let run: they only save time, so a client that
// writes nothing at first is no error.
const tapGrace = 50 * time.Millisecond

// awaken lets a paused machine run and gives it its identity, whose first bytes wait in the guest's port when it starts to run. It fails
// closed: whoever gets an error must not hand the machine out.
func (m *Manager) awaken(ctx context.Context, c *child, who individual) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	wrote := c.tap.next()
	answer := make(chan error, 1)
	go func() { // its end is awaited below
		answer <- identify(ctx, c.agent, who.identity())
	}()
	grace := time.NewTimer(tapGrace)
	defer grace.Stop()
	select {
	case <-wrote:
	case <-grace.C:
	case <-c.machine.Done():
	case err := <-answer:
		return identityFault(ctx, c, err)
	}
	if err := c.machine.Resume(ctx); err != nil {
		cancel(err)
		<-answer
		return err
	}
	select {
	case err := <-answer:
		return identityFault(ctx, c, err)
	case <-c.machine.Done():
		cancel(vmm.ErrGone)
		return identityFault(ctx, c, <-answer)
	}
}

// identityFault says why a machine has no identity; nil when it has one.
func identityFault(ctx context.Context, c *child, err error) error {
	if err == nil {
		return nil
	}
	cause := context.Cause(ctx)
	var refused *agentproto.Error
	switch {
	case errors.As(err, &refused):
		return newError(CodeIdentityFailed, err, "a hook in /etc/forkd/on-fork.d may have failed: see the snapshot's image", "child %s could not take on its identity and was killed", c.id)
	case errors.Is(cause, vmm.ErrGone) || cause == nil && endsNow(c.machine, err):
		return newError(CodeIdentityFailed, fmt.Errorf("%s: %w", exitText(c.machine), err), "", "child %s ended before it had its identity", c.id)
	case errors.Is(cause, context.DeadlineExceeded):
		return newError(CodeIdentityFailed, err, "the host may be overloaded, or the guest has crashed", "child %s did not acknowledge its identity in time and was killed", c.id)
	case cause != nil:
		return cause
	}
	return newError(CodeIdentityFailed, err, "", "child %s could not be given its identity and was killed", c.id)
}

// exitText says why a machine ended.
func exitText(machine vmm.Machine) string {
	select {
	case <-machine.Done():
	default:
		return "its monitor can't be reached"
	}
	exit := machine.Exit()
	if exit.Reason == vmm.ExitPanicked {
		_, why := endOf(exit)
		return why
	}
	if exit.Detail != "" {
		return exit.Detail
	}
	return string(machine.Exit().Reason)
}

// endGrace is how much later the end of a monitor may be seen than the end of its connections.
const endGrace = 500 * time.Millisecond

// endsNow says whether a machine whose agent's connection broke has ended: that is often seen a moment later.
func endsNow(machine vmm.Machine, err error) bool {
	grace := time.NewTimer(0)
	if errors.Is(err, agentclient.ErrConnection) || errors.Is(err, vmm.ErrGone) {
		grace.Reset(endGrace)
	}
	defer grace.Stop()
	select {
	case <-machine.Done():
		return true
	case <-grace.C:
		return false
	}
}

// newAgent makes the client of a machine's agent, and the tap on its line.
func (m *Manager) newAgent(c *child, resync bool) {
	c.tap = &tap{Machine: c.machine}
	if m.cfg.Agent != nil {
		c.agent = m.cfg.Agent(c.tap)
		return
	}
	dial := func(ctx context.Context) (net.Conn, error) { return c.tap.Dial(ctx, vmm.PortControl) }
	c.agent = agentclient.New(dial, agentclient.Options{Resync: resync, Notice: c.heard.hear})
}

// tap is a machine that tells when something is written to one of its ports, and whose line can be held.
type tap struct {
	vmm.Machine
	line

	mu    sync.Mutex
	wrote chan struct{} // nil: nobody wants to know
}

// next returns a channel that is closed at the next write.
func (t *tap) next() <-chan struct{} {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.wrote = make(chan struct{})
	return t.wrote
}

func (t *tap) fire() {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.wrote != nil {
		close(t.wrote)
		t.wrote = nil
	}
}

// Dial implements vmm.Machine.
func (t *tap) Dial(ctx context.Context, port uint32) (net.Conn, error) {
	if err := t.line.enter(ctx.Done(), nil); err != nil { // the guest is told of a connection, too
		return nil, context.Cause(ctx)
	}
	defer t.line.leave()
	conn, err := t.Machine.Dial(ctx, port)
	if err != nil {
		return nil, err
	}
	return tappedConn{t.line.connect(conn), t}, nil
}

type tappedConn struct {
	*lineConn
	tap *tap
}

// Write implements net.Conn.
func (c tappedConn) Write(b []byte) (int, error) {
	n, err := c.lineConn.Write(b)
	c.tap.fire()
	return n, err
}

// warn logs what went wrong while something was taken down: the error that matters more was reported already.
func (m *Manager) warn(err error, what, id string) {
	if err != nil {
		m.log.Error(what, "id", id, "error", err)
	}
}
