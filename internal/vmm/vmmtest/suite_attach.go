package vmmtest

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"net"
	"os"
	"os/exec"
	"regexp"
	"strings"
	"testing"

	"github.com/forkd/forkd/internal/guest/agentproto"
	"github.com/forkd/forkd/internal/vmm"
)

func (s *suite) testAttach(t *testing.T) {
	if s.h.Detach == nil {
		t.Skip("the engine has one Machine for a monitor in a process; see AttachAfterDaemonDied")
	}
	first := s.fork(t, "attached")
	s.write(t, first, "before")
	first.agent.close()
	if err := s.h.Detach(first.Machine); err != nil {
		t.Fatalf("Detach: %v", err)
	}
	m, err := s.h.Engine.Attach(s.step(t), first.Process())
	if err != nil {
		t.Fatalf("Attach: %v", err)
	}
	s.checkAttached(t, m, first.Process())
	if err := m.Kill(); err != nil {
		t.Errorf("Kill of an attached machine: %v", err)
	}
	s.checkEnd(t, m, vmm.ExitKilled)
}

// checkAttached checks that a machine that was attached to works in every way.
func (s *suite) checkAttached(t *testing.T, m vmm.Machine, p vmm.Process) {
	t.Helper()
	if got := m.Process(); got.PID != p.PID || got.StartTicks != p.StartTicks || got.Dir != p.Dir {
		t.Errorf("Process: got %+v, want %+v", got, p)
	}
	v := s.withAgent(m, true)
	defer v.agent.close()
	s.ping(t, v)
	s.checkRead(t, v, "before")
	if err := m.Pause(s.step(t)); err != nil {
		t.Fatalf("Pause: %v", err)
	}
	if err := m.SaveState(s.step(t), newState(t)); err != nil {
		t.Errorf("SaveState: %v", err)
	}
	if err := m.Resume(s.step(t)); err != nil {
		t.Fatalf("Resume: %v", err)
	}
	s.ping(t, v)
}

func (s *suite) testAttachGone(t *testing.T) {
	child := s.fork(t, "gone")
	wrong := child.Process()
	wrong.StartTicks++
	attachGone := func(what string, p vmm.Process) {
		m, err := s.h.Engine.Attach(s.step(t), p)
		if err == nil {
			t.Errorf("Attach to %s: got machine %+v", what, m.Process())
			return
		}
		checkGone(t, "Attach to "+what, err)
	}
	attachGone("a process with another start time", wrong)
	s.ping(t, child)
	if err := child.Kill(); err != nil {
		t.Fatalf("Kill: %v", err)
	}
	attachGone("a process that has ended", child.Process())
	attachGone("no process", vmm.Process{PID: 1 << 30, StartTicks: 1, Dir: child.Process().Dir})
	attachGone("the process of a daemon", vmm.Process{PID: os.Getpid(), StartTicks: 1, Dir: child.Process().Dir})
}

// The daemon that dies is this test binary, started again with daemonEnv set: it makes a child and waits for its kill -9.
const daemonEnv = "FORKD_VMMTEST_DAEMON"

// daemonOrder says what the daemon shall do. The template's memory is its descriptor 3, the device state 4; it reports on 5.
type daemonOrder struct {
	Dir    string
	Cut    int // how many bytes of a last request it gets out; 0: it makes none
	Paused bool
	Net    bool // its machines have network devices
}

func (s *suite) testAttachAfterDaemonDied(t *testing.T) {
	tests := []struct {
		name  string
		order daemonOrder
	}{
		{"idle", daemonOrder{}},
		{"paused", daemonOrder{Paused: true}},
		{"in a request's header", daemonOrder{Cut: 5}},
		{"in a request's body", daemonOrder{Cut: 3000}},
		{"waiting for a reply", daemonOrder{Cut: 1 << 20}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			tt.order.Dir, tt.order.Net = runDir(t), s.h.Shape.Net
			proc := s.runDaemon(t, tt.order)
			m, err := s.h.Engine.Attach(s.step(t), proc)
			if err != nil {
				t.Fatalf("Attach: %v", err)
			}
			s.end(t, m)
			if tt.order.Paused {
				v := s.withAgent(m, true)
				s.checkSilent(t, v)
				v.agent.close()
				if err := m.Resume(s.step(t)); err != nil {
					t.Fatalf("Resume: %v", err)
				}
			}
			s.checkAttached(t, m, proc)
		})
	}
}

