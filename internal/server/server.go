package server

import (
	"context"
	"errors"
	"log/slog"
	"net/http"
	"strings"

	"github.com/forkd/forkd/api"
	"github.com/forkd/forkd/internal/audit"
	"github.com/forkd/forkd/internal/sandbox"
)

// errStopping is the cause of a request's context that ends because the daemon does.
var errStopping = errors.New("the daemon is stopping")

// Config is what a Server is made of.
type Config struct {
	Service Service
	Images  Images
	Packs   Packs
	Events  *Events // nil: nothing is told
	Version api.Version
	Token   string  // needed over TCP; "" means none
	Audit   Auditor // nil: no record is kept
	Log     *slog.Logger
}

// Auditor keeps the record of requests.
type Auditor interface {
	Append(audit.Entry) error
}

// Server answers REST requests.
type Server struct {
	Config
	metrics *metrics
	replays *replays
	life    context.Context // ends when the grace period of a shutdown is over
	stop    context.CancelCauseFunc

	draining context.Context // ends when a shutdown begins
	drain    context.CancelFunc
}

// New returns a server that serves nothing yet.
func New(cfg Config) *Server {
	if cfg.Events == nil {
		cfg.Events = NewEvents()
	}
	s := &Server{Config: cfg, replays: newReplays(replayWindow, replayEntries, replayBytes)}
	s.life, s.stop = context.WithCancelCause(context.Background())
	s.draining, s.drain = context.WithCancel(context.Background())
	s.metrics = newMetrics(cfg.Service.Stats)
	return s
}

// handler answers one route. An error it returns becomes the answer.
type handler func(w http.ResponseWriter, r *http.Request) error

// route is one line of the table of routes.
type route struct {
	method, path string
	handle       handler
	creates      bool // takes an Idempotency-Key
}

func (s *Server) routes() []route {
	return []route{
		{"GET", "/healthz", s.health, false},
		{"GET", "/version", s.version, false},
		{"GET", "/metrics", s.metrics.serve, false},
		{"GET", "/openapi.yaml", s.spec, false},
		{"GET", "/v1/events", s.events, false},

		{"GET", "/v1/images", s.listImages, false},
		{"POST", "/v1/images", s.buildImage, true},
		{"POST", "/v1/images/prune", s.pruneImages, false},
		{"GET", "/v1/images/{name}", s.getImage, false},
		{"DELETE", "/v1/images/{name}", s.deleteImage, false},

		{"GET", "/v1/snapshots", s.listSnapshots, false},
		{"POST", "/v1/snapshots", s.createSnapshot, true},
		{"POST", "/v1/snapshots/unpack", s.unpack, false},
		{"DELETE", "/v1/snapshots/{tag}", s.deleteSnapshot, false},
		{"GET", "/v1/snapshots/{tag}/info", s.snapshotInfo, false},
		{"POST", "/v1/snapshots/{tag}/verify", s.verifySnapshot, false},
		{"POST", "/v1/snapshots/{tag}/diff", s.diff, true},
		{"POST", "/v1/snapshots/{tag}/compact", s.compact, true},
		{"GET", "/v1/snapshots/{tag}/pack", s.pack, false},
		{"GET", "/v1/snapshots/{tag}/pack/contents", s.packContents, false},
		{"GET", "/v1/snapshots/{tag}/pool", s.getPool, false},
		{"PUT", "/v1/snapshots/{tag}/pool", s.setPool, false},
		{"GET", "/v1/tree", s.tree, false},

		{"GET", "/v1/sandboxes", s.listSandboxes, false},
		{"POST", "/v1/sandboxes", s.fork, true},
		{"GET", "/v1/sandboxes/{id}", s.getSandbox, false},
		{"DELETE", "/v1/sandboxes/{id}", s.killSandbox, false},
		{"POST", "/v1/sandboxes/{id}/ping", s.ping, false},
		{"POST", "/v1/sandboxes/{id}/exec", s.exec, false},
		{"POST", "/v1/sandboxes/{id}/eval", s.eval, false},
		{"GET", "/v1/sandboxes/{id}/logs", s.logs, false},
		{"POST", "/v1/sandboxes/{id}/timeout", s.extend, false},
		{"GET", "/v1/sandboxes/{id}/stats", s.sandboxStats, false},
		{"POST", "/v1/sandboxes/{id}/branch", s.branch, true},
		{"POST", "/v1/sandboxes/{id}/fork", s.forkRunning, true},
		{"POST", "/v1/sandboxes/{id}/suspend", s.suspend, false},
		{"POST", "/v1/sandboxes/{id}/resume", s.resume, false},

		{"GET", "/v1/workspaces", s.listWorkspaces, false},
		{"POST", "/v1/workspaces", s.createWorkspace, true},
		{"GET", "/v1/workspaces/{name}", s.getWorkspace, false},
		{"DELETE", "/v1/workspaces/{name}", s.deleteWorkspace, false},
		{"POST", "/v1/workspaces/{name}/suspend", s.suspendWorkspace, false},
		{"POST", "/v1/workspaces/{name}/resume", s.resumeWorkspace, false},
	}
}

