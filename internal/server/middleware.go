package server

import (
	"bufio"
	"context"
	"crypto/rand"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"regexp"
	"runtime/debug"
	"strings"
	"sync"
	"time"

	"github.com/forkd/forkd/internal/sandbox"
)

var requestIDPattern = regexp.MustCompile(`^[A-Za-z0-9._-]{1,64}$`)

// note is what the inner layers tell the outermost one about a request, for its log line and metrics.
type note struct {
	id         string
	route      string
	err        error
	counted    bool // among those of strangers
	unrecorded bool // it is one of too many to be in the audit record
	who        principal

	params  json.RawMessage   // of the body, for the audit record
	query   map[string]string // the same of what the path is followed by
	target  string            // what the path names
	targets []string          // what the request made, or is about instead

	draining context.Context // ends when the daemon is told to stop

	bodies *crowd // bytes

	mu   sync.Mutex
	held []func() // give back what is held until the request ends
	over bool     // it ended; a creation that is to be repeated may go on
}

// giveBack gives back what was held for a request.
func (n *note) giveBack() {
	n.mu.Lock()
	defer n.mu.Unlock()
	for _, leave := range n.held {
		leave()
	}
	n.held, n.over = nil, true
}

// hold has giveBack called at the end of a request.
func (n *note) hold(leave func()) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.over {
		leave()
		return
	}
	n.held = append(n.held, leave)
}

type noteKey struct{}

func noteOf(ctx context.Context) *note {
	if n, ok := ctx.Value(noteKey{}).(*note); ok {
		return n
	}
	return &note{draining: context.Background(), bodies: newCrowd("bytes of requests' bodies", maxBodies)}
}

func noteRoute(ctx context.Context, route string) { noteOf(ctx).route = route }
func noteError(ctx context.Context, err error)    { noteOf(ctx).err = err }
func requestID(ctx context.Context) string        { return noteOf(ctx).id }

// recorder remembers what was answered.
type recorder struct {
	http.ResponseWriter
	status int
	body   *requestBody // nil: the request has none
	duplex bool         // the body is read on while the answer is written
}

func (w *recorder) WriteHeader(status int) {
	if w.status == 0 && (status >= 200 || status == http.StatusSwitchingProtocols) { // others are followed by the answer's own
		w.status = status
		if w.body != nil && !w.body.read && !w.duplex {
			w.leaveBody()
		}
	}
	w.ResponseWriter.WriteHeader(status)
}

func (w *recorder) Write(b []byte) (int, error) {
	if w.status == 0 {
		w.WriteHeader(http.StatusOK)
	}
	return w.ResponseWriter.Write(b)
}

// leaveBody has the answer go out before what is left of the request's body came in, if it ever does: the connection ends with it.
func (w *recorder) leaveBody() {
	w.Header().Set("Connection", "close")
	_ = http.NewResponseController(w.ResponseWriter).SetReadDeadline(time.Now().Add(lingerTimeout))
}

// EnableFullDuplex is for http.ResponseController.
func (w *recorder) EnableFullDuplex() error {
	w.duplex = true
	return http.NewResponseController(w.ResponseWriter).EnableFullDuplex()
}

// requestBody gives a request's body a time in which it must have come. Once it has, the connection has none: a handler may work for long, and
// meanwhile a read is what tells that the client has left.
type requestBody struct {
	io.ReadCloser
	control *http.ResponseController
	read    bool // to its end
}

func (b *requestBody) Read(p []byte) (int, error) {
	n, err := b.ReadCloser.Read(p)
	if err == io.EOF && !b.read {
		b.read = true
		_ = b.control.SetReadDeadline(time.Time{})
	}
	return n, err
}

// Hijack is for http.ResponseController: the connection becomes another one's.
func (w *recorder) Hijack() (net.Conn, *bufio.ReadWriter, error) {
	w.status = http.StatusSwitchingProtocols
	return http.NewResponseController(w.ResponseWriter).Hijack()
}

// Unwrap is for http.ResponseController.
func (w *recorder) Unwrap() http.ResponseWriter { return w.ResponseWriter }

