package server

import (
	"bytes"
	"container/list"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"net/http"
	"sync"
	"time"

	"github.com/forkd/forkd/internal/sandbox"
)

// How much is remembered for requests that come again, of each tenant.
const (
	replayWindow  = 10 * time.Minute
	replayEntries = 1024
	replayBytes   = 8 << 20
	maxKeyLen     = 255
)

// replays remembers answers by Idempotency-Key. Only answers that created something are kept: a request that failed left
// nothing behind, so trying it again is what the client wants.
type replays struct {
	window     time.Duration
	maxEntries int
	maxBytes   int

	mu      sync.Mutex
	byKey   map[string]*replay
	tenants map[string]*replayed
	nowFunc func() time.Time
}

// replayed are the entries of one tenant: nobody's push out another's.
type replayed struct {
	order list.List // of *replay, oldest first
	bytes int
}

// replay is one remembered answer, or one that is being made.
type replay struct {
	key     string
	tenant  string
	request [sha256.Size]byte
	created time.Time
	element *list.Element
	done    chan struct{} // closed when the fields below are final

	status int
	header http.Header
	body   []byte
}

func newReplays(window time.Duration, maxEntries, maxBytes int) *replays {
	return &replays{window: window, maxEntries: maxEntries, maxBytes: maxBytes, byKey: map[string]*replay{}, tenants: map[string]*replayed{}, nowFunc: time.Now}
}

// begin returns the entry of a tenant's key and whether the caller is to make its answer. When not, the entry may still be in the making.
func (c *replays) begin(tenant, key string, request [sha256.Size]byte) (entry *replay, mine bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	key = tenant + " " + key // no tenant has a space in its name
	of := c.tenants[tenant]
	if of == nil {
		of = &replayed{}
		c.tenants[tenant] = of
	}
	c.evict(of)
	if old, ok := c.byKey[key]; ok {
		return old, false
	}
	e := &replay{key: key, tenant: tenant, request: request, created: c.nowFunc(), done: make(chan struct{})}
	e.element = of.order.PushBack(e)
	c.byKey[key] = e
	return e, true
}

// finish makes an entry final: kept when it created something, else forgotten.
func (c *replays) finish(e *replay, keep bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	close(e.done)
	if !keep {
		c.remove(e)
		return
	}
	of := c.tenants[e.tenant]
	of.bytes += len(e.body)
	c.evict(of)
}

// evict drops what is too old or too much. Preconditions: c.mu is held.
func (c *replays) evict(of *replayed) {
	for el := of.order.Front(); el != nil; {
		e, next := el.Value.(*replay), el.Next()
		over := of.order.Len() > c.maxEntries || of.bytes > c.maxBytes || c.nowFunc().Sub(e.created) > c.window
		if !over {
			return
		}
		select {
		case <-e.done:
			of.bytes -= len(e.body)
			c.remove(e)
		default: // in the making: somebody may wait for it
		}
		el = next
	}
}

// remove forgets an entry. Preconditions: c.mu is held.
func (c *replays) remove(e *replay) {
	c.tenants[e.tenant].order.Remove(e.element)
	delete(c.byKey, e.key)
}

// idempotent makes a handler that creates answer a repeated request with the first one's answer.
func (s *Server) idempotent(next handler) handler {
	return func(w http.ResponseWriter, r *http.Request) error {
		key := r.Header.Get("Idempotency-Key")
		if key == "" {
			return next(w, r)
		}
		if len(key) > maxKeyLen {
			return invalid("use a UUID", "the Idempotency-Key has %d bytes: at most %d are taken", len(key), maxKeyLen)
		}
		body, err := readBody(w, r, maxBody)
		if err != nil {
			return err
		}
		r.Body = io.NopCloser(bytes.NewReader(body))
		request := sha256.Sum256(fmt.Append(nil, r.Header.Get("Accept"), "\n", string(body)))
		// Whose key it is goes first: nobody gets what somebody else was answered.
		who := noteOf(r.Context()).who
		for {
			e, mine := s.replays.begin(who.tenant, who.name+" "+r.URL.Path+" "+key, request)
			if mine {
				return s.first(w, r, e, next)
			}
			if e.request != request {
				return &sandbox.Error{Code: codeIdempotencyKeyReused, Message: fmt.Sprintf("the Idempotency-Key %q was used for another request", key),
					Hint: "use a new key for each request, and the same one only to repeat it"}
			}
			select {
			case <-e.done:
			case <-r.Context().Done():
				return r.Context().Err()
			}
			if e.status != 0 {
				e.replayTo(w)
				return nil
			}
			// The first one failed and left nothing: it is this one's turn.
		}
	}
}

// first makes the answer that repetitions get. It goes on when its client leaves, who comes back for the answer, but not when its key ends.
func (s *Server) first(w http.ResponseWriter, r *http.Request, e *replay, next handler) (err error) {
	ctx, cancel := context.WithCancelCause(context.WithoutCancel(r.Context()))
	defer cancel(nil)
	defer context.AfterFunc(s.life, func() { cancel(errStopping) })()
	defer context.AfterFunc(r.Context(), func() {
		if cause := context.Cause(r.Context()); errors.Is(cause, errEnded) {
			cancel(cause)
		}
	})()
	tee := &teeWriter{ResponseWriter: w}
	keep := false
	defer func() { s.replays.finish(e, keep) }() // after a panic too
	err = next(tee, r.WithContext(ctx))
	if err == nil && tee.status/100 == 2 && !tee.failed {
		keep = true
		e.status, e.header, e.body = tee.status, w.Header().Clone(), tee.body.Bytes()
	}
	return err
}

func (e *replay) replayTo(w http.ResponseWriter) {
	id := w.Header().Get("X-Request-Id")
	for name, values := range e.header {
		w.Header()[name] = values
	}
	w.Header().Set("X-Request-Id", id)
	w.Header().Set("Idempotency-Replayed", "true")
	w.WriteHeader(e.status)
	_, _ = w.Write(e.body)
}

// teeWriter keeps a copy of what is answered.
type teeWriter struct {
	http.ResponseWriter
	status int
	body   bytes.Buffer
	failed bool // a stream that ended in an error event
}

func (w *teeWriter) WriteHeader(status int) {
	w.status = status
	w.ResponseWriter.WriteHeader(status)
}

func (w *teeWriter) Write(b []byte) (int, error) {
	if w.status == 0 {
		w.status = http.StatusOK
	}
	w.body.Write(b)
	return w.ResponseWriter.Write(b)
}

// Unwrap is for http.ResponseController.
func (w *teeWriter) Unwrap() http.ResponseWriter { return w.ResponseWriter }

// streamFailed tells that the 200 that is out means a failure.
func (w *teeWriter) streamFailed() { w.failed = true }
