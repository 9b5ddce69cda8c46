package server

import (
	"encoding/json"
	"net/http"
	"strings"
	"sync"

	"github.com/forkd/forkd/api"
	"github.com/forkd/forkd/internal/sandbox"
)

const ndjson = "application/x-ndjson"

// stream sends progress events, one JSON object a line. The status goes out with the first of them, so that a request that
// fails before there was any progress is answered with its own status.
type stream struct {
	w  http.ResponseWriter
	on bool // the client asked for it

	mu      sync.Mutex // progress may come from more than one goroutine
	started bool
	ended   bool
}

// newStream looks at what the client asked for.
func newStream(w http.ResponseWriter, r *http.Request, asked bool) *stream {
	for _, accept := range r.Header.Values("Accept") {
		asked = asked || strings.Contains(accept, ndjson)
	}
	return &stream{w: w, on: asked}
}

// progress sends an event when the client asked for events.
func (s *stream) progress(e api.ProgressEvent) {
	if s.on {
		e.Event = api.ProgressEventEventProgress
		s.send(e)
	}
}

// step is progress in the domain's words.
func (s *stream) step(p sandbox.Progress) {
	s.progress(api.ProgressEvent{Step: p.Step, Detail: p.Detail, Done: p.Done, Total: p.Total})
}

// finish answers with the result: as the last event, or as the whole answer.
func (s *stream) finish(last api.ProgressEvent, whole any) {
	if !s.on {
		writeJSON(s.w, http.StatusCreated, whole)
		return
	}
	last.Event = api.ProgressEventEventDone
	s.send(last)
	s.end()
}

// fail returns err as the answer, unless events are out already: then it is the last of them.
func (s *stream) fail(r *http.Request, err error) error {
	s.mu.Lock()
	started := s.started
	s.mu.Unlock()
	if !started {
		s.end()
		return err
	}
	err = endedByKey(r, endedByStop(r, err))
	body := describe(err)
	body.RequestID = requestID(r.Context())
	noteError(r.Context(), err)
	if tee, ok := s.w.(interface{ streamFailed() }); ok {
		tee.streamFailed()
	}
	s.send(api.ProgressEvent{Event: api.ProgressEventEventError, Error: &body})
	s.end()
	return nil
}

func (s *stream) end() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.ended = true
}

func (s *stream) send(e api.ProgressEvent) {
	line, err := json.Marshal(e)
	if err != nil {
		panic(err) // plain types: only by a mistake in this package
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.ended { // a late report must not follow the last event
		return
	}
	if !s.started {
		s.started = true
		s.w.Header().Set("Content-Type", ndjson)
		s.w.Header().Set("Cache-Control", "no-store")
		s.w.WriteHeader(http.StatusOK)
	}
	_, _ = s.w.Write(append(line, '\n'))
	_ = http.NewResponseController(s.w).Flush()
}