// observe is the outermost layer: request id, panics, log and metrics.
func (s *Server) observe(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		start := time.Now()
		n := &note{id: r.Header.Get("X-Request-Id"), route: "other", who: nobody, draining: s.draining, bodies: s.bodies}
		if !requestIDPattern.MatchString(n.id) {
			n.id = newRequestID()
		}
		w.Header().Set("X-Request-Id", n.id)
		r = r.WithContext(context.WithValue(r.Context(), noteKey{}, n))
		rec := &recorder{ResponseWriter: w}
		if r.ContentLength != 0 {
			rec.body = &requestBody{ReadCloser: r.Body, control: http.NewResponseController(w)}
			_ = rec.body.control.SetReadDeadline(start.Add(bodyTimeout)) // not supported by a recorder in a test
			r.Body = rec.body
		}
		defer func() {
			abort := false
			if p := recover(); p != nil {
				abort = s.recovered(rec, r, p)
			}
			n.giveBack()
			if n.who.scope == "" && rec.status >= 400 {
				s.countStranger(r, n) // whatever it was refused for
			}
			took := time.Since(start)
			s.metrics.request(n.route, r.Method, rec.status, took)
			if n.err != nil {
				s.metrics.failed(n.err, rec.status)
			}
			s.logRequest(r, n, rec.status, took)
			s.record(r, n, rec.status, took)
			if abort {
				panic(http.ErrAbortHandler)
			}
		}()
		next.ServeHTTP(rec, r)
	})
}

// recovered answers for a handler that panicked. The daemon stays up: a bug in one request must not end the others. When half an
// answer is out already the connection must be cut: only that tells the client.
func (s *Server) recovered(w *recorder, r *http.Request, p any) (abort bool) {
	if p == http.ErrAbortHandler { // by intent: see abort
		if noteOf(r.Context()).err == nil { // by what a guest's port answered
			noteError(r.Context(), errBrokenOff)
		}
		s.Log.Warn("an answer is broken off", "request_id", requestID(r.Context()), "error", noteOf(r.Context()).err)
		return true
	}
	s.Log.Error("panic in a handler", "request_id", requestID(r.Context()), "panic", fmt.Sprint(p), "stack", string(debug.Stack()))
	if w.status != 0 {
		return true
	}
	writeError(w, r, &sandbox.Error{Code: sandbox.CodeInternal, Message: "the daemon failed on this request by a mistake of its own",
		Hint: "the daemon's log has more under this request id"})
	return false
}

// abort cuts the connection of an answer that can't be finished: whoever takes what came for all of it is told by that.
func abort(r *http.Request, err error) {
	noteError(r.Context(), err)
	panic(http.ErrAbortHandler)
}

func (s *Server) logRequest(r *http.Request, n *note, status int, took time.Duration) {
	level := slog.LevelInfo
	switch {
	case status >= 500 && status != http.StatusServiceUnavailable && status != http.StatusBadGateway: // a guest can make the latter as it likes
		level = slog.LevelError
	case n.unrecorded:
		level = slog.LevelDebug // as the record, the log is no stranger's to fill
	case r.Method == http.MethodGet:
		level = slog.LevelDebug // watched by people and monitors, often
	}
	attrs := []any{"request_id", n.id, "method", r.Method, "path", loggedPath(r), "status", status, "took", took.Round(time.Microsecond)}
	if n.err != nil {
		attrs = append(attrs, "error", n.err)
	}
	s.Log.Log(r.Context(), level, "request", attrs...)
}

func newRequestID() string {
	var b [8]byte
	_, _ = rand.Read(b[:]) // never fails
	return hex.EncodeToString(b[:])
}

// checkLoopbackName refuses a Host that is a name elsewhere: a page whose name was bent to 127.0.0.1 counts as of this origin.
func checkLoopbackName(host string) error {
	name := host
	if h, _, err := net.SplitHostPort(host); err == nil {
		name = h
	}
	name = strings.Trim(name, "[]")
	if name == "localhost" || name == "" {
		return nil
	}
	if addr, err := netip.ParseAddr(name); err == nil && addr.IsLoopback() {
		return nil
	}
	return &sandbox.Error{Code: codeForbidden, Message: fmt.Sprintf("without a token this daemon answers for localhost only, not for %q", name),
		Hint: "start the daemon with --token-file, or ask http://127.0.0.1"}
}
