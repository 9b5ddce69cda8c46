package server

import (
	"context"
	"crypto/sha256"
	"crypto/subtle"
	"errors"
	"fmt"
	"net/http"
	"os"
	"slices"
	"strings"
	"time"

	"golang.org/x/time/rate"

	"github.com/forkd/forkd/internal/keys"
	"github.com/forkd/forkd/internal/sandbox"
)

// principal is who makes a request.
type principal struct {
	name    string // for people and the audit record
	tenant  string
	scope   keys.Scope
	caller  sandbox.Caller
	expires time.Time       // zero: never
	life    context.Context // ends when it may do nothing any more; nil: never
	limiter *rate.Limiter   // nil: no limit
	key     *keys.Key       // nil: none
}

// operator is somebody who has all of the host's own.
func operator(name string) principal {
	return principal{name: name, tenant: sandbox.DefaultTenant, scope: keys.Admin, caller: sandbox.Caller{Tenant: sandbox.DefaultTenant}}
}

func ofKey(k keys.Live) principal {
	return principal{name: "key " + k.ID + " (" + k.Name + ")", tenant: k.Tenant, scope: k.Scope, expires: k.ExpiresAt, life: k.Life, limiter: k.Limiter, key: &k.Key,
		caller: sandbox.Caller{Tenant: k.Tenant, KeyID: k.ID, MaxSandboxes: k.MaxSandboxes}}
}

// nobody is who could not show a valid key.
var nobody = principal{name: "nobody"}

// SocketAccess says who else than root and the daemon's own user may use the Unix socket. The zero value: nobody.
type SocketAccess struct {
	Group int        // members of this group; meant only with a Scope
	Scope keys.Scope // "": none but root and the daemon's user
}

// Errors of who could not be identified.
var (
	errToken   = errors.New("bearer token")
	errEnded   = errors.New("key ended")
	tokenHint  = "send a key as Authorization: Bearer …; clients of forkd read it from FORKD_TOKEN. `forkd key create` makes one"
	noSuchPeer = "run it as root or as the daemon's user, or start the daemon with --socket-group"
)

// guarded says whether there is anything to check a bearer token against.
func (s *Server) guarded() bool { return s.token.Load() != nil || s.Keys != nil && s.Keys.Any() }

// liveToken is the token that the daemon takes, until it gets another one.
type liveToken struct {
	hash [sha256.Size]byte
	life context.Context
	end  context.CancelFunc
}

// SetToken has the server take another token from now on; "": none. What was begun with the one before ends, unless it is the same.
func (s *Server) SetToken(token string) {
	var next *liveToken
	if token != "" {
		next = &liveToken{hash: sha256.Sum256([]byte(token))}
		next.life, next.end = context.WithCancel(context.Background())
	}
	if old := s.token.Load(); old != nil && next != nil && old.hash == next.hash {
		next.end()
		return
	}
	if old := s.token.Swap(next); old != nil {
		old.end()
	}
}

// identify finds out who makes a request. What it carries goes before where it comes from.
func (s *Server) identify(r *http.Request, unixSocket bool) (principal, error) {
	given := r.Header.Get("Authorization")
	switch {
	case given != "" && s.guarded():
		return s.bearer(given)
	case unixSocket:
		return s.peer(r)
	case s.guarded():
		return nobody, &sandbox.Error{Code: codeUnauthorized, Message: "this daemon needs a key", Err: errToken, Hint: tokenHint}
	}
	if err := checkLoopbackName(r.Host); err != nil {
		return nobody, err
	}
	return operator("local"), nil
}

// bearer identifies by a bearer token: a key, or the token that the daemon was started with.
func (s *Server) bearer(header string) (principal, error) {
	refuse := func(who principal, message string) (principal, error) {
		return who, &sandbox.Error{Code: codeUnauthorized, Message: message, Err: errToken, Hint: tokenHint}
	}
	scheme, token, _ := strings.Cut(header, " ")
	if !strings.EqualFold(scheme, "Bearer") {
		return refuse(nobody, "this daemon takes bearer tokens")
	}
	if known := s.token.Load(); known != nil {
		// Hashed so that not even the length is told by the time it takes.
		if got := sha256.Sum256([]byte(token)); subtle.ConstantTimeCompare(known.hash[:], got[:]) == 1 {
			who := operator("token")
			who.limiter, who.life = s.tokenLimit, known.life
			return who, nil
		}
	}
	if s.Keys == nil {
		return refuse(nobody, "the token is not the one this daemon was started with")
	}
	key, err := s.Keys.Check(token)
	switch {
	case err == nil:
		return ofKey(key), nil
	case errors.Is(err, keys.ErrUnknown) && !keys.IsKey(token):
		return refuse(nobody, "the token is not one that this daemon knows")
	case errors.Is(err, keys.ErrUnknown):
		return refuse(nobody, "the key is not one that this daemon knows")
	}
	who := ofKey(key)
	who.scope = "" // it is known whose key it was, and it is good for nothing
	return refuse(who, fmt.Sprintf("the key %s (%s) can't be used: %v", key.ID, key.Name, err))
}

