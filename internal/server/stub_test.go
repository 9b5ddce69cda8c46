package server

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/forkd/forkd/api"
	"github.com/forkd/forkd/internal/image"
	"github.com/forkd/forkd/internal/memory"
	"github.com/forkd/forkd/internal/netpolicy"
	"github.com/forkd/forkd/internal/procstat"
	"github.com/forkd/forkd/internal/sandbox"
	"github.com/forkd/forkd/internal/transfer"
)

// stub is a domain that remembers what it was asked for and answers with fixed values. The funcs replace an answer.
type stub struct {
	fork        func(context.Context, sandbox.ForkRequest) ([]sandbox.ForkResult, error)
	snapshot    func(context.Context, func(sandbox.Progress)) (sandbox.Snapshot, error)
	exec        func(context.Context, sandbox.ExecRequest) (sandbox.ExecResult, error)
	eval        func(sandbox.EvalRequest) (sandbox.EvalResult, error)
	forkRunning func(sandbox.ForkRunningRequest) (sandbox.ForkRunningResult, error)
	unpack      func(io.Reader, func(sandbox.Progress)) (transfer.Unpacked, error)
	packBreaks  bool
	ended       []sandbox.Sandbox // instead of the one that is made up
	fail        error             // the answer of everything that has no func

	mu                                     sync.Mutex
	forks                                  []sandbox.ForkRequest
	snaps                                  []sandbox.SnapshotRequest
	execs                                  []sandbox.ExecRequest
	evals                                  []sandbox.EvalRequest
	builds                                 []image.BuildSpec
	killed                                 []string
	deleted                                []sandbox.DeleteMode
	extended                               []time.Duration
	branches                               []sandbox.BranchRequest
	runningForks                           []sandbox.ForkRunningRequest
	diffs                                  []sandbox.DiffRequest
	compacted, moved, signatures, unpacked []string
	unpacks                                []transfer.UnpackRequest
	policies                               []netpolicy.Policy
	guest                                  func(net.Conn)                          // serves guests' ports; nil: nobody
	dial                                   func(context.Context) (net.Conn, error) // instead of a pipe to guest
	dialled                                []string
}

var stubTime = time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)

func stubSandbox(i int) sandbox.Sandbox {
	return sandbox.Sandbox{ID: fmt.Sprintf("sb%d", i), SnapshotID: "s1", SnapshotTag: "py", State: sandbox.StateRunning, CreatedAt: stubTime,
		PID: 100 + i, Path: sandbox.StartedCold, ReadyIn: 80 * time.Millisecond, Metadata: map[string]string{"k": "v"}}
}

func stubSnapshot() sandbox.Snapshot {
	return sandbox.Snapshot{Tag: "py", ID: "s1", Dir: "/data/s1", CreatedAt: stubTime, Image: "py", MemMiB: 256, VCPUs: 1, Engine: "qemu",
		EngineVersion: "7.2", Accel: "tcg", LogicalBytes: 256 << 20, PhysicalBytes: 99 << 20, DeviceBytes: 8000, ContentHash: "abc",
		Status: sandbox.StatusReady, Bootable: true, Python: true, Pool: sandbox.PoolStatus{Size: 2, Ready: 1, Filling: 1}, BootWarm: 4 * time.Second}
}

func stubImage() image.Image {
	return image.Image{ID: "i1", Name: "py", CreatedAt: stubTime, KernelVersion: "6.1", Suite: "bookworm", Python: true,
		Rootfs: image.Blob{Path: "/data/images/i1/rootfs.erofs", Bytes: 5}}
}

func (s *stub) CreateSnapshot(ctx context.Context, r sandbox.SnapshotRequest, p func(sandbox.Progress)) (sandbox.Snapshot, error) {
	s.mu.Lock()
	s.snaps = append(s.snaps, r)
	s.mu.Unlock()
	if s.snapshot != nil {
		return s.snapshot(ctx, p)
	}
	p(sandbox.Progress{Step: "boot", Detail: "256 MiB"})
	p(sandbox.Progress{Step: "freeze", Done: 1, Total: 2})
	return stubSnapshot(), s.fail
}

