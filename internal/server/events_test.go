package server

import (
	"bufio"
	"context"
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/forkd/forkd/internal/sandbox"
)

// listen opens the stream of events and returns its lines; it is open when listen returns.
func (f *fixture) listen(t *testing.T) *bufio.Scanner {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	t.Cleanup(cancel)
	req, err := http.NewRequestWithContext(ctx, "GET", f.http.URL+"/v1/events", nil)
	if err != nil {
		t.Fatal(err)
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { resp.Body.Close() })
	if kind := resp.Header.Get("Content-Type"); resp.StatusCode != 200 || kind != "text/event-stream" {
		t.Fatalf("= %d %s", resp.StatusCode, kind)
	}
	lines := bufio.NewScanner(resp.Body)
	if !lines.Scan() || !strings.HasPrefix(lines.Text(), ":") || !lines.Scan() {
		t.Fatalf("first line = %q, %v, want a comment", lines.Text(), lines.Err())
	}
	return lines
}

func TestEvents(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	first, second := f.listen(t), f.listen(t)
	f.server.Events.Publish(sandbox.Event{Tenant: sandbox.DefaultTenant, Time: stubTime, Kind: sandbox.EventSandboxState, SandboxID: "sb0", Tag: "py", State: sandbox.StateFailed, Reason: "line\nbreak"})
	f.server.Events.Publish(sandbox.Event{Tenant: sandbox.DefaultTenant, Time: stubTime, Kind: sandbox.EventSnapshotReady, Tag: "b1"})
	f.server.Events.Publish(sandbox.Event{Tenant: "acme", Time: stubTime, Kind: sandbox.EventSnapshotReady, Tag: "theirs"})
	f.server.Events.Publish(sandbox.Event{Time: stubTime, Kind: sandbox.EventSnapshotReady, Tag: "nobody's"})
	f.server.Events.Close()
	for _, lines := range []*bufio.Scanner{first, second} {
		var got []string
		for lines.Scan() {
			got = append(got, lines.Text())
		}
		want := []string{
			"event: sandbox_state",
			`data: {"kind":"sandbox_state","reason":"line\nbreak","sandbox_id":"sb0","state":"failed","tag":"py","time_unix_ms":1767323045000}`, "",
			"event: snapshot_ready", `data: {"kind":"snapshot_ready","tag":"b1","time_unix_ms":1767323045000}`, "",
		}
		if diff := cmp.Diff(want, got); diff != "" || lines.Err() != nil {
			t.Errorf("%v, stream (-want +got):\n%s", lines.Err(), diff)
		}
	}
}

// TestSlowReaderOfEvents holds that a reader which does not keep up gets what fits, a word of it, and the end; nobody waits for it.
func TestSlowReaderOfEvents(t *testing.T) {
	t.Parallel()
	e := NewEvents()
	slow, err := e.listen("a")
	if err != nil {
		t.Fatal(err)
	}
	quick, err := e.listen("a")
	if err != nil {
		t.Fatal(err)
	}
	for range eventBuffer + 5 {
		e.Publish(sandbox.Event{Tenant: "a", Kind: sandbox.EventPool})
		<-quick.events
	}
	n := 0
	for range slow.events {
		n++
	}
	if n != eventBuffer || !slow.dropped || quick.dropped {
		t.Errorf("the slow one got %d events, dropped %v; the quick one dropped %v", n, slow.dropped, quick.dropped)
	}
	e.leave(slow) // again
	e.leave(quick)
	e.Publish(sandbox.Event{})
	e.Close()
}

func TestDroppedReaderIsTold(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	lines := f.listen(t)
	for l := range f.server.Events.listeners { // it is the only one, and the handler waits
		f.server.Events.mu.Lock()
		l.dropped = true
		f.server.Events.endLocked(l)
		f.server.Events.mu.Unlock()
	}
	if !lines.Scan() || lines.Text() != "event: dropped" || !lines.Scan() || !strings.Contains(lines.Text(), "1024 events behind") {
		t.Errorf("last = %q", lines.Text())
	}
}

func TestListenersAreBounded(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	for range maxListenersOf {
		if _, err := f.server.Events.listen(sandbox.DefaultTenant); err != nil {
			t.Fatal(err)
		}
	}
	if got := f.do(t, "GET", "/v1/events", ""); got.status != 503 || got.code() != "queue_full" {
		t.Errorf("= %d %s, want 503 queue_full", got.status, got.body)
	}
	for i := range maxListeners - maxListenersOf { // other tenants are not kept out by that
		if _, err := f.server.Events.listen(fmt.Sprint("t", i)); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := f.server.Events.listen("one more"); sandbox.CodeOf(err) != sandbox.CodeQueueFull {
		t.Errorf("one more than may be: %v, want queue_full", err)
	}
}

// TestListenersDoNotHoldUpAStop holds that a daemon which stops does not wait for those who listen.
func TestListenersDoNotHoldUpAStop(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	l, err := ListenTCP("127.0.0.1:0", Protection{})
	if err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(t.Context())
	served := make(chan error, 1)
	go func() { served <- f.server.Serve(ctx, nil, l, time.Hour) }()
	f.http.URL = "http://" + l.Addr().String()
	lines := f.listen(t)
	stop()
	for lines.Scan() {
	}
	select {
	case err := <-served:
		if err != nil {
			t.Error(err)
		}
	case <-time.After(20 * time.Second):
		t.Error("the server still runs")
	}
}
