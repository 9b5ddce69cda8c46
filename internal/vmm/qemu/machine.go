package qemu

import (
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/forkd/forkd/internal/vmm"
	"github.com/forkd/forkd/internal/vmm/vmproc"
)

// capabilities make migration skip the RAM, which is in place already, and tell of its end by an event.
var capabilities = map[string]any{"capabilities": []map[string]any{
	{"capability": "x-ignore-shared", "state": true},
	{"capability": "events", "state": true},
}}

// session is a QEMU process with its control connection. It turns into a prepared or a machine.
type session struct {
	process   *vmproc.Process
	qmp       *monitor
	log       *slog.Logger
	migration chan string                  // statuses of the incoming migration
	guestEnd  chan struct{}                // closed when the guest has shut down
	control   atomic.Pointer[net.UnixConn] // made ahead for the first Dial of the control port; see dialAhead

	endOnce sync.Once
	detail  string // why the guest ended; valid when guestEnd is closed
}

// connect opens the control connection of a process and negotiates.
func connect(ctx context.Context, p *vmproc.Process, log *slog.Logger) (*session, error) {
	conn, err := vmproc.Dial(ctx, p.ID.Dir, qmpSocket)
	if err != nil {
		return nil, fmt.Errorf("control socket: %w", err)
	}
	s := &session{process: p, log: log, migration: make(chan string, 8), guestEnd: make(chan struct{})}
	s.qmp = newMonitor(conn, s.event)
	if err := s.qmp.negotiate(ctx); err != nil {
		s.qmp.close()
		return nil, err
	}
	return s, nil
}

func (s *session) event(name string, data json.RawMessage) {
	var d struct {
		Status string `json:"status"`
		Reason string `json:"reason"`
		Action string `json:"action"`
	}
	json.Unmarshal(data, &d) // an event of another form says nothing we need
	switch name {
	case "MIGRATION":
		select {
		case s.migration <- d.Status:
		default:
		}
	case "SHUTDOWN":
		s.guestEnded("guest ended: " + d.Reason)
	case "GUEST_PANICKED":
		s.guestEnded("guest panicked")
	}
}

func (s *session) guestEnded(detail string) {
	s.endOnce.Do(func() {
		s.detail = detail
		close(s.guestEnd)
	})
}

// dialAhead connects to the control port before the device state is loaded. The guest was frozen with a host connected; one that comes
// only after the load would be announced to it, and cost it thousands of instructions before its first answer.
func (s *session) dialAhead(ctx context.Context) error {
	c, err := vmproc.Dial(ctx, s.process.ID.Dir, controlSocket)
	if err != nil {
		return fmt.Errorf("guest port %d: %w", vmm.PortControl, err)
	}
	s.control.Store(c)
	return nil
}

// discard kills the process and removes its files.
func (s *session) discard() error {
	if c := s.control.Swap(nil); c != nil {
		c.Close()
	}
	s.process.Kill()
	s.qmp.close()
	return s.process.Clean()
}

// prepared is a child without device state.
type prepared struct{ session *session }

func (p *prepared) Process() vmm.Process { return p.session.process.ID }
func (p *prepared) Kill() error          { return p.session.discard() }

// SendFile implements vmm.FileReceiver.
func (p *prepared) SendFile(ctx context.Context, f *os.File) (int, error) {
	return p.session.sendFile(ctx, f)
}

// Load implements vmm.Prepared.
func (p *prepared) Load(ctx context.Context, state *os.File) (vmm.Machine, error) {
	s := p.session
	if err := s.load(ctx, state); err != nil {
		s.discard()
		return nil, s.process.Explain(fmt.Errorf("load device state: %w", err))
	}
	return s.machine(), nil
}

