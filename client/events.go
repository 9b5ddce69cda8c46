package client

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"io"
	"iter"
	"net/http"

	"github.com/forkd/forkd/api"
)

// Event is a change in the daemon.
type Event = api.Event

// maxEvent bounds one line of the stream.
const maxEvent = 1 << 20

// EventStream is what changes, as it changes.
type EventStream struct {
	client *Client
	ctx    context.Context
	body   io.ReadCloser
}

// Events begins to listen: what happens once it has returned is told. The caller closes the stream.
//
//	stream, err := c.Events(ctx)
//	defer stream.Close()
//	for event, err := range stream.All() { … }
func (c *Client) Events(ctx context.Context) (*EventStream, error) {
	resp, err := c.send(ctx, http.MethodGet, "/v1/events", nil, http.Header{"Accept": {"text/event-stream"}})
	if err != nil {
		return nil, err
	}
	if resp.StatusCode/100 != 2 {
		defer resp.Body.Close()
		return nil, c.answerError(resp)
	}
	return &EventStream{client: c, ctx: ctx, body: resp.Body}, nil
}

// Close ends the stream.
func (s *EventStream) Close() error { return s.body.Close() }

// All yields the events until the stream ends. It ends without an error when the daemon stops, and after an event of kind "dropped" when
// this reader was too slow; otherwise the last thing it yields is the error.
func (s *EventStream) All() iter.Seq2[Event, error] {
	return func(yield func(Event, error) bool) {
		lines := bufio.NewScanner(s.body)
		lines.Buffer(nil, maxEvent)
		for lines.Scan() {
			data, ok := bytes.CutPrefix(lines.Bytes(), []byte("data: "))
			if !ok {
				continue // the kind is in the data too; comments say nothing
			}
			var event Event
			if err := json.Unmarshal(data, &event); err != nil {
				yield(Event{}, &Error{Code: CodeUnexpected, Message: s.client.addr.String() + " sent an event that can't be read", Err: err})
				return
			}
			if !yield(event, nil) {
				return
			}
		}
		if err := lines.Err(); err != nil {
			yield(Event{}, s.client.unreachable(s.ctx, err))
		}
	}
}
