package firecracker

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"net"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/forkd/forkd/internal/vmm"
	"github.com/forkd/forkd/internal/vmm/vmproc"
)

// Files of a machine's run directory.
const (
	apiSocket    = "api.sock"
	vsockSocket  = "vsock.sock"
	consoleFile  = "console.log"
	olderConsole = "console.old"
)

// apiThread is the thread of Firecracker that serves its API. It sleeps but for our calls.
const apiThread = "fc_api"

// session is a Firecracker process with its API. It turns into a prepared or a machine.
type session struct {
	process   *vmproc.Process
	api       *api
	console   *console
	input     *os.File // the guest's serial port; nil: it reads nothing
	state     *os.File // what Firecracker holds as fdState
	scratch   scratch  // for memory that is saved with a state
	abilities *abilities
	log       *slog.Logger
	jailed    bool // it is started through a jailer
	memoryMiB int
	parent    bool        // its memory is Firecracker's own until it is frozen
	running   gate        // open while the guest runs
	halted    atomic.Bool // its guest said that it stops for good, and the process is killed for that
}

// gate is open or closed, and can be waited for.
type gate struct {
	mu   sync.Mutex
	open bool
	wait chan struct{} // closed when it opens; nil: nobody waits
}

func (g *gate) set(open bool) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.open = open; open && g.wait != nil {
		close(g.wait)
		g.wait = nil
	}
}

func (g *gate) isOpen() bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.open
}

// opened is closed when the gate opens, or is open.
func (g *gate) opened() <-chan struct{} {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.wait == nil {
		g.wait = make(chan struct{})
		if g.open {
			defer func() { close(g.wait); g.wait = nil }()
		}
	}
	return g.wait
}

// How soon an API that is not there yet is looked for again: closely at first, since a start takes 2 ms, later at leisure.
const (
	firstLook  = 200 * time.Microsecond
	lastLook   = 5 * time.Millisecond
	closeLooks = 25
)

// awaitAPI connects as soon as Firecracker listens.
func (s *session) awaitAPI(ctx context.Context) error {
	step := "wait for Firecracker's API"
	if s.jailed {
		step = "start through the jailer, and " + step
	}
	ctx, cancel := context.WithTimeoutCause(ctx, callLimit, fmt.Errorf("it did not listen within %v: %w", callLimit, context.DeadlineExceeded))
	defer cancel()
	for look, pause := 0, firstLook; ; look++ {
		if look > closeLooks {
			pause = min(2*pause, lastLook)
		}
		s.api.mu.Lock()
		err := s.api.connect(ctx)
		s.api.mu.Unlock()
		if err == nil {
			return nil
		}
		if !errors.Is(err, fs.ErrNotExist) && !errors.Is(err, unix.ECONNREFUSED) && context.Cause(ctx) == nil {
			return fmt.Errorf("%s: %w", step, err)
		}
		select {
		case <-s.process.Done():
			return fmt.Errorf("%s: it ended (%s): is it Firecracker? %w", step, s.process.Status, vmm.ErrGone)
		case <-ctx.Done():
			return fmt.Errorf("%s: %w", step, context.Cause(ctx))
		case <-time.After(pause):
		}
	}
}

// endGrace is how much later than its connections the end of a process may be seen.
const endGrace = 500 * time.Millisecond

// do makes a call, and says that the machine is gone where that is what an error means.
func (s *session) do(ctx context.Context, c call) error {
	err := s.api.do(ctx, c)
	if !errors.Is(err, errBroken) {
		return err
	}
	select {
	case <-s.process.Done():
		return fmt.Errorf("%w: %w (%s)", err, vmm.ErrGone, s.process.Status)
	case <-time.After(endGrace):
		return err
	}
}

// fail ends a session that could not be made use of, and adds to the error what Firecracker itself said.
func (s *session) fail(err error) error {
	if discarded := s.discard(); discarded != nil {
		err = errors.Join(err, discarded)
	}
	if s.process != nil {
		err = s.process.Explain(err)
	}
	return err
}

