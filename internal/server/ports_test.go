package server

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/http/httptrace"
	"net/textproto"
	"strings"
	"testing"
	"time"

	"github.com/forkd/forkd/internal/netpolicy"
)

// serveOne answers one request of a guest's port with what it was asked.
func serveOne(header http.Header) func(net.Conn) {
	return func(c net.Conn) {
		defer c.Close()
		req, err := http.ReadRequest(bufio.NewReader(c))
		if err != nil {
			return
		}
		body, _ := io.ReadAll(req.Body)
		text := fmt.Sprintf("%s %s %s auth=%q prefix=%q %s", req.Method, req.RequestURI, req.Host, req.Header.Get("Authorization"), req.Header.Get("X-Forwarded-Prefix"), body)
		_ = (&http.Response{StatusCode: 200, ProtoMajor: 1, ProtoMinor: 1, Request: req, Header: header, ContentLength: int64(len(text)),
			Body: io.NopCloser(strings.NewReader(text))}).Write(c)
	}
}

// What follows the port is the guest's, however it looks; what is the daemon's stays here.
func TestPortsPassOn(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	f.guest = serveOne(nil)
	for _, tt := range []struct{ method, path, want string }{
		{"GET", "/", "GET / "}, {"GET", "/a/b?c=d", "GET /a/b?c=d "}, {"POST", "/x//y/../z", "POST /x//y/../z "}, {"DELETE", "/%2e%2e/%2fetc", "DELETE /%2e%2e/%2fetc "},
		{"PURGE", "/v1/sandboxes", "PURGE /v1/sandboxes "},
	} {
		got := f.do(t, tt.method, "/v1/sandboxes/sb1/ports/8080"+tt.path, "", "Authorization", "Bearer secret")
		if got.status != 200 || !strings.HasPrefix(got.body, tt.want+"localhost:8080 auth=\"\"") {
			t.Errorf("%s %s = %d %s, want %s", tt.method, tt.path, got.status, got.body, tt.want)
		}
		if strings.Contains(got.body, "secret") {
			t.Errorf("the guest was told the daemon's token: %s", got.body)
		}
	}
	got := f.do(t, "GET", "/v1/sandboxes/sb1/ports/80/", "", guestAuthorization, "Basic x")
	if !strings.Contains(got.body, `auth="Basic x"`) || !strings.Contains(got.body, `prefix="/v1/sandboxes/sb1/ports/80/"`) {
		t.Errorf("the guest got %s", got.body)
	}
	for _, path := range []string{"/v1/sandboxes/sb1/ports/0/", "/v1/sandboxes/sb1/ports/65536/", "/v1/sandboxes/sb1/ports/x/", "/v1/sandboxes/SB/ports/80/", "/v1/sandboxes/../ports/80/"} {
		if got := f.do(t, "GET", path, ""); got.status != 400 {
			t.Errorf("GET %s = %d %s", path, got.status, got.body)
		}
	}
	if n := len(f.dialled); n != 6 {
		t.Errorf("%d connections were made: %v", n, f.dialled)
	}
}

// A page of a guest has no rights of this daemon's origin.
func TestPortsTame(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	f.guest = serveOne(http.Header{"Set-Cookie": {"a=b; Domain=localhost; Path=/"}, "Access-Control-Allow-Origin": {"*"}, "Clear-Site-Data": {"*"},
		"Content-Security-Policy": {"default-src *"}})
	got := f.do(t, "GET", "/v1/sandboxes/sb1/ports/80/", "")
	if csp := got.header.Values("Content-Security-Policy"); len(csp) != 2 || !strings.HasPrefix(csp[1], "sandbox ") || strings.Contains(csp[1], "allow-same-origin") {
		t.Errorf("Content-Security-Policy: %q", csp)
	}
	if c := got.header.Get("Set-Cookie"); c != "a=b; Path=/v1/sandboxes/sb1/ports/80/" {
		t.Errorf("Set-Cookie: %s", c)
	}
	for _, name := range []string{"Access-Control-Allow-Origin", "Clear-Site-Data"} {
		if v := got.header.Get(name); v != "" {
			t.Errorf("%s: %s", name, v)
		}
	}
}

// An upgrade is passed on, and the bytes after it.
func TestPortsUpgrade(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	f.guest = func(c net.Conn) {
		defer c.Close()
		r := bufio.NewReader(c)
		if _, err := http.ReadRequest(r); err != nil {
			return
		}
		_, _ = io.WriteString(c, "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n")
		word, _ := r.ReadString('\n')
		_, _ = io.WriteString(c, "got "+word)
	}
	req, _ := http.NewRequestWithContext(t.Context(), "GET", f.http.URL+"/v1/sandboxes/sb1/ports/80/ws", nil)
	req.Header.Set("Connection", "Upgrade")
	req.Header.Set("Upgrade", "websocket")
	resp, err := http.DefaultClient.Do(req)
	if err != nil || resp.StatusCode != 101 {
		t.Fatalf("= %v, %v", resp, err)
	}
	conn := resp.Body.(io.ReadWriteCloser)
	defer conn.Close()
	_, _ = io.WriteString(conn, "hello\n")
	if back, err := io.ReadAll(conn); err != nil || string(back) != "got hello\n" {
		t.Errorf("%q, %v", back, err)
	}
}

// A page of another site may not open a WebSocket to a guest: nothing but the daemon keeps it from that.
func TestPortsOfOtherSites(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	for origin, want := range map[string]int{"https://evil.example": 403, "null": 403, f.http.URL: 502} {
		got := f.do(t, "GET", "/v1/sandboxes/sb1/ports/80/ws", "", "Origin", origin, "Connection", "Upgrade", "Upgrade", "websocket")
		if got.status != want {
			t.Errorf("from %s = %d %s, want %d", origin, got.status, got.body, want)
		}
	}
}

