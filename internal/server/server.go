package server

import (
	"context"
	"errors"
	"log/slog"
	"net/http"
	"strings"
	"sync/atomic"

	"github.com/forkd/forkd/api"
	"golang.org/x/time/rate"

	"github.com/forkd/forkd/internal/audit"
	"github.com/forkd/forkd/internal/keys"
	"github.com/forkd/forkd/internal/sandbox"
)

// errStopping is the cause of a request's context that ends because the daemon does.
var errStopping = errors.New("the daemon is stopping")

// Config is what a Server is made of.
type Config struct {
	Service Service
	Images  Images
	Packs   Packs
	Timings *Timings // nil: empty ones
	Events  *Events  // nil: nothing is told
	Version api.Version
	Engine  func(context.Context) string // its name, for Version; nil: not told
	Token   string                       // an administrator's, as published; "" means none. See SetToken
	Keys    *keys.Ring                   // nil: none
	KeyRate keys.Limit                   // of the token; of keys the ring knows
	Socket  SocketAccess
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
	token      atomic.Pointer[liveToken]
	tokenLimit *rate.Limiter
	strangers  *strangers
	atOnce     *crowd // requests
	jobs       *crowd // those that read or write whole snapshots
	bodies     *crowd // bytes
	metrics    *metrics
	replays    *replays
	life       context.Context // ends when the grace period of a shutdown is over
	stop       context.CancelCauseFunc

	draining context.Context // ends when a shutdown begins
	drain    context.CancelFunc
}

// New returns a server that serves nothing yet.
func New(cfg Config) *Server {
	if cfg.Events == nil {
		cfg.Events = NewEvents()
	}
	if cfg.Timings == nil {
		cfg.Timings = NewTimings()
	}
	s := &Server{Config: cfg, tokenLimit: cfg.KeyRate.Limiter(), strangers: newStrangers(), atOnce: newCrowd("requests", maxAtOnce), jobs: newCrowd("jobs with whole snapshots", maxJobs),
		bodies:  newCrowd("bytes of requests' bodies", maxBodies),
		replays: newReplays(replayWindow, replayEntries, replayBytes)}
	s.SetToken(cfg.Token)
	s.life, s.stop = context.WithCancelCause(context.Background())
	s.draining, s.drain = context.WithCancel(context.Background())
	s.metrics = newMetrics(cfg.Service.Stats, cfg.Timings)
	return s
}

// handler answers one route. An error it returns becomes the answer.
type handler func(w http.ResponseWriter, r *http.Request) error

// route is one line of the table of routes.
type route struct {
	method, path string
	access       access
	handle       handler
	creates      bool // takes an Idempotency-Key
}