func (s *session) load(ctx context.Context, state *os.File) error {
	// A description of its own: siblings that load at the same time must not share an offset.
	own, err := os.Open(fmt.Sprintf("/proc/self/fd/%d", state.Fd()))
	if err != nil {
		return err
	}
	defer own.Close()
	if err := s.qmp.do(ctx, "getfd", map[string]any{"fdname": "state"}, nil, own); err != nil {
		return err
	}
	if err := s.qmp.do(ctx, "migrate-incoming", map[string]any{"uri": "fd:state"}, nil); err != nil {
		return err
	}
	for {
		select {
		case status := <-s.migration:
			switch status {
			case "completed":
				return nil
			case "failed":
				// QEMU says why on its error output and exits by itself; wait for that, so that the reason is in the error.
				select {
				case <-s.process.Done():
				case <-time.After(2 * time.Second):
				}
				return fmt.Errorf("QEMU refused the state: %w", vmm.ErrIncompatible)
			}
		case <-s.process.Done():
			return fmt.Errorf("QEMU refused the state and ended (%s): %w", s.process.Status, vmm.ErrIncompatible)
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

func (s *session) sendFile(ctx context.Context, f *os.File) (int, error) {
	var r struct {
		FD int `json:"fd"`
	}
	if err := s.qmp.do(ctx, "add-fd", nil, &r, f); err != nil {
		return 0, err
	}
	return r.FD, nil
}

// machine is a QEMU that holds a guest.
type machine struct {
	session *session
	done    chan struct{}
	exit    vmm.Exit

	console chan struct{} // holds a value while the console is being read

	mu     sync.Mutex
	killed bool
}

var (
	_ vmm.Machine      = (*machine)(nil)
	_ vmm.Console      = (*machine)(nil)
	_ vmm.FileReceiver = (*machine)(nil)
)

func (s *session) machine() *machine {
	m := &machine{session: s, done: make(chan struct{}), console: make(chan struct{}, 1)}
	go m.watch()
	return m
}

// watch closes done when the guest or its monitor has ended. A guest's end leaves the monitor paused, so its console can be saved.
func (m *machine) watch() {
	defer close(m.done)
	s := m.session
	select {
	case <-s.guestEnd:
		m.exit = m.guestExit()
	case <-s.process.Done():
		m.mu.Lock()
		defer m.mu.Unlock()
		m.exit = vmm.Exit{Reason: vmm.ExitCrashed, Detail: "QEMU: " + s.process.Status}
		if m.killed {
			m.exit = vmm.Exit{Reason: vmm.ExitKilled}
		} else if said := s.process.Said(); said != "" {
			m.exit.Detail += ": " + said
		}
	}
}

// lastWords bounds the wait for a guest's console when the guest has ended.
const lastWords = 2 * time.Second

// guestExit is the end of a guest that ended by itself: a panic looks like a reboot, but for the console.
func (m *machine) guestExit() vmm.Exit {
	ctx, cancel := context.WithTimeout(context.Background(), lastWords)
	defer cancel()
	console, err := m.Console(ctx)
	if why := vmm.PanicIn(console); err == nil && why != "" {
		return vmm.Exit{Reason: vmm.ExitPanicked, Detail: why}
	}
	return vmm.Exit{Reason: vmm.ExitShutdown, Detail: m.session.detail}
}

func (m *machine) Process() vmm.Process  { return m.session.process.ID }
func (m *machine) Done() <-chan struct{} { return m.done }
func (m *machine) Exit() vmm.Exit        { return m.exit }

func (m *machine) do(ctx context.Context, command string, args, result any, files ...*os.File) error {
	return goneOr(m.session.qmp.do(ctx, command, args, result, files...))
}

// goneOr says that the machine is gone where that is what an error of a control connection means.
func goneOr(err error) error {
	if err == nil || errors.Is(err, vmm.ErrGone) {
		return err
	}
	if errors.Is(err, errMonitorClosed) || errors.Is(err, net.ErrClosed) || errors.Is(err, unix.EPIPE) || errors.Is(err, unix.ECONNRESET) {
		return fmt.Errorf("%w: %w", err, vmm.ErrGone)
	}
	return err
}

// Pause implements vmm.Machine.
func (m *machine) Pause(ctx context.Context) error { return m.do(ctx, "stop", nil, nil) }

// Resume implements vmm.Machine.
func (m *machine) Resume(ctx context.Context) error { return m.do(ctx, "cont", nil, nil) }

// SendFile implements vmm.FileReceiver.
func (m *machine) SendFile(ctx context.Context, f *os.File) (int, error) {
	return m.session.sendFile(ctx, f)
}

// Dial implements vmm.Machine.
func (m *machine) Dial(ctx context.Context, port uint32) (net.Conn, error) {
	name := ""
	switch port {
	case vmm.PortControl:
		name = controlSocket
	case vmm.PortData:
		name = dataSocket
	default:
		return nil, fmt.Errorf("guest port %d: this machine has %d and %d: %w", port, vmm.PortControl, vmm.PortData, vmm.ErrInvalidConfig)
	}
	if port == vmm.PortControl {
		if c := m.session.control.Swap(nil); c != nil {
			return c, nil
		}
	}
	c, err := vmproc.Dial(ctx, m.session.process.ID.Dir, name)
	if errors.Is(err, unix.ECONNREFUSED) || errors.Is(err, os.ErrNotExist) {
		return nil, fmt.Errorf("guest port %d: %w: %w", port, err, vmm.ErrGone)
	}
	if err != nil {
		return nil, fmt.Errorf("guest port %d: %w", port, err)
	}
	return c, nil
}

// Console implements vmm.Console. QEMU's ring is emptied by reading it, so what was read is kept in the machine's directory.
func (m *machine) Console(ctx context.Context) ([]byte, error) {
	select {
	case m.console <- struct{}{}:
		defer func() { <-m.console }()
	case <-ctx.Done():
		return nil, fmt.Errorf("guest console: %w", ctx.Err())
	}
	path := filepath.Join(m.session.process.ID.Dir, consoleFile)
	kept, err := os.ReadFile(path)
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, fmt.Errorf("guest console: %w", err)
	}
	var b64 string
	err = m.do(ctx, "ringbuf-read", map[string]any{"device": "console", "size": consoleRing, "format": "base64"}, &b64)
	if err != nil {
		if errors.Is(err, vmm.ErrGone) && kept != nil {
			return kept, nil
		}
		return nil, fmt.Errorf("guest console: %w", err)
	}
	fresh, err := base64.StdEncoding.DecodeString(b64)
	if err != nil {
		return nil, fmt.Errorf("guest console: %w", err)
	}
	if len(fresh) == 0 {
		return kept, nil
	}
	kept = append(kept, fresh...)
	if over := len(kept) - vmm.ConsoleLimit; over > 0 {
		kept = kept[over:]
	}
	return kept, os.WriteFile(path, kept, 0o600)
}

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
	return err
}
