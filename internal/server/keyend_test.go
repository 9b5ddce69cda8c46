package server

import (
	"bufio"
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/forkd/forkd/internal/audit"
	"github.com/forkd/forkd/internal/keys"
	"github.com/forkd/forkd/internal/sandbox"
)

// entries is an audit record in memory.
type entries struct {
	mu  sync.Mutex
	all []audit.Entry
}

// Append implements Auditor.
func (e *entries) Append(entry audit.Entry) error {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.all = append(e.all, entry)
	return nil
}

// outcome waits for the line of an action.
func (e *entries) outcome(t *testing.T, action string) string {
	t.Helper()
	for end := time.Now().Add(20 * time.Second); time.Now().Before(end); time.Sleep(time.Millisecond) {
		e.mu.Lock()
		for _, entry := range e.all {
			if strings.Contains(entry.Action, action) {
				e.mu.Unlock()
				return entry.Outcome
			}
		}
		e.mu.Unlock()
	}
	t.Fatalf("%s is not in the record", action)
	return ""
}

// TestRevokeEndsStreams: whatever a key has open ends when it is revoked: also what has been answered in part, what is not HTTP any more, and what
// would go on without its client.
func TestRevokeEndsStreams(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		name, method, path, body, action string
		header                           []string
		partial                          bool // it answers something before it ends
	}{
		{"events", "GET", "/v1/events", "", "/v1/events", nil, true},
		{"tunnel", "GET", "/v1/sandboxes/sb1/tunnel/80", "", "/tunnel/", []string{"Connection", "Upgrade", "Upgrade", tunnelProtocol}, true},
		{"port that streams", "GET", "/v1/sandboxes/sb1/ports/80/stream", "", "/ports/", nil, true},
		{"port that is silent", "GET", "/v1/sandboxes/sb1/ports/80/silent", "", "/ports/", nil, false},
		{"port that upgrades", "GET", "/v1/sandboxes/sb1/ports/80/upgrade", "", "/ports/", []string{"Connection", "Upgrade", "Upgrade", "websocket"}, true},
		{"fork to be repeated", "POST", "/v1/sandboxes", `{"snapshot_tag": "py"}`, "POST /v1/sandboxes", []string{"Idempotency-Key", "k"}, false},
		{"progress", "POST", "/v1/snapshots", `{"tag": "t", "image": "py"}`, "POST /v1/snapshots", []string{"Accept", ndjson}, true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			ring, record := newRing(t, keys.Limit{}), &entries{}
			key, token := newKey(t, ring, keys.Request{Name: "k", Tenant: "acme", Scope: keys.Run})
			f := newFixture(t, func(c *Config) { c.Keys, c.Audit = ring, record })
			begun := f.endless()
			ended := make(chan string, 1)
			answered := make(chan struct{})
			go func() {
				ended <- f.untilEnd(t, tt.method, tt.path, tt.body, append(tt.header, "Authorization", "Bearer "+token), answered)
			}()
			if tt.partial {
				<-answered
			} else {
				<-begun
			}
			if _, err := ring.Revoke(t.Context(), "acme", key.ID); err != nil {
				t.Fatal(err)
			}
			select {
			case got := <-ended:
				if !tt.partial && !strings.Contains(got, "the key was revoked") {
					t.Errorf("the answer is %q", got)
				}
			case <-time.After(20 * time.Second):
				t.Fatal("it goes on")
			}
			if got := record.outcome(t, tt.action); !strings.Contains(got, "the key was revoked") {
				t.Errorf("outcome %q in the record", got)
			}
		})
	}
}

// endless makes everything take until it is told to end. What it returns has a word when something has begun.
func (f *fixture) endless() chan struct{} {
	begun := make(chan struct{}, 1)
	f.fork = func(ctx context.Context, _ sandbox.ForkRequest) ([]sandbox.ForkResult, error) {
		begun <- struct{}{}
		<-ctx.Done()
		return nil, ctx.Err()
	}
	f.snapshot = func(ctx context.Context, p func(sandbox.Progress)) (sandbox.Snapshot, error) {
		p(sandbox.Progress{Step: "boot"})
		<-ctx.Done()
		return sandbox.Snapshot{}, ctx.Err()
	}
	f.guest = func(c net.Conn) {
		defer c.Close()
		r := bufio.NewReader(c)
		req, err := http.ReadRequest(r)
		if err != nil { // the tunnel's bytes are not HTTP
			return
		}
		switch {
		case strings.HasSuffix(req.URL.Path, "stream"):
			_, _ = io.WriteString(c, "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n")
		case strings.HasSuffix(req.URL.Path, "upgrade"):
			_, _ = io.WriteString(c, "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\nhello")
		default:
			begun <- struct{}{}
		}
		_, _ = io.Copy(io.Discard, r)
	}
	return begun
}

// untilEnd makes a request on a connection of its own and returns all that came until the daemon closed it. answered is closed with the first
// byte.
func (f *fixture) untilEnd(t *testing.T, method, path, body string, header []string, answered chan struct{}) string {
	conn, err := net.Dial("tcp", f.http.Listener.Addr().String())
	if err != nil {
		t.Error(err)
		return ""
	}
	defer conn.Close()
	req, _ := http.NewRequest(method, f.http.URL+path, strings.NewReader(body))
	for i := 0; i < len(header); i += 2 {
		req.Header.Set(header[i], header[i+1])
	}
	if body != "" {
		req.Header.Set("Content-Type", "application/json")
	}
	if req.Header.Get("Upgrade") == "" {
		req.Close = true
	}
	if err := req.Write(conn); err != nil {
		t.Error(err)
		return ""
	}
	first := make([]byte, 1)
	if _, err := io.ReadFull(conn, first); err != nil {
		t.Error(err)
		return ""
	}
	close(answered)
	rest, _ := io.ReadAll(conn) // it may be cut
	return string(first) + string(rest)
}

// A request ends when its key expires.
func TestExpiryEndsRequests(t *testing.T) {
	t.Parallel()
	who := principal{life: t.Context(), expires: time.Now().Add(10 * time.Millisecond)}
	ctx, end := who.bind(t.Context())
	defer end()
	select {
	case <-ctx.Done():
		if cause := context.Cause(ctx); !errors.Is(cause, errEnded) || !errors.Is(cause, keys.ErrExpired) {
			t.Errorf("it ended because of %v", cause)
		}
	case <-time.After(20 * time.Second):
		t.Error("it goes on")
	}
}
