package server

import (
	"context"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/forkd/forkd/internal/audit"
	"github.com/forkd/forkd/internal/sandbox"
)

// recordOf keeps what is appended.
type recordOf struct {
	mu      sync.Mutex
	entries []audit.Entry
}

func (r *recordOf) Append(e audit.Entry) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.entries = append(r.entries, e)
	return nil
}

// Whoever asks, and whatever comes of it, it is in the record; the values of an environment are not.
func TestRequestsAreRecorded(t *testing.T) {
	t.Parallel()
	s := &stub{exec: func(context.Context, sandbox.ExecRequest) (sandbox.ExecResult, error) {
		return sandbox.ExecResult{}, nil
	}}
	kept := &recordOf{}
	srv := New(Config{Service: s, Images: stubImages{s}, Token: "secret", Audit: kept, Log: slog.New(slog.DiscardHandler)})
	unixListener, err := ListenUnix(filepath.Join(t.TempDir(), "s"))
	if err != nil {
		t.Fatal(err)
	}
	tcpListener, err := ListenTCP("127.0.0.1:0", Protection{Keys: true})
	if err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(t.Context())
	served := make(chan error, 1)
	go func() { served <- srv.Serve(ctx, unixListener, tcpListener, 0) }()
	ask := func(l net.Listener, method, path, token, body string) {
		t.Helper()
		conn, err := net.Dial(l.Addr().Network(), l.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		req, _ := http.NewRequest(method, "http://localhost"+path, strings.NewReader(body))
		req.Header.Set("X-Request-Id", "r1")
		if token != "" {
			req.Header.Set("Authorization", "Bearer "+token)
		}
		if err := req.Write(conn); err != nil {
			t.Fatal(err)
		}
		readAnswer(t, conn, req)
	}
	ask(unixListener, "POST", "/v1/sandboxes/sb1/exec", "", `{"args": ["ls"], "env": {"KEY": "hunter2"}}`)
	ask(tcpListener, "GET", "/v1/sandboxes", "secret", "")
	ask(tcpListener, "GET", "/v1/sandboxes", "wrong", "")
	ask(tcpListener, "DELETE", "/v1/sandboxes/sb1", "", "")
	ask(tcpListener, "GET", "/nothing", "secret", "")
	ask(tcpListener, "GET", "/healthz", "", "")
	stop()
	if err := <-served; err != nil {
		t.Fatal(err)
	}
	uid := "uid " + strconv.Itoa(os.Geteuid())
	want := []audit.Entry{
		{Principal: uid, Tenant: "default", Action: "POST /v1/sandboxes/{id}/exec", Target: "sb1", Params: []byte(`{"args":["ls"],"env":{"KEY":"…"}}`), Status: 200, Outcome: "ok"},
		{Principal: "token", Tenant: "default", Action: "GET /v1/sandboxes", Status: 200, Outcome: "ok"},
		{Principal: "nobody", Action: "GET /v1/sandboxes", Status: 401, Outcome: "the token is not the one this daemon was started with: bearer token"},
		{Principal: "nobody", Action: "DELETE /v1/sandboxes/sb1", Status: 401, Outcome: "this daemon needs a key: bearer token"},
		{Principal: "token", Tenant: "default", Action: "GET /nothing", Status: 404, Outcome: "there is no /nothing"},
	}
	for i := range want {
		want[i].RequestID = "r1"
	}
	if d := cmp.Diff(want, kept.entries, cmpopts.IgnoreFields(audit.Entry{}, "Remote", "DurationMS")); d != "" {
		t.Errorf("record (-want +got):\n%s", d)
	}
}

// TestQueriesAreRecorded: what a request says in its query is in the record, beside its body or without one.
func TestQueriesAreRecorded(t *testing.T) {
	t.Parallel()
	kept := &recordOf{}
	f := newFixture(t, func(c *Config) { c.Audit = kept })
	f.do(t, "DELETE", "/v1/snapshots/py?force=true&cascade&other=1", "")
	f.do(t, "GET", "/v1/snapshots/py/pack?include_secrets=1", "")
	f.do(t, "POST", "/v1/snapshots/unpack?tag=there", "pack")
	f.http.Close()
	var got []string
	for _, e := range kept.entries {
		got = append(got, string(e.Params))
	}
	if d := cmp.Diff([]string{`{"query":{"cascade":"","force":"true"}}`, `{"query":{"include_secrets":"1"}}`, `{"query":{"tag":"there"}}`}, got); d != "" {
		t.Errorf("parameters (-want +got):\n%s", d)
	}
	n := &note{params: []byte(`{"a":1}`), query: map[string]string{"b": "c"}}
	if got := string(n.allParams()); got != `{"a":1,"query":{"b":"c"}}` {
		t.Errorf("of both: %s", got)
	}
}
