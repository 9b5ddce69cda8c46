package server

import (
	"bufio"
	"context"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/forkd/forkd/internal/sandbox"
)

func TestToken(t *testing.T) {
	t.Parallel()
	f := newFixture(t, func(c *Config) { c.Token = "0123456789abcdef" })
	tests := []struct {
		name, path, authorization string
		status                    int
	}{
		{"none", "/v1/sandboxes", "", 401},
		{"wrong", "/v1/sandboxes", "Bearer 0123456789abcdeg", 401},
		{"prefix", "/v1/sandboxes", "Bearer 0123456789abcde", 401},
		{"empty", "/v1/sandboxes", "Bearer ", 401},
		{"basic", "/v1/sandboxes", "Basic 0123456789abcdef", 401},
		{"right", "/v1/sandboxes", "Bearer 0123456789abcdef", 200},
		{"health needs none", "/healthz", "", 200},
		{"metrics need one", "/metrics", "", 401},
		{"nothing is told about routes", "/nothing", "", 401},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			got := f.do(t, "GET", tt.path, "", "Authorization", tt.authorization)
			if got.status != tt.status {
				t.Errorf("= %d %s, want %d", got.status, got.body, tt.status)
			}
			if tt.status == 401 && (got.code() != "unauthorized" || got.header.Get("WWW-Authenticate") != "Bearer") {
				t.Errorf("= %q %v, want unauthorized and Bearer", got.code(), got.header)
			}
		})
	}
}

func TestBrowserPages(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	if got := f.do(t, "POST", "/v1/sandboxes", forkBody, "Origin", "https://evil.example", "Sec-Fetch-Site", "cross-site"); got.status != 403 || got.code() != "forbidden" {
		t.Errorf("a page of another site = %d %q, want 403 forbidden", got.status, got.code())
	}
	for host, want := range map[string]int{"evil.example": 403, "evil.example:8889": 403, "localhost:1": 200, "127.0.0.1": 200, "[::1]:8889": 200} {
		req, _ := http.NewRequestWithContext(t.Context(), "GET", f.http.URL+"/v1/sandboxes", nil)
		req.Host = host
		if got := send(t, req); got.status != want {
			t.Errorf("Host %s = %d, want %d", host, got.status, want)
		}
	}
	if len(f.forks) != 0 {
		t.Errorf("%d forks, want none", len(f.forks))
	}
}

func TestListenUnix(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "d", "s")
	first, err := ListenUnix(path)
	if err != nil {
		t.Fatal(err)
	}
	info, err := os.Stat(path)
	if err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("mode = %v, %v, want 0600", info.Mode(), err)
	}
	if _, err := ListenUnix(path); err == nil || !strings.Contains(err.Error(), "another daemon") {
		t.Errorf("second = %v, want another daemon", err)
	}
	first.(*net.UnixListener).SetUnlinkOnClose(false)
	first.Close()
	second, err := ListenUnix(path)
	if err != nil {
		t.Fatalf("over a dead socket: %v", err)
	}
	second.Close()
	if err := os.WriteFile(path, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := ListenUnix(path); err == nil || !strings.Contains(err.Error(), "something else") {
		t.Errorf("over a file = %v, want a refusal", err)
	}
	if _, err := ListenUnix("/" + strings.Repeat("x", 200)); err == nil || !strings.Contains(err.Error(), "107") {
		t.Errorf("long path = %v, want a refusal", err)
	}
}

func TestListenTCP(t *testing.T) {
	t.Parallel()
	tests := []struct {
		address string
		has     Protection
		ok      bool
	}{
		{"127.0.0.1:0", Protection{}, true}, {"[::1]:0", Protection{}, true}, {"localhost:0", Protection{}, true},
		{"0.0.0.0:0", Protection{}, false}, {":0", Protection{}, false}, {"nohost", Protection{}, false},
		{"0.0.0.0:0", Protection{Keys: true}, false}, {"0.0.0.0:0", Protection{TLS: true}, false}, {"0.0.0.0:0", Protection{Keys: true, TLS: true}, true},
	}
	for _, tt := range tests {
		l, err := ListenTCP(tt.address, tt.has)
		if err == nil {
			l.Close()
		}
		if (err == nil) != tt.ok && !strings.Contains(tt.address, "::1") { // a host may have no IPv6
			t.Errorf("ListenTCP(%q, %v) = %v, want ok %v", tt.address, tt.has, err, tt.ok)
		}
	}
}