func (s *Server) routes() []route {
	return []route{
		{"GET", "/healthz", accessOpen, s.health, false},
		{"GET", "/version", accessRead, s.version, false},
		{"GET", "/metrics", accessHostRead, s.metrics.serve, false},
		{"GET", "/openapi.yaml", accessRead, s.spec, false},
		{"GET", "/v1/events", accessRead, s.events, false},

		{"GET", "/v1/keys", accessAdmin, s.listKeys, false},
		{"POST", "/v1/keys", accessAdmin, s.createKey, false}, // an answer that is kept would keep the key
		{"DELETE", "/v1/keys/{id}", accessAdmin, s.revokeKey, false},

		{"GET", "/v1/images", accessRead, s.listImages, false},
		{"POST", "/v1/images", accessHostAdmin, s.buildImage, true},
		{"POST", "/v1/images/prune", accessHostAdmin, s.pruneImages, false},
		{"GET", "/v1/images/{name}", accessRead, s.getImage, false},
		{"PUT", "/v1/images/{name}/sharing", accessHostAdmin, s.shareImage, false},
		{"DELETE", "/v1/images/{name}", accessHostAdmin, s.deleteImage, false},

		{"GET", "/v1/snapshots", accessRead, s.listSnapshots, false},
		{"POST", "/v1/snapshots", accessRun, s.createSnapshot, true},
		{"POST", "/v1/snapshots/unpack", accessAdmin, s.job(s.unpack), false},
		{"DELETE", "/v1/snapshots/{tag}", accessRun, s.deleteSnapshot, false},
		{"PUT", "/v1/snapshots/{tag}/sharing", accessHostAdmin, s.shareSnapshot, false},
		{"GET", "/v1/snapshots/{tag}/info", accessRead, s.snapshotInfo, false},
		{"POST", "/v1/snapshots/{tag}/verify", accessRun, s.job(s.verifySnapshot), false},
		{"POST", "/v1/snapshots/{tag}/diff", accessRun, s.diff, true},
		{"POST", "/v1/snapshots/{tag}/compact", accessRun, s.job(s.compact), true},
		{"GET", "/v1/snapshots/{tag}/pack", accessRun, s.job(s.pack), false},
		{"GET", "/v1/snapshots/{tag}/pack/contents", accessRun, s.packContents, false},
		{"GET", "/v1/snapshots/{tag}/pool", accessRead, s.getPool, false},
		{"PUT", "/v1/snapshots/{tag}/pool", accessAdmin, s.setPool, false},
		{"GET", "/v1/tree", accessRead, s.tree, false},

		{"GET", "/v1/sandboxes", accessRead, s.listSandboxes, false},
		{"POST", "/v1/sandboxes", accessRun, s.fork, true},
		{"GET", "/v1/sandboxes/{id}", accessRead, s.getSandbox, false},
		{"DELETE", "/v1/sandboxes/{id}", accessRun, s.killSandbox, false},
		{"POST", "/v1/sandboxes/{id}/ping", accessRun, s.ping, false},
		{"POST", "/v1/sandboxes/{id}/exec", accessRun, s.exec, false},
		{"POST", "/v1/sandboxes/{id}/eval", accessRun, s.eval, false},
		{"GET", "/v1/sandboxes/{id}/logs", accessRead, s.logs, false},
		{"POST", "/v1/sandboxes/{id}/timeout", accessRun, s.extend, false},
		{"GET", "/v1/sandboxes/{id}/stats", accessRead, s.sandboxStats, false},
		{"GET", "/v1/sandboxes/{id}/network", accessRead, s.networkStatus, false},
		{"PUT", "/v1/sandboxes/{id}/network", accessRun, s.setNetwork, false},
		{"GET", "/v1/sandboxes/{id}/tunnel/{port}", accessRun, s.tunnel, false},
		{"POST", "/v1/sandboxes/{id}/branch", accessRun, s.branch, true},
		{"POST", "/v1/sandboxes/{id}/fork", accessRun, s.forkRunning, true},
		{"POST", "/v1/sandboxes/{id}/suspend", accessRun, s.suspend, false},
		{"POST", "/v1/sandboxes/{id}/resume", accessRun, s.resume, false},

		{"GET", "/v1/workspaces", accessRead, s.listWorkspaces, false},
		{"POST", "/v1/workspaces", accessRun, s.createWorkspace, true},
		{"GET", "/v1/workspaces/{name}", accessRead, s.getWorkspace, false},
		{"DELETE", "/v1/workspaces/{name}", accessRun, s.deleteWorkspace, false},
		{"POST", "/v1/workspaces/{name}/suspend", accessRun, s.suspendWorkspace, false},
		{"POST", "/v1/workspaces/{name}/resume", accessRun, s.resumeWorkspace, false},
	}
}

// Handler answers all routes, over TCP or on a Unix socket: there whoever carries no key is known by the credentials of its process.
func (s *Server) Handler(unixSocket bool) http.Handler {
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
		mux.Handle(path, s.answer(route{path: path, access: accessOpen, handle: methodNotAllowed(allowed)}))
	}
	mux.Handle("/", s.answer(route{path: "other", access: accessOpen, handle: notFound}))

	return s.observe(s.guard(s.withPorts(canonical(mux)), unixSocket))
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
	handle = rt.access.admit(handle)
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		noteRoute(r.Context(), rt.path)
		noteTarget(r)
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

func (s *Server) version(w http.ResponseWriter, r *http.Request) error {
	v := s.Version
	if s.Engine != nil {
		v.Engine = s.Engine(r.Context())
	}
	writeJSON(w, http.StatusOK, v)
	return nil
}

func (s *Server) spec(w http.ResponseWriter, _ *http.Request) error {
	w.Header().Set("Content-Type", "application/yaml")
	_, _ = w.Write(api.Spec)
	return nil
}
