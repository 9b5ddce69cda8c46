package server

import (
	"bufio"
	"context"
	"errors"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httputil"
	"net/url"
	"strconv"
	"strings"
	"time"

	"github.com/forkd/forkd/internal/relay"
	"github.com/forkd/forkd/internal/sandbox"
)

// portsPath is the route of the proxy. It takes every method.
const portsPath = "/v1/sandboxes/{id}/ports/{port}/{path}"

// guestAuthorization is the Authorization that a guest is to get: the daemon's own is nothing for it.
const guestAuthorization = "Forkd-Guest-Authorization"

// withPorts takes requests for guests' ports away from the mux, which would tidy up their paths. What follows the port is the guest's business.
func (s *Server) withPorts(mux http.Handler) http.Handler {
	proxy := s.answer(route{path: portsPath, access: accessRun, handle: s.proxy()})
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		id, port, ok := cutPorts(r.URL.EscapedPath())
		if !ok {
			mux.ServeHTTP(w, r)
			return
		}
		r.SetPathValue("id", id)
		r.SetPathValue("port", port)
		proxy.ServeHTTP(w, r)
	})
}

// cutPorts finds sandbox and port in a path of the proxy.
func cutPorts(escaped string) (id, port string, ok bool) {
	rest, ok := strings.CutPrefix(escaped, "/v1/sandboxes/")
	if !ok {
		return "", "", false
	}
	parts := strings.SplitN(rest, "/", 4)
	if len(parts) < 4 || parts[1] != "ports" {
		return "", "", false
	}
	return parts[0], parts[2], true
}

// loggedPath is the path of a request as logs and the record have it: what follows a guest's port is between the caller and the guest.
func loggedPath(r *http.Request) string {
	if id, port, ok := cutPorts(r.URL.EscapedPath()); ok {
		return shorten("/v1/sandboxes/" + id + "/ports/" + port + "/")
	}
	return r.URL.Path
}

// pathPort is the port in a path.
func pathPort(r *http.Request) (int, error) {
	text := r.PathValue("port")
	port, err := strconv.ParseUint(text, 10, 16)
	if err != nil || port == 0 {
		return 0, invalid("choose 1 to 65535", "%q is not a port", shorten(text))
	}
	return int(port), nil
}

// target is the guest's port that a proxied request is for.
type target struct {
	id    string
	port  int
	asked context.Context // ends with the request
}

type targetKey struct{}

// proxy passes requests on to guests. Each has a connection of its own, so that a sandbox counts as used only while it answers.
func (s *Server) proxy() handler {
	transport := &http.Transport{
		DisableKeepAlives:  true,
		DisableCompression: true,
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			to := ctx.Value(targetKey{}).(target)
			ctx, cancel := context.WithCancel(ctx) // the transport's, which outlives a request whose client has left
			defer cancel()
			defer context.AfterFunc(to.asked, cancel)()
			conn, err := s.Service.DialGuest(ctx, to.id, to.port)
			if err != nil {
				return nil, err
			}
			return s.untilDrain(conn), nil
		},
	}
	pass := &httputil.ReverseProxy{
		Transport: onlyAnswers{transport}, FlushInterval: -1, ErrorLog: slog.NewLogLogger(s.Log.Handler(), slog.LevelDebug),
		Rewrite: rewriteForGuest, ModifyResponse: tameAnswer,
		ErrorHandler: func(w http.ResponseWriter, r *http.Request, err error) {
			var known *sandbox.Error
			if !errors.As(err, &known) {
				err = &sandbox.Error{Code: sandbox.CodeGuestUnreachable, Message: "the guest's answer can't be passed on", Err: err}
			}
			writeError(w, r, err)
		},
	}
	return func(w http.ResponseWriter, r *http.Request) error {
		id, err := pathID(r)
		if err != nil {
			return err
		}
		port, err := pathPort(r)
		if err != nil {
			return err
		}
		control := http.NewResponseController(w)
		_ = control.SetReadDeadline(time.Time{}) // what is sent to a guest may take as long as it takes
		_ = control.EnableFullDuplex()
		defer noteKeyEnd(r)
		pass.ServeHTTP(w, r.WithContext(context.WithValue(r.Context(), targetKey{}, target{id, port, r.Context()})))
		return nil
	}
}

// onlyAnswers passes on no answers that come before the answer (1xx): nothing would tame their headers, and they take the place of the daemon's own.
type onlyAnswers struct{ next http.RoundTripper }

// RoundTrip implements http.RoundTripper. ReverseProxy waits for such answers by something in its request's context.
func (t onlyAnswers) RoundTrip(r *http.Request) (*http.Response, error) {
	to := r.Context().Value(targetKey{}).(target)
	return t.next.RoundTrip(r.WithContext(context.WithValue(to.asked, targetKey{}, to)))
}