// runDaemon starts the daemon, reads which machine it made, and kills it.
func (s *suite) runDaemon(t *testing.T, order daemonOrder) vmm.Process {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	orders, err := json.Marshal(order)
	if err != nil {
		t.Fatal(err)
	}
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	top, _, _ := strings.Cut(t.Name(), "/AttachAfterDaemonDied")
	var pattern []string
	for part := range strings.SplitSeq(top, "/") {
		pattern = append(pattern, "^"+regexp.QuoteMeta(part)+"$")
	}
	cmd := exec.CommandContext(s.step(t), self, "-test.run="+strings.Join(pattern, "/"), "-test.count=1")
	cmd.Env = append(os.Environ(), daemonEnv+"="+string(orders))
	cmd.ExtraFiles = []*os.File{s.template.ram, s.template.state, w}
	var output strings.Builder
	cmd.Stdout, cmd.Stderr = &output, &output
	err = cmd.Start()
	w.Close()
	if err != nil {
		t.Fatalf("start the daemon: %v", err)
	}
	line, readErr := bufio.NewReader(r).ReadBytes('\n')
	if err := cmd.Process.Kill(); err != nil {
		t.Errorf("kill the daemon: %v", err)
	}
	waitErr := cmd.Wait()
	var proc vmm.Process
	if readErr == nil {
		readErr = json.Unmarshal(line, &proc)
	}
	if readErr != nil {
		t.Fatalf("the daemon made no machine: %v; %v; its output:\n%s", readErr, waitErr, output.String())
	}
	return proc
}

// playDaemonIfAsked is the daemon. It returns false in the process of the suite itself.
func playDaemonIfAsked(t *testing.T, s *suite) bool {
	config, asked := os.LookupEnv(daemonEnv)
	if !asked {
		return false
	}
	var order daemonOrder
	if err := json.Unmarshal([]byte(config), &order); err != nil {
		t.Fatal(err)
	}
	s.h.Shape.Net = order.Net
	s.template = template{ram: os.NewFile(3, "ram"), state: os.NewFile(4, "state")}
	report := os.NewFile(5, "report")
	proc, err := s.daemon(t, order)
	if err != nil {
		t.Fatalf("daemon: %v", err)
	}
	line, err := json.Marshal(proc)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := report.Write(append(line, '\n')); err != nil {
		t.Fatalf("daemon: report: %v", err)
	}
	select {} // until the kill
}

func (s *suite) daemon(t *testing.T, order daemonOrder) (vmm.Process, error) {
	p, err := s.h.Engine.Prepare(t.Context(), vmm.PrepareConfig{Dir: order.Dir, Shape: s.h.Shape, Memory: s.template.ram, Rootfs: open(t, s.h.Rootfs)})
	if err != nil {
		return vmm.Process{}, err
	}
	m, err := p.Load(t.Context(), s.template.state)
	if err != nil {
		return vmm.Process{}, err
	}
	if err := m.Resume(t.Context()); err != nil {
		return vmm.Process{}, err
	}
	v := s.withAgent(m, false)
	if err := v.agent.identify(t.Context(), "orphan"); err != nil {
		return vmm.Process{}, err
	}
	if _, err := v.agent.exec(t.Context(), s.h.Write("before")); err != nil {
		return vmm.Process{}, err
	}
	if order.Paused {
		return m.Process(), m.Pause(t.Context())
	}
	if order.Cut > 0 {
		v.agent.close()
		return m.Process(), s.cutRequest(t, m, order.Cut)
	}
	return m.Process(), nil
}

// errCut ends a connection of which only the first bytes get through.
var errCut = errors.New("the connection was cut")

// cutRequest gets the first bytes of a request out, and leaves the connection open for the kill to close.
func (s *suite) cutRequest(t *testing.T, m vmm.Machine, bytes int) error {
	written := make(chan struct{})
	a := newAgent(func(ctx context.Context) (net.Conn, error) {
		conn, err := m.Dial(ctx, vmm.PortControl)
		return &cutConn{Conn: conn, left: bytes, cut: func() { close(written) }}, err
	}, false)
	go func() { _, _ = a.Exec(t.Context(), agentproto.ExecRequest{Args: s.h.Read, Stdin: make([]byte, 8000)}) }()
	select {
	case <-written:
		return nil
	case <-t.Context().Done():
		return t.Context().Err()
	}
}

// cutConn passes only so many bytes on. It calls cut once, when they, or the first bytes of a whole request, are out.
type cutConn struct {
	net.Conn
	left int
	cut  func()
}

func (c *cutConn) Write(b []byte) (int, error) {
	if c.left <= 0 {
		return 0, errCut
	}
	n, err := c.Conn.Write(b[:min(len(b), c.left)])
	if err != nil {
		return n, err
	}
	if c.left -= n; c.left <= 0 || len(b) > 4096 {
		c.cut()
		c.left = 0
		return n, errCut
	}
	return n, nil
}

// Close leaves the connection open: a daemon that dies closes nothing before.
func (c *cutConn) Close() error { return nil }