// Handler answers all routes. Over TCP (trusted false) requests need the token; a Unix socket is protected by its permissions.
func (s *Server) Handler(trusted bool) http.Handler {
	mux := http.NewServeMux()
	methods := map[string][]string{}
	for _, rt := range s.routes() {
		h := s.answer(rt)
		mux.Handle(rt.method+" "+rt.path, h)
		methods[rt.path] = append(methods[rt.path], rt.method)
	}
	for path, allowed := range methods {
		if verb(path) {
			continue // the name's own path says what is allowed
		}
		mux.Handle(path, s.answer(route{path: path, handle: methodNotAllowed(allowed)}))
	}
	mux.Handle("/", s.answer(route{path: "other", handle: notFound}))

	var h http.Handler = canonical(mux)
	if !trusted {
		h = s.guard(h)
	}
	return s.observe(h)
}

// verb reports whether a path is one that a name could have as well: what has such a name must stay within reach of the other methods.
func verb(path string) bool {
	return path == "/v1/images/prune" || path == "/v1/snapshots/unpack"
}

// answer makes an http.Handler of a route.
func (s *Server) answer(rt route) http.Handler {
	handle := rt.handle
	if rt.creates {
		handle = s.idempotent(handle)
	}
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		noteRoute(r.Context(), rt.path)
		if err := handle(w, r); err != nil {
			writeError(w, r, err)
		}
	})
}

func notFound(_ http.ResponseWriter, r *http.Request) error {
	return &sandbox.Error{Code: codeNotFound, Message: "there is no " + r.URL.Path, Hint: "GET /openapi.yaml describes what there is"}
}

func methodNotAllowed(allowed []string) handler {
	list := strings.Join(allowed, ", ")
	return func(w http.ResponseWriter, r *http.Request) error {
		w.Header().Set("Allow", list)
		return &sandbox.Error{Code: codeMethodNotAllowed, Message: r.URL.Path + " does not take " + r.Method, Hint: "it takes " + list}
	}
}

// canonical refuses paths that the mux would answer with a redirect to another route.
func canonical(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		path := r.URL.EscapedPath()
		for _, segment := range strings.Split(strings.TrimPrefix(path, "/"), "/") {
			if segment == "." || segment == ".." || (segment == "" && path != "/") {
				noteRoute(r.Context(), "other")
				writeError(w, r, invalid("names and ids have no dots or slashes", "the path %q has a %q in it", path, segment))
				return
			}
		}
		next.ServeHTTP(w, r)
	})
}

func (s *Server) health(w http.ResponseWriter, _ *http.Request) error {
	writeJSON(w, http.StatusOK, api.Health{OK: true})
	return nil
}

func (s *Server) version(w http.ResponseWriter, _ *http.Request) error {
	writeJSON(w, http.StatusOK, s.Version)
	return nil
}

func (s *Server) spec(w http.ResponseWriter, _ *http.Request) error {
	w.Header().Set("Content-Type", "application/yaml")
	_, _ = w.Write(api.Spec)
	return nil
}