// TestShutdown holds that requests may finish within the grace period, and are cancelled and answered after it.
func TestShutdown(t *testing.T) {
	t.Parallel()
	tests := []struct {
		name   string
		grace  time.Duration
		status int
		code   string
		ended  func(context.Context) error // what the domain makes of the end of its context
	}{
		{"within the grace period", time.Minute, 200, "", nil},
		{"after it", time.Millisecond, 503, "shutting_down", context.Context.Err},
		{"after it, told the cause", time.Millisecond, 503, "shutting_down", context.Cause},
		{"after it, with an error of the domain's", time.Millisecond, 503, "shutting_down", func(ctx context.Context) error {
			return &sandbox.Error{Code: sandbox.CodeInternal, Message: "given up", Err: context.Cause(ctx)}
		}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			s := &stub{}
			srv := New(Config{Service: s, Images: stubImages{s}, Log: slog.New(slog.DiscardHandler)})
			unixListener, err := ListenUnix(filepath.Join(t.TempDir(), "s"))
			if err != nil {
				t.Fatal(err)
			}
			running, finish := make(chan struct{}), make(chan struct{})
			s.exec = func(ctx context.Context, _ sandbox.ExecRequest) (sandbox.ExecResult, error) {
				close(running)
				select {
				case <-finish:
					return sandbox.ExecResult{}, nil
				case <-ctx.Done():
					return sandbox.ExecResult{}, tt.ended(ctx)
				}
			}
			ctx, stop := context.WithCancel(t.Context())
			served := make(chan error, 1)
			go func() { served <- srv.Serve(ctx, unixListener, nil, tt.grace) }()
			conn, err := net.Dial("unix", unixListener.Addr().String())
			if err != nil {
				t.Fatal(err)
			}
			defer conn.Close()
			req, _ := http.NewRequest("POST", "http://forkd/v1/sandboxes/sb1/exec", strings.NewReader(`{"args": ["sleep"]}`))
			if err := req.Write(conn); err != nil {
				t.Fatal(err)
			}
			<-running
			stop()
			if tt.status == 200 {
				close(finish)
			}
			if got := readAnswer(t, conn, req); got.status != tt.status || got.code() != tt.code {
				t.Errorf("= %d %q, want %d %q", got.status, got.code(), tt.status, tt.code)
			}
			if err := <-served; err != nil {
				t.Errorf("Serve = %v", err)
			}
			if _, err := net.Dial("unix", unixListener.Addr().String()); err == nil {
				t.Error("the socket still answers")
			}
		})
	}
}

// A body that does not come must not keep the answer from going out, nor the connection, nor the end of the daemon.
func TestStalledBodies(t *testing.T) {
	t.Parallel()
	tests := map[string]struct {
		head   string
		status int // 0: the daemon waits for the body; it is told to stop then
	}{
		"without a token":    {"POST /v1/sandboxes HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{", 401},
		"in chunks":          {"POST /v1/sandboxes HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello", 401},
		"of a GET":           {"GET /healthz HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{", 200},
		"unknown path":       {"PUT /nothing HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer secret\r\nContent-Length: 100\r\n\r\n{", 404},
		"that is waited for": {"POST /v1/sandboxes HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer secret\r\nContent-Length: 100\r\n\r\n{", 0},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := &stub{}
			srv := New(Config{Service: s, Images: stubImages{s}, Token: "secret", Log: slog.New(slog.DiscardHandler)})
			l, err := ListenTCP("127.0.0.1:0", Protection{Keys: true})
			if err != nil {
				t.Fatal(err)
			}
			ctx, stop := context.WithCancel(t.Context())
			served := make(chan error, 1)
			go func() { served <- srv.Serve(ctx, nil, l, time.Minute) }()
			conn, err := net.Dial("tcp", l.Addr().String())
			if err != nil {
				t.Fatal(err)
			}
			defer conn.Close()
			if _, err := conn.Write([]byte(tt.head)); err != nil {
				t.Fatal(err)
			}
			want := tt.status
			if want == 0 {
				time.Sleep(50 * time.Millisecond) // so that it most likely waits already; it must be cut off also if it does not yet
				stop()
				want = 400
			}
			conn.SetReadDeadline(time.Now().Add(20 * time.Second)) // the body has 30 s
			resp, err := http.ReadResponse(bufio.NewReader(conn), nil)
			if err != nil {
				t.Fatal(err)
			}
			if resp.StatusCode != want {
				t.Errorf("status %d, want %d", resp.StatusCode, want)
			}
			if _, err := io.Copy(io.Discard, conn); err != nil {
				t.Errorf("the connection stays open: %v", err)
			}
			stop()
			select {
			case err := <-served:
				if err != nil {
					t.Errorf("Serve = %v", err)
				}
			case <-time.After(20 * time.Second):
				t.Error("the daemon does not stop")
			}
		})
	}
}