// Only administrators of the host open what is protected.
func TestNetworkTrust(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	put := func(body string) answer { return f.do(t, "PUT", "/v1/sandboxes/sb1/network", body) }
	if got := put(`{"mode": "allow", "allow": ["169.254.169.254"]}`); got.status != 200 || !f.policies[0].Privileged {
		t.Errorf("= %d %s, %+v", got.status, got.body, f.policies)
	}
	for _, body := range []string{`{"mode": "all"}`, `{"mode": "allow"}`, `{"mode": "none", "allow": ["a.org"]}`, `{"mode": "allow", "allow": ["::1"]}`,
		`{"mode": "open", "privileged": true}`, `{}`, `{"mode": null}`} {
		if got := put(body); got.status != 400 {
			t.Errorf("%s = %d %s", body, got.status, got.body)
		}
	}
	user := func(p netpolicy.Policy) (netpolicy.Policy, error) {
		req, _ := newRequestAs(t.Context(), nil)
		return p, trust(req, &p)
	}
	for _, named := range []string{"169.254.169.254:80", "10.0.0.0/24", "168.63.129.16", "127.0.0.1"} {
		if p, err := user(netpolicy.Policy{Mode: netpolicy.Allow, Rules: []string{"a.org", named}}); err == nil || p.Privileged {
			t.Errorf("somebody may open %s", named)
		}
	}
	if p, err := user(netpolicy.Policy{Mode: netpolicy.Allow, Rules: []string{"a.org", "0.0.0.0/0", "203.0.113.0/24"}}); err != nil || p.Privileged {
		t.Errorf("= %+v, %v", p, err)
	}
}

// The end of what a client says through a tunnel leaves the guest its answer.
func TestTunnelHalfClose(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	go func() {
		c, err := l.Accept()
		if err != nil {
			return
		}
		defer c.Close()
		said, _ := io.ReadAll(c)
		_, _ = fmt.Fprintf(c, "you said %s", said)
	}()
	f.dial = func(context.Context) (net.Conn, error) { return net.Dial("tcp", l.Addr().String()) }
	conn, err := net.Dial("tcp", f.http.Listener.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	_, _ = io.WriteString(conn, "GET /v1/sandboxes/sb1/tunnel/80 HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: forkd-tcp\r\n\r\nhello")
	if status, err := bufio.NewReader(io.LimitReader(conn, 12)).ReadString('1'); err != nil {
		t.Fatalf("%q, %v", status, err)
	}
	_ = conn.(*net.TCPConn).CloseWrite()
	got, err := io.ReadAll(conn)
	if err != nil || !strings.HasSuffix(string(got), "\r\n\r\nyou said hello") {
		t.Errorf("= %q, %v", got, err)
	}
}

// TestPortsDialEnds: a connection that a guest leaves waiting ends with the request that it is for.
func TestPortsDialEnds(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	begun, ended := make(chan struct{}), make(chan error, 1)
	f.dial = func(ctx context.Context) (net.Conn, error) {
		close(begun)
		<-ctx.Done()
		ended <- ctx.Err()
		return nil, ctx.Err()
	}
	ctx, leave := context.WithCancel(t.Context())
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, f.http.URL+"/v1/sandboxes/sb1/ports/80/", nil)
	if err != nil {
		t.Fatal(err)
	}
	go func() {
		<-begun
		leave()
	}()
	if resp, err := f.http.Client().Do(req); err == nil {
		resp.Body.Close()
		t.Errorf("= %s", resp.Status)
	}
	select {
	case <-ended:
	case <-time.After(time.Minute):
		t.Error("the connection goes on to be made for nobody")
	}
}

// TestPortsEarlyAnswers: what a guest says before its answer goes nowhere, and doesn't take the answer's place in the record.
func TestPortsEarlyAnswers(t *testing.T) {
	t.Parallel()
	kept := &recordOf{}
	f := newFixture(t, func(c *Config) { c.Audit = kept })
	f.guest = func(c net.Conn) {
		defer c.Close()
		if _, err := http.ReadRequest(bufio.NewReader(c)); err == nil {
			_, _ = io.WriteString(c, "HTTP/1.1 103 Early Hints\r\nSet-Cookie: a=b; Path=/\r\n\r\nHTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")
		}
	}
	trace := &httptrace.ClientTrace{Got1xxResponse: func(code int, h textproto.MIMEHeader) error {
		t.Errorf("the client got %d with %v", code, h)
		return nil
	}}
	req, err := http.NewRequestWithContext(httptrace.WithClientTrace(t.Context(), trace), http.MethodGet, f.http.URL+"/v1/sandboxes/sb1/ports/80/", nil)
	if err != nil {
		t.Fatal(err)
	}
	resp, err := f.http.Client().Do(req)
	if err != nil {
		t.Fatal(err)
	}
	resp.Body.Close()
	f.http.Close()
	if resp.StatusCode != 404 || resp.Header.Get("X-Request-Id") == "" || len(kept.entries) != 1 || kept.entries[0].Status != 404 {
		t.Errorf("= %s %v, recorded as %+v, want 404 with a request id", resp.Status, resp.Header, kept.entries)
	}
	rec := &recorder{ResponseWriter: httptest.NewRecorder()}
	rec.WriteHeader(http.StatusEarlyHints)
	rec.WriteHeader(http.StatusTeapot)
	if rec.status != http.StatusTeapot {
		t.Errorf("after an early answer %d is recorded, want the answer's own status", rec.status)
	}
}
