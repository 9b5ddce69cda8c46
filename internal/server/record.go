package server

import (
	"cmp"
	"context"
	"fmt"
	"net"
	"net/http"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/forkd/forkd/api"
	"github.com/forkd/forkd/internal/audit"
)

// record writes a request to the audit record: whatever changes something or was refused, and who looked at what. Scrapes and health checks that
// succeeded are left out.
func (s *Server) record(r *http.Request, n *note, status int, took time.Duration) {
	if s.Audit == nil || status < 400 && !strings.HasPrefix(n.route, "/v1/") {
		return
	}
	outcome := "ok"
	switch {
	case n.err != nil:
		outcome = n.err.Error()
	case status >= 400 || status == 0:
		outcome = cmp.Or(http.StatusText(status), "broken off")
	}
	target := strings.Join(n.targets, " ")
	for _, name := range []string{"id", "tag", "name"} {
		target = cmp.Or(target, r.PathValue(name))
	}
	action := n.route
	if action == "other" { // it was refused before it came to a route
		action = shorten(r.URL.Path)
	}
	err := s.Audit.Append(audit.Entry{
		RequestID: n.id, Principal: principal(r), Remote: r.RemoteAddr, Action: shorten(r.Method) + " " + action, Target: target, Params: n.params,
		Status: status, Outcome: outcome, DurationMS: millis(took),
	})
	if err != nil {
		s.metrics.unkept.Inc()
		s.Log.Error("a request is missing in the audit record", "request_id", n.id, "error", err)
	}
}

// noteSandboxes tells the audit record which sandboxes a request made.
func noteSandboxes(ctx context.Context, list []api.SandboxInfo) {
	n := noteOf(ctx)
	for _, s := range list {
		n.targets = append(n.targets, s.ID)
	}
}

type peerKey struct{}

// withPeer notes who is at the other end of a Unix socket.
func withPeer(ctx context.Context, c net.Conn) context.Context {
	conn, ok := c.(*net.UnixConn)
	if !ok {
		return ctx
	}
	raw, err := conn.SyscallConn()
	if err != nil {
		return ctx
	}
	var peer *unix.Ucred
	if raw.Control(func(fd uintptr) { peer, err = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED) }) != nil || err != nil {
		return ctx
	}
	return context.WithValue(ctx, peerKey{}, fmt.Sprintf("uid %d", peer.Uid))
}

// principal is who asked, as far as it is known.
func principal(r *http.Request) string {
	if peer, ok := r.Context().Value(peerKey{}).(string); ok {
		return peer
	}
	if r.Header.Get("Authorization") != "" {
		return "token" // whether it was the right one, the outcome tells
	}
	return "nobody"
}
