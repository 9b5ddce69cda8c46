package agent

import (
	"context"
	"errors"
	"net"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/forkd/forkd/internal/guest/agentclient"
	"github.com/forkd/forkd/internal/guest/agentproto"
)

// rig is a sandboxed agent that serves a Unix socket, and a client of it.
type rig struct {
	*agentclient.Client
	t     *testing.T
	agent *Agent
	sock  string
	root  string
	log   *logger
}

// logger collects the agent's messages.
type logger struct {
	mu    sync.Mutex
	lines []string
}

func (l *logger) add(msg string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.lines = append(l.lines, msg)
}

// newRig starts an agent; change may alter it before it serves.
func newRig(t *testing.T, opt Options, change ...func(*Agent)) *rig {
	t.Helper()
	r := &rig{t: t, root: t.TempDir(), log: &logger{}}
	opt.Sandboxed = true
	opt.Log = r.log.add
	if opt.Root == "" {
		opt.Root = r.root
	}
	a, err := New(opt)
	if err != nil {
		t.Fatalf("New: %v", err)
	}
	for _, f := range change {
		f(a)
	}
	r.agent = a
	dir, err := os.MkdirTemp("", "agent") // t.TempDir is too long for a socket
	if err != nil {
		t.Fatal(err)
	}
	r.sock = filepath.Join(dir, "s")
	l, err := net.Listen("unix", r.sock)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	served := make(chan error, 1)
	go func() { served <- a.Serve(ctx, l) }()
	r.Client = r.newClient(false)
	t.Cleanup(func() {
		r.Client.Close()
		cancel()
		if err := <-served; err != nil {
			t.Errorf("Serve: %v", err)
		}
		if err := a.Close(); err != nil {
			t.Errorf("agent Close: %v", err)
		}
		l.Close()
		os.RemoveAll(dir)
	})
	return r
}

func (r *rig) dial(ctx context.Context) (net.Conn, error) {
	var d net.Dialer
	return d.DialContext(ctx, "unix", r.sock)
}

func (r *rig) newClient(resync bool) *agentclient.Client {
	return agentclient.New(r.dial, agentclient.Options{Resync: resync})
}

// testContext ends before the test binary is killed, so that what hangs is named.
func testContext(t *testing.T) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeoutCause(t.Context(), time.Minute, errors.New("test took too long"))
	t.Cleanup(cancel)
	return ctx
}

// eval evaluates code that must be served.
func (r *rig) eval(code string) agentproto.EvalResult {
	r.t.Helper()
	res, err := r.Eval(testContext(r.t), agentproto.EvalRequest{Code: code, TimeoutMS: 30000})
	if err != nil {
		r.t.Fatalf("Eval(%q): %v", code, err)
	}
	return res
}

// result evaluates code that must end well.
func (r *rig) result(code string) string {
	r.t.Helper()
	res := r.eval(code)
	if res.Error != "" {
		r.t.Fatalf("Eval(%q): %s", code, res.Error)
	}
	return res.Result
}

// sh runs a shell command that must be served.
func (r *rig) sh(script string) agentproto.ExecResult {
	r.t.Helper()
	res, err := r.Exec(testContext(r.t), agentproto.ExecRequest{Args: []string{"sh", "-c", script}, TimeoutMS: 30000})
	if err != nil {
		r.t.Fatalf("Exec(%q): %v", script, err)
	}
	return res
}

func needPython(t *testing.T) {
	t.Helper()
	if findPython("") == "" {
		t.Skip("no python3 in " + defaultPath + ": install it to test eval")
	}
}

// wantCode checks that err is the agent's error with that code.
func wantCode(t *testing.T, err error, code agentproto.Code) {
	t.Helper()
	var e *agentproto.Error
	if !errors.As(err, &e) || e.Code != code {
		t.Errorf("error: got %v, want the agent's with code %q", err, code)
	}
}

func sampleIdentity() agentproto.Identity {
	entropy := make([]byte, 64)
	for i := range entropy {
		entropy[i] = byte(i)
	}
	return agentproto.Identity{
		InstanceID: "sb1", Hostname: "box-1", MachineID: "0123456789abcdef0123456789abcdef", UnixNano: 1700000000_000000000,
		Entropy: entropy, Env: []string{"COLOR=red"}, RunHooks: true,
	}
}
