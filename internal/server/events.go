package server

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"sync"
	"time"

	"github.com/forkd/forkd/api"
	"github.com/forkd/forkd/internal/sandbox"
)

const (
	eventBuffer    = 1024             // events that a reader may be behind
	maxListeners   = 4096             // readers at a time
	maxListenersOf = 64               // of one tenant
	eventHeartbeat = 15 * time.Second // a reader can tell silence from a dead connection
	eventPatience  = 10 * time.Second // for one write: a reader that stops reading is gone
)

// Events hands on what happens in the domain to those who listen at the time.
type Events struct {
	mu        sync.Mutex
	listeners map[*listener]struct{}
	closed    bool
}

// listener is one reader. Its channel is closed when nothing more comes.
type listener struct {
	events  chan sandbox.Event
	tenant  string
	dropped bool // it was too slow; valid when the channel is closed
}

// NewEvents returns Events that nobody listens to yet.
func NewEvents() *Events { return &Events{listeners: map[*listener]struct{}{}} }

// Publish tells everybody of its tenant who listens. It never waits: who is too far behind is dropped.
func (e *Events) Publish(event sandbox.Event) {
	e.mu.Lock()
	defer e.mu.Unlock()
	for l := range e.listeners {
		if l.tenant != event.Tenant {
			continue
		}
		select {
		case l.events <- event:
		default:
			l.dropped = true
			e.endLocked(l)
		}
	}
}

// Close ends what everybody listens to, now and later.
func (e *Events) Close() {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.closed = true
	for l := range e.listeners {
		e.endLocked(l)
	}
}

// listen begins to listen; the listener must be given to leave.
func (e *Events) listen(tenant string) (*listener, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	of := 0
	for l := range e.listeners {
		if l.tenant == tenant {
			of++
		}
	}
	if len(e.listeners) >= maxListeners || of >= maxListenersOf {
		return nil, &sandbox.Error{Code: sandbox.CodeQueueFull, Message: fmt.Sprintf("%d readers listen to events, which is as many as may", of),
			Hint: "let fewer programs listen", RetryAfter: eventHeartbeat}
	}
	l := &listener{events: make(chan sandbox.Event, eventBuffer), tenant: tenant}
	e.listeners[l] = struct{}{}
	if e.closed {
		e.endLocked(l)
	}
	return l, nil
}

func (e *Events) leave(l *listener) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.endLocked(l)
}

// endLocked ends a listener, once. Preconditions: e.mu is held.
func (e *Events) endLocked(l *listener) {
	if _, listens := e.listeners[l]; listens {
		delete(e.listeners, l)
		close(l.events)
	}
}

// events answers with what happens from now on, as server-sent events.
func (s *Server) events(w http.ResponseWriter, r *http.Request) error {
	l, err := s.Events.listen(sandbox.TenantOf(r.Context()))
	if err != nil {
		return err
	}
	defer s.Events.leave(l)
	out := &eventWriter{w: w, control: http.NewResponseController(w)}
	defer out.end()
	w.Header().Set("Content-Type", "text/event-stream")
	w.Header().Set("Cache-Control", "no-store")
	w.WriteHeader(http.StatusOK)
	beat := time.NewTicker(eventHeartbeat)
	defer beat.Stop()
	out.write(": events of forkd\n\n") // the answer begins now, not with the first event
	for out.err == nil {
		select {
		case event, ok := <-l.events:
			if !ok {
				if l.dropped {
					out.event(api.Event{Kind: api.EventKindDropped, TimeUnixMS: time.Now().UnixMilli(),
						Reason: fmt.Sprintf("this reader was %d events behind: list what is of interest, and listen again", eventBuffer)})
				}
				return nil
			}
			out.event(eventInfo(event))
		case <-beat.C:
			out.write(":\n\n")
		case <-r.Context().Done():
			if cause := context.Cause(r.Context()); errors.Is(cause, errEnded) {
				noteKeyEnd(r)
				out.event(api.Event{Kind: api.EventKindDropped, TimeUnixMS: time.Now().UnixMilli(), Reason: cause.Error()})
			}
			return nil
		}
	}
	return nil
}

func eventInfo(e sandbox.Event) api.Event {
	return api.Event{Kind: api.EventKind(e.Kind), TimeUnixMS: e.Time.UnixMilli(), SandboxID: e.SandboxID, Tag: e.Tag, State: string(e.State), Condition: api.ConditionKind(e.Condition), Reason: e.Reason}
}

// eventWriter writes server-sent events until a write fails.
type eventWriter struct {
	w       http.ResponseWriter
	control *http.ResponseController
	err     error
}

func (o *eventWriter) event(e api.Event) {
	data, err := json.Marshal(e)
	if err != nil {
		panic(err) // plain types: only by a mistake in this package
	}
	o.write(fmt.Sprintf("event: %s\ndata: %s\n\n", e.Kind, data))
}

func (o *eventWriter) write(text string) {
	_ = o.control.SetWriteDeadline(time.Now().Add(eventPatience)) // not supported by a recorder in a test
	_, o.err = o.w.Write([]byte(text))
	if o.err == nil {
		o.err = o.control.Flush()
	}
}

// end takes the deadline back: the connection may go on.
func (o *eventWriter) end() { _ = o.control.SetWriteDeadline(time.Time{}) }
