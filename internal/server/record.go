package server

import (
	"cmp"
	"context"
	"encoding/json"
	"net/http"
	"strings"
	"time"

	"github.com/forkd/forkd/api"
	"github.com/forkd/forkd/internal/audit"
)

// record writes a request to the audit record. Health checks that succeeded are left out.
func (s *Server) record(r *http.Request, n *note, status int, took time.Duration) {
	if s.Audit == nil || n.unrecorded || status < 400 && n.route == "/healthz" {
		return
	}
	outcome := "ok"
	switch {
	case n.err != nil:
		outcome = n.err.Error()
	case status >= 400 || status == 0:
		outcome = cmp.Or(http.StatusText(status), "broken off")
	}
	target := cmp.Or(strings.Join(n.targets, " "), n.target)
	action := n.route
	if action == "other" { // it was refused before it came to a route
		action = shorten(loggedPath(r))
	}
	err := s.Audit.Append(audit.Entry{
		RequestID: n.id, Principal: n.who.name, Tenant: n.who.tenant, Remote: r.RemoteAddr, Action: shorten(r.Method) + " " + action, Target: target, Params: n.allParams(),
		Status: status, Outcome: outcome, DurationMS: millis(took),
	})
	if err != nil {
		s.metrics.unkept.Inc()
		s.Log.Error("a request is missing in the audit record", "request_id", n.id, "error", err)
	}
}

// noteQuery tells the audit record what a request says in its query. What no handler reads changes nothing, and is not kept.
func noteQuery(r *http.Request, name string) {
	n := noteOf(r.Context())
	if n.query == nil {
		n.query = map[string]string{}
	}
	n.query[name] = shorten(r.URL.Query().Get(name))
}

// allParams are those of the body, with those of the query as one more.
func (n *note) allParams() json.RawMessage {
	if len(n.query) == 0 {
		return n.params
	}
	all := map[string]any{}
	if n.params != nil {
		_ = json.Unmarshal(n.params, &all) // it was written by audit.Redact
	}
	all["query"] = n.query
	out, err := json.Marshal(all)
	if err != nil {
		return n.params
	}
	return out
}

// noteTarget tells the audit record what the path of a request names.
func noteTarget(r *http.Request) {
	for _, name := range []string{"id", "tag", "name"} {
		if v := r.PathValue(name); v != "" {
			noteOf(r.Context()).target = shorten(v)
			return
		}
	}
}

// noteSandboxes tells the audit record which sandboxes a request made.
func noteSandboxes(ctx context.Context, list []api.SandboxInfo) {
	n := noteOf(ctx)
	for _, s := range list {
		n.targets = append(n.targets, s.ID)
	}
}