func (s *stub) Snapshots(context.Context) ([]sandbox.Snapshot, error) {
	return []sandbox.Snapshot{stubSnapshot()}, s.fail
}
func (s *stub) Snapshot(context.Context, string) (sandbox.Snapshot, error) {
	return stubSnapshot(), s.fail
}
func (s *stub) DeleteSnapshot(_ context.Context, _ string, mode sandbox.DeleteMode) error {
	s.deleted = append(s.deleted, mode)
	return s.fail
}
func (s *stub) ShareSnapshot(_ context.Context, _ string, public bool) (sandbox.Snapshot, error) {
	snap := stubSnapshot()
	snap.Public = public
	return snap, s.fail
}
func (s *stub) VerifySnapshot(context.Context, string) error { return s.fail }
func (s *stub) SetPool(_ context.Context, tag string, size int) (sandbox.PoolStatus, error) {
	return sandbox.PoolStatus{Tag: tag, Size: size}, s.fail
}
func (s *stub) Pool(_ context.Context, tag string) (sandbox.PoolStatus, error) {
	return sandbox.PoolStatus{Tag: tag, Size: 2, Problem: "no memory"}, s.fail
}

func (s *stub) Fork(ctx context.Context, r sandbox.ForkRequest) ([]sandbox.ForkResult, error) {
	s.mu.Lock()
	s.forks = append(s.forks, r)
	s.mu.Unlock()
	if s.fork != nil {
		return s.fork(ctx, r)
	}
	if s.fail != nil {
		return nil, s.fail
	}
	var out []sandbox.ForkResult
	for i := range r.N {
		sb := stubSandbox(i)
		out = append(out, sandbox.ForkResult{Sandbox: &sb})
	}
	return out, nil
}

func (s *stub) Sandboxes(context.Context) ([]sandbox.Sandbox, error) {
	return []sandbox.Sandbox{stubSandbox(0)}, s.fail
}
func (s *stub) Ended(context.Context) ([]sandbox.Sandbox, error) {
	if s.ended != nil {
		return s.ended, s.fail
	}
	ended := stubSandbox(1)
	ended.State, ended.EndedAt = sandbox.StateStopped, stubTime
	return []sandbox.Sandbox{ended}, s.fail
}
func (s *stub) Sandbox(context.Context, string) (sandbox.Sandbox, error) {
	return stubSandbox(0), s.fail
}
func (s *stub) Kill(_ context.Context, id string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.killed = append(s.killed, id)
	return s.fail
}
func (s *stub) Extend(_ context.Context, _ string, d time.Duration) (sandbox.Sandbox, error) {
	s.extended = append(s.extended, d)
	sb := stubSandbox(0)
	sb.Deadline = stubTime.Add(d)
	return sb, s.fail
}
func (s *stub) Ping(context.Context, string) (sandbox.PingResult, error) {
	return sandbox.PingResult{PID: 1, RoundTrip: time.Millisecond, GuestTime: stubTime, Uptime: time.Minute, Version: "1"}, s.fail
}
func (s *stub) Exec(ctx context.Context, _ string, r sandbox.ExecRequest) (sandbox.ExecResult, error) {
	s.mu.Lock()
	s.execs = append(s.execs, r)
	s.mu.Unlock()
	if s.exec != nil {
		return s.exec(ctx, r)
	}
	return sandbox.ExecResult{Stdout: []byte("out\n"), Stderr: []byte("err\xff\n"), ExitCode: 3, Duration: time.Millisecond}, s.fail
}
func (s *stub) Eval(_ context.Context, _ string, r sandbox.EvalRequest) (sandbox.EvalResult, error) {
	s.evals = append(s.evals, r)
	if s.eval != nil {
		return s.eval(r)
	}
	return sandbox.EvalResult{Result: "2"}, s.fail
}
func (s *stub) Logs(context.Context, string) ([]byte, error) { return []byte("console\xff\n"), s.fail }
func (s *stub) Usage(context.Context, string) (sandbox.Usage, error) {
	return sandbox.Usage{Usage: memory.Usage{GuestAnonKiB: 400, GuestPSSKiB: 500, PSSKiB: 18000, RSSKiB: 49000},
		Process: procstat.Usage{CPU: time.Second}, Traffic: &sandbox.Traffic{SentBytes: 7}}, s.fail
}
func (s *stub) SetNetwork(_ context.Context, _ string, p netpolicy.Policy) (sandbox.Sandbox, error) {
	s.policies = append(s.policies, p)
	return stubSandbox(0), s.fail
}
func (s *stub) NetworkStatus(context.Context, string) (netpolicy.Status, error) {
	return netpolicy.Status{Policy: netpolicy.Policy{Mode: netpolicy.Allow, Rules: []string{"a.org"}}, DeniedAttempts: 3,
		Denied:      []netpolicy.Denied{{Addr: netip.MustParseAddr("10.0.0.1"), Proto: "tcp", Port: 80, Attempts: 3}},
		DeniedNames: []netpolicy.DeniedName{{Name: "b.org", Count: 1, Last: stubTime}}}, s.fail
}