// rewriteForGuest makes of a request the one that a guest gets.
func rewriteForGuest(p *httputil.ProxyRequest) {
	to := p.In.Context().Value(targetKey{}).(target)
	prefix := portsPrefix(to)
	escaped := strings.TrimPrefix(p.In.URL.EscapedPath(), prefix)
	path, err := url.PathUnescape(escaped)
	if err != nil {
		path = escaped
	}
	host := net.JoinHostPort("localhost", strconv.Itoa(to.port))
	p.Out.URL.Scheme, p.Out.URL.Host, p.Out.URL.Path, p.Out.URL.RawPath = "http", host, "/"+path, "/"+escaped
	p.Out.Host = host
	p.SetXForwarded()
	p.Out.Header.Set("X-Forwarded-Prefix", prefix)
	p.Out.Header.Del("Authorization")
	if auth := p.In.Header.Get(guestAuthorization); auth != "" {
		p.Out.Header.Set("Authorization", auth)
		p.Out.Header.Del(guestAuthorization)
	}
}

func portsPrefix(to target) string {
	return "/v1/sandboxes/" + to.id + "/ports/" + strconv.Itoa(to.port) + "/"
}

// tameAnswer keeps a page of a guest from acting as one of this daemon: it is of the same origin to a browser. It may not keep state there, nor
// ask the daemon with the rights of who looks at it.
func tameAnswer(resp *http.Response) error {
	to := resp.Request.Context().Value(targetKey{}).(target)
	h := resp.Header
	for _, name := range []string{"Clear-Site-Data", "Strict-Transport-Security", "Service-Worker-Allowed", "Alt-Svc", "Access-Control-Allow-Origin",
		"Access-Control-Allow-Credentials", "Content-Security-Policy-Report-Only", "Reporting-Endpoints", "Nel"} {
		h.Del(name)
	}
	h.Add("Content-Security-Policy", "sandbox allow-downloads allow-forms allow-modals allow-popups allow-scripts")
	h.Set("X-Content-Type-Options", "nosniff")
	cookies := resp.Cookies()
	h.Del("Set-Cookie")
	for _, c := range cookies {
		c.Domain, c.Path = "", portsPrefix(to)
		h.Add("Set-Cookie", c.String())
	}
	return nil
}

// untilDrain closes a connection to a guest when the daemon has stopped waiting for requests.
func (s *Server) untilDrain(conn net.Conn) net.Conn {
	c := &drainedConn{Conn: conn}
	c.stop = context.AfterFunc(s.life, func() { _ = conn.Close() })
	return c
}

type drainedConn struct {
	net.Conn
	stop func() bool
}

// Close implements net.Conn.
func (c *drainedConn) Close() error {
	c.stop()
	return c.Conn.Close()
}

// tunnelProtocol is what a client upgrades to for the bytes of one connection.
const tunnelProtocol = "forkd-tcp"

// tunnel turns a request into a connection to a guest's port.
func (s *Server) tunnel(w http.ResponseWriter, r *http.Request) error {
	id, err := pathID(r)
	if err != nil {
		return err
	}
	port, err := pathPort(r)
	if err != nil {
		return err
	}
	if !strings.EqualFold(r.Header.Get("Upgrade"), tunnelProtocol) {
		return invalid("send Connection: Upgrade and Upgrade: "+tunnelProtocol+"; HTTP goes to …/ports/{port}/", "a tunnel is an upgrade of its connection")
	}
	guest, err := s.Service.DialGuest(r.Context(), id, port)
	if err != nil {
		return err
	}
	defer guest.Close()
	conn, buffered, err := http.NewResponseController(w).Hijack()
	if err != nil {
		return err
	}
	defer conn.Close()
	_ = conn.SetDeadline(time.Time{})
	if _, err := io.WriteString(conn, "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: "+tunnelProtocol+"\r\n\r\n"); err != nil {
		return nil // the client is gone
	}
	ctx, cancel := context.WithCancel(r.Context()) // which ends with the key
	defer cancel()
	defer context.AfterFunc(s.draining, cancel)()
	relay.Join(ctx, guest, &readAhead{Conn: conn, reader: buffered.Reader})
	noteKeyEnd(r)
	return nil
}

// readAhead is a connection of which some bytes were read ahead.
type readAhead struct {
	net.Conn
	reader *bufio.Reader
}

// Read implements net.Conn. Past what was read ahead the reader is left alone: for it the end of what the client says is the end of the request.
func (c *readAhead) Read(b []byte) (int, error) {
	if c.reader.Buffered() > 0 {
		return c.reader.Read(b)
	}
	return c.Conn.Read(b)
}

// CloseWrite passes on that the guest has said all.
func (c *readAhead) CloseWrite() error {
	if half, ok := c.Conn.(interface{ CloseWrite() error }); ok {
		return half.CloseWrite()
	}
	return errors.ErrUnsupported
}