// peer identifies who is at the other end of the Unix socket.
func (s *Server) peer(r *http.Request) (principal, error) {
	p, ok := r.Context().Value(peerKey{}).(peer)
	if !ok {
		return nobody, &sandbox.Error{Code: codeUnauthorized, Message: "it can't be told who is at the other end of the socket", Hint: noSuchPeer}
	}
	name := fmt.Sprintf("uid %d", p.uid)
	if p.uid == 0 || p.uid == uint32(os.Geteuid()) {
		return operator(name), nil
	}
	if s.Socket.Scope != "" && slices.Contains(p.groups, uint32(s.Socket.Group)) {
		who := operator(name)
		who.scope = s.Socket.Scope
		return who, nil
	}
	who := nobody
	who.name = name
	return who, &sandbox.Error{Code: codeUnauthorized, Message: fmt.Sprintf("the user with the id %d may not use this socket", p.uid), Hint: noSuchPeer}
}

// guard lets nobody in who is not known, and tells the rest who it is. On a TCP listener it also keeps away pages in a browser on this host.
func (s *Server) guard(next http.Handler, unixSocket bool) http.Handler {
	crossOrigin := http.NewCrossOriginProtection()
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if err := crossOrigin.Check(asChange(r)); err != nil && !unixSocket {
			writeError(w, r, &sandbox.Error{Code: codeForbidden, Message: "a page of another site may not ask this daemon", Err: err})
			return
		}
		if r.URL.Path == "/healthz" {
			next.ServeHTTP(w, r)
			return
		}
		who, err := s.identify(r, unixSocket)
		noteOf(r.Context()).who = who
		if errors.Is(err, errToken) && !unixSocket && s.countStranger(r, noteOf(r.Context())) {
			err = &sandbox.Error{Code: codeRateLimited, Message: "too many requests without a valid key came from this address", Hint: tokenHint, RetryAfter: strangerRetry}
		}
		leave := func() {}
		if err == nil {
			err = slowDown(who)
		}
		if err == nil {
			leave, err = s.atOnce.enter(who)
		}
		if err != nil {
			if errors.Is(err, errToken) {
				w.Header().Set("WWW-Authenticate", "Bearer")
			}
			writeError(w, r, err)
			return
		}
		defer leave()
		ctx, end := who.bind(sandbox.WithCaller(r.Context(), who.caller))
		defer end()
		next.ServeHTTP(w, r.WithContext(ctx))
	})
}

// asChange has a request that upgrades its connection looked at as one that changes something: what a page of another site can't read of a GET
// it could read and write of a WebSocket.
func asChange(r *http.Request) *http.Request {
	if r.Header.Get("Upgrade") == "" {
		return r
	}
	change := *r
	change.Method = http.MethodPost
	return &change
}

// slowDown refuses a request beyond what a key may make at a time.
func slowDown(who principal) error {
	if who.limiter == nil {
		return nil
	}
	turn := who.limiter.Reserve()
	wait := turn.Delay()
	if turn.OK() && wait == 0 {
		return nil
	}
	turn.Cancel()
	return &sandbox.Error{Code: codeRateLimited, Message: fmt.Sprintf("%s makes more than %v requests a second", who.name, who.limiter.Limit()),
		Hint: "make fewer, or ask for a key that may make more", RetryAfter: max(wait, time.Second)}
}

// bind ends a request with the key it was made with, when that is revoked or expires.
func (p principal) bind(ctx context.Context) (context.Context, func()) {
	if p.life == nil {
		return ctx, func() {}
	}
	ctx, cancel := context.WithCancelCause(ctx)
	stop := context.AfterFunc(p.life, func() { cancel(fmt.Errorf("%w: %w", errEnded, keys.ErrRevoked)) })
	expiry := func() bool { return true }
	if !p.expires.IsZero() {
		expiry = time.AfterFunc(time.Until(p.expires), func() { cancel(fmt.Errorf("%w: %w", errEnded, keys.ErrExpired)) }).Stop
	}
	return ctx, func() { stop(); expiry(); cancel(nil) }
}

// noteKeyEnd has the record say it when what went on after the answer's beginning ended with the key.
func noteKeyEnd(r *http.Request) {
	if cause := context.Cause(r.Context()); errors.Is(cause, errEnded) {
		noteError(r.Context(), endedByKey(r, cause))
	}
}

// endedByKey turns the error of a request that ended with its key into one that says so.
func endedByKey(r *http.Request, err error) error {
	if cause := context.Cause(r.Context()); errors.Is(cause, errEnded) && (errors.Is(err, errEnded) || errors.Is(err, context.Canceled)) {
		return &sandbox.Error{Code: codeUnauthorized, Message: "the request was ended: " + cause.Error(), Err: errToken, Hint: tokenHint}
	}
	return err
}