// discard kills the process and removes its files.
func (s *session) discard() error {
	if s.process == nil {
		s.closeFiles()
		return vmproc.CleanDir(s.api.dir)
	}
	s.process.Kill()
	s.api.close()
	if s.console != nil {
		s.console.close()
	}
	s.closeFiles()
	return s.process.Clean()
}

// letGo closes our side and leaves the process alone.
func (s *session) letGo() {
	s.api.close()
	if s.console != nil {
		s.console.letGo()
	}
	s.closeFiles()
}

func (s *session) closeFiles() {
	for _, f := range []*os.File{s.state, s.input, s.scratch.file} {
		if f != nil {
			_ = f.Close() // memfds and a pipe: nothing can be lost
		}
	}
}

// prepared is a Firecracker without a device state.
type prepared struct{ session *session }

func (p *prepared) Process() vmm.Process { return p.session.process.ID }
func (p *prepared) Kill() error          { return p.session.discard() }

// Load implements vmm.Prepared.
func (p *prepared) Load(ctx context.Context, state *os.File) (vmm.Machine, error) {
	s := p.session
	if err := s.load(ctx, state); err != nil {
		return nil, s.fail(fmt.Errorf("restore child: %w", err))
	}
	return s.machine(), nil
}

// machine is a Firecracker that holds a guest.
type machine struct {
	session *session
	done    chan struct{}
	exit    vmm.Exit

	mu      sync.Mutex
	killed  bool
	saved   bool                 // a state was saved since the guest ran last: it will drop its connections
	unsure  bool                 // it may run or stand still: a call that changes that failed
	untold  bool                 // it was paused since it ran last, and may not have been saved
	streams map[*stream]struct{} // connections to the guest
	wg      sync.WaitGroup       // of streams
}

var (
	_ vmm.Machine = (*machine)(nil)
	_ vmm.Console = (*machine)(nil)
)

func (s *session) machine() *machine {
	m := &machine{session: s, done: make(chan struct{}), streams: map[*stream]struct{}{}}
	go m.watch()
	return m
}

// watch closes done when the process has ended. Firecracker ends by itself, with status 0, when its guest does.
func (m *machine) watch() {
	defer close(m.done)
	p := m.session.process
	<-p.Done()
	panicked := m.session.panicked()
	m.mu.Lock()
	defer m.mu.Unlock()
	switch said := p.Said(); {
	case m.killed:
		m.exit = vmm.Exit{Reason: vmm.ExitKilled}
	case m.session.halted.Load():
		m.exit = vmm.Exit{Reason: vmm.ExitShutdown, Detail: "guest halted"}
	case p.Status == "exit status 0" && panicked != "":
		m.exit = vmm.Exit{Reason: vmm.ExitPanicked, Detail: panicked}
	case p.Status == "exit status 0":
		m.exit = vmm.Exit{Reason: vmm.ExitShutdown, Detail: "guest powered off or rebooted"}
	default:
		m.exit = vmm.Exit{Reason: vmm.ExitCrashed, Detail: "Firecracker: " + p.Status}
		if said != "" {
			m.exit.Detail += ": " + said
		}
	}
	for s := range m.streams {
		s.end()
	}
}

// endHalted ends a Firecracker whose guest has halted, or would switch its power off. Firecracker has none to switch: it would go on with a guest that
// does nothing any more.
func (s *session) endHalted() {
	s.halted.Store(true)
	go s.process.Kill()
}

// lastWords bounds the wait for the rest of a console when its monitor has ended.
const lastWords = 2 * time.Second

// panicked says what the guest's kernel died of; "" when it did not. Preconditions: the process has ended.
func (s *session) panicked() string {
	if s.console == nil {
		return ""
	}
	select {
	case <-s.console.done:
	case <-time.After(lastWords):
	}
	text, err := s.console.newest()
	if err != nil {
		return ""
	}
	return vmm.PanicIn(text)
}

func (m *machine) Process() vmm.Process  { return m.session.process.ID }
func (m *machine) Done() <-chan struct{} { return m.done }
func (m *machine) Exit() vmm.Exit        { return m.exit }