// DialGuest connects to whatever serves guests' ports.
func (s *stub) DialGuest(ctx context.Context, id string, port int) (net.Conn, error) {
	if s.fail != nil {
		return nil, s.fail
	}
	if s.dial != nil {
		return s.dial(ctx)
	}
	near, far := net.Pipe()
	s.mu.Lock()
	defer s.mu.Unlock()
	s.dialled = append(s.dialled, fmt.Sprintf("%s:%d", id, port))
	if s.guest == nil {
		return near, far.Close()
	}
	go s.guest(far)
	return near, nil
}
func (s *stub) Stats() sandbox.Stats {
	return sandbox.Stats{Running: 3, PoolReady: 2, ResidentBytes: 99, ForksClaim: 7}
}

// stubImages is an image store over a stub.
type stubImages struct{ *stub }

func (s stubImages) Build(_ context.Context, spec image.BuildSpec, p func(image.Progress)) (image.Image, error) {
	s.builds = append(s.builds, spec)
	p(image.Progress{Step: "rootfs", Detail: "python3", Done: 1, Total: 4})
	return stubImage(), s.fail
}
func (s stubImages) Get(context.Context, string) (Image, error) {
	return Image{Image: stubImage()}, s.fail
}
func (s stubImages) List(context.Context) ([]Image, error) {
	return []Image{{Image: stubImage()}}, s.fail
}
func (s stubImages) Share(_ context.Context, _ string, public bool) (Image, error) {
	return Image{Image: stubImage(), Public: public}, s.fail
}
func (s stubImages) Remove(context.Context, string) error { return s.fail }

// fixture is a server over a stub that answers on a TCP port of this host.
type fixture struct {
	*stub
	server *Server
	http   *httptest.Server
	token  string // sent unless a request has an Authorization of its own
}

func newFixture(t *testing.T, change ...func(*Config)) *fixture {
	t.Helper()
	s := &stub{}
	cfg := Config{Service: s, Images: stubImages{s}, Packs: stubPacks{s}, Version: api.Version{Version: "test", API: api.VersionAPIV1}, Log: slog.New(slog.DiscardHandler)}
	for _, f := range change {
		f(&cfg)
	}
	f := &fixture{stub: s, server: New(cfg)}
	f.http = httptest.NewServer(f.server.Handler(false))
	t.Cleanup(f.http.Close)
	return f
}

// answer is what came back.
type answer struct {
	status int
	header http.Header
	body   string
}

// code is the code of an error, or "".
func (a answer) code() string {
	var e api.Error
	_ = json.Unmarshal([]byte(a.body), &e)
	return e.Code
}

// do makes a request; headers are name, value, name, value.
func (f *fixture) do(t *testing.T, method, path, body string, headers ...string) answer {
	t.Helper()
	var r io.Reader
	if body != "" {
		r = strings.NewReader(body)
	}
	req, err := http.NewRequestWithContext(t.Context(), method, f.http.URL+path, r)
	if err != nil {
		t.Fatal(err)
	}
	if body != "" {
		req.Header.Set("Content-Type", "application/json")
	}
	if f.token != "" {
		req.Header.Set("Authorization", "Bearer "+f.token)
	}
	for i := 0; i < len(headers); i += 2 {
		req.Header.Set(headers[i], headers[i+1])
	}
	return send(t, req)
}

func send(t *testing.T, req *http.Request) answer {
	t.Helper()
	client := &http.Client{CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }}
	resp, err := client.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	var b bytes.Buffer
	if _, err := b.ReadFrom(resp.Body); err != nil {
		t.Fatal(err)
	}
	return answer{resp.StatusCode, resp.Header, b.String()}
}