// Pause implements vmm.Machine.
func (m *machine) Pause(ctx context.Context) error {
	s := m.session
	mayHaveRun := s.running.isOpen() || m.unsureNow()
	if err := s.do(ctx, pauseVM()); err != nil {
		m.notCertain(err)
		return err
	}
	s.running.set(false)
	m.mu.Lock()
	m.unsure = false
	m.untold = m.untold || mayHaveRun
	m.mu.Unlock()
	return nil
}

// notCertain notes that a call that pauses or resumes failed: if it was not refused, it may have been carried out.
func (m *machine) notCertain(err error) {
	var refused *refusal
	if errors.As(err, &refused) {
		return
	}
	m.session.running.set(false)
	m.mu.Lock()
	defer m.mu.Unlock()
	m.unsure = true
}

func (m *machine) unsureNow() bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.unsure
}

// Resume implements vmm.Machine. After a state was saved the guest drops its connections: they are made again, and nobody notices.
func (m *machine) Resume(ctx context.Context) error {
	s := m.session
	if s.running.isOpen() { // see deafAfterPause for why Firecracker isn't asked
		select {
		case <-s.process.Done():
			return fmt.Errorf("resume: %w (%s)", vmm.ErrGone, s.process.Status)
		default:
			return nil
		}
	}
	if m.unsureNow() {
		if err := m.Pause(ctx); err != nil {
			return fmt.Errorf("resume a machine of which it is not known whether it runs: %w", err)
		}
	}
	if err := m.tell(ctx); err != nil {
		return fmt.Errorf("resume: %w", err)
	}
	m.mu.Lock()
	if m.saved {
		m.saved = false
		for s := range m.streams {
			s.restart() // it waits for the guest to run
		}
	}
	m.mu.Unlock()
	if err := s.do(ctx, resumeVM()); err != nil {
		m.notCertain(err)
		return err
	}
	s.running.set(true)
	return nil
}

// tell saves the device state of a machine that was only paused, and drops it, where Firecracker needs that.
func (m *machine) tell(ctx context.Context) error {
	s := m.session
	m.mu.Lock()
	untold := m.untold && !m.saved && !s.parent && s.abilities.deafAfterPause()
	m.untold = false
	m.saved = m.saved || untold
	m.mu.Unlock()
	if !untold {
		return nil
	}
	return s.save(ctx)
}

// Dial implements vmm.Machine.
func (m *machine) Dial(_ context.Context, port uint32) (net.Conn, error) {
	if port != vmm.PortControl && port != vmm.PortData {
		return nil, fmt.Errorf("guest port %d: this machine has %d and %d: %w", port, vmm.PortControl, vmm.PortData, vmm.ErrInvalidConfig)
	}
	select {
	case <-m.session.process.Done():
		return nil, fmt.Errorf("guest port %d: %w", port, vmm.ErrGone)
	default:
	}
	conn, err := m.openStream(port)
	if err != nil {
		return nil, fmt.Errorf("guest port %d: %w", port, err)
	}
	return conn, nil
}

// Console implements vmm.Console.
func (m *machine) Console(context.Context) ([]byte, error) { return m.session.console.newest() }

// Kill implements vmm.Machine.
func (m *machine) Kill() error {
	m.mu.Lock()
	select {
	case <-m.session.process.Done():
	default:
		m.killed = true
	}
	m.mu.Unlock()
	err := m.session.discard()
	<-m.done
	m.wg.Wait()
	return err
}

// Serial is the guest's serial port, for guests that have nothing better. Machines of an engine with Options.Serial have it.
type Serial interface {
	io.Writer // what is written, the guest reads
	// Listen returns what the guest writes from now on. The reader must keep up.
	Listen() <-chan []byte
}

var _ Serial = (*machine)(nil)

// Write implements Serial.
func (m *machine) Write(b []byte) (int, error) {
	if m.session.input == nil {
		return 0, errors.New("the guest's serial port is not connected")
	}
	return m.session.input.Write(b)
}

// Listen implements Serial.
func (m *machine) Listen() <-chan []byte { return m.session.console.listen() }
