package server

import (
	"context"
	"crypto/sha256"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/forkd/forkd/internal/sandbox"
)

const forkBody = `{"snapshot_tag": "py"}`

func TestIdempotency(t *testing.T) {
	t.Parallel()
	t.Run("same key and body", func(t *testing.T) {
		t.Parallel()
		f := newFixture(t)
		first := f.do(t, "POST", "/v1/sandboxes", forkBody, "Idempotency-Key", "k")
		second := f.do(t, "POST", "/v1/sandboxes", forkBody, "Idempotency-Key", "k")
		if first.body != second.body || first.status != second.status || len(f.forks) != 1 {
			t.Errorf("%d forks; second = %d %s, want the first's %d %s", len(f.forks), second.status, second.body, first.status, first.body)
		}
		if second.header.Get("Idempotency-Replayed") != "true" || second.header.Get("X-Request-Id") == first.header.Get("X-Request-Id") {
			t.Errorf("headers of the second = %v", second.header)
		}
	})
	t.Run("another body", func(t *testing.T) {
		t.Parallel()
		f := newFixture(t)
		f.do(t, "POST", "/v1/sandboxes", forkBody, "Idempotency-Key", "k")
		got := f.do(t, "POST", "/v1/sandboxes", `{"snapshot_tag": "py", "n": 2}`, "Idempotency-Key", "k")
		if got.status != 422 || got.code() != "idempotency_key_reused" || len(f.forks) != 1 {
			t.Errorf("= %d %q after %d forks, want 422 idempotency_key_reused after 1", got.status, got.code(), len(f.forks))
		}
	})
	t.Run("another route", func(t *testing.T) {
		t.Parallel()
		f := newFixture(t)
		f.do(t, "POST", "/v1/sandboxes", forkBody, "Idempotency-Key", "k")
		if got := f.do(t, "POST", "/v1/images", `{"name": "py"}`, "Idempotency-Key", "k"); got.status != 201 {
			t.Errorf("= %d %s, want 201", got.status, got.body)
		}
	})
	t.Run("a failure is tried again", func(t *testing.T) {
		t.Parallel()
		f := newFixture(t)
		f.fail = &sandbox.Error{Code: sandbox.CodeQueueFull}
		if got := f.do(t, "POST", "/v1/sandboxes", forkBody, "Idempotency-Key", "k"); got.status != 503 {
			t.Fatalf("= %d, want 503", got.status)
		}
		f.fail = nil
		if got := f.do(t, "POST", "/v1/sandboxes", forkBody, "Idempotency-Key", "k"); got.status != 201 {
			t.Errorf("= %d, want 201", got.status)
		}
	})
	t.Run("a failed stream is tried again", func(t *testing.T) {
		t.Parallel()
		f := newFixture(t)
		body := `{"tag": "t", "image": "py", "stream": true}`
		f.fail = &sandbox.Error{Code: sandbox.CodeWarmUpFailed}
		f.do(t, "POST", "/v1/snapshots", body, "Idempotency-Key", "k")
		f.fail = nil
		f.do(t, "POST", "/v1/snapshots", body, "Idempotency-Key", "k")
		got := f.do(t, "POST", "/v1/snapshots", body, "Idempotency-Key", "k")
		if len(f.snaps) != 2 || !strings.Contains(got.body, `"event":"done"`) {
			t.Errorf("%d snapshots, want 2; last = %s", len(f.snaps), got.body)
		}
	})
	t.Run("a panic is tried again", func(t *testing.T) {
		t.Parallel()
		f := newFixture(t)
		f.fork = func(context.Context, sandbox.ForkRequest) ([]sandbox.ForkResult, error) { panic("a bug") }
		f.do(t, "POST", "/v1/sandboxes", forkBody, "Idempotency-Key", "k")
		f.fork = nil
		if got := f.do(t, "POST", "/v1/sandboxes", forkBody, "Idempotency-Key", "k"); got.status != 201 {
			t.Errorf("= %d, want 201", got.status)
		}
	})
}

// TestIdempotencyAtOnce holds that requests that come at the same time create once, also when the first client leaves.
func TestIdempotencyAtOnce(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	started, release := make(chan struct{}), make(chan struct{})
	f.fork = func(ctx context.Context, _ sandbox.ForkRequest) ([]sandbox.ForkResult, error) {
		close(started)
		<-release
		sb := stubSandbox(0)
		return []sandbox.ForkResult{{Sandbox: &sb}}, ctx.Err()
	}
	ctx, leave := context.WithCancel(t.Context())
	req, _ := http.NewRequestWithContext(ctx, "POST", f.http.URL+"/v1/sandboxes", strings.NewReader(forkBody))
	req.Header.Set("Idempotency-Key", "k")
	gone := make(chan struct{})
	go func() {
		defer close(gone)
		_, _ = http.DefaultClient.Do(req)
	}()
	<-started
	var wg sync.WaitGroup
	answers := make([]answer, 8)
	for i := range answers {
		wg.Go(func() { answers[i] = f.do(t, "POST", "/v1/sandboxes", forkBody, "Idempotency-Key", "k") })
	}
	leave()
	<-gone
	close(release)
	wg.Wait()
	for i, a := range answers {
		if a.status != 201 || a.body != answers[0].body {
			t.Errorf("answer %d = %d %s", i, a.status, a.body)
		}
	}
	if len(f.forks) != 1 || len(f.killed) != 0 {
		t.Errorf("%d forks, %d killed, want 1 and 0", len(f.forks), len(f.killed))
	}
}

func TestReplaysAreBounded(t *testing.T) {
	t.Parallel()
	now := stubTime
	c := newReplays(time.Minute, 3, 100)
	c.nowFunc = func() time.Time { return now }
	add := func(key string, size int) {
		e, mine := c.begin("acme", key, sha256.Sum256(nil))
		if !mine {
			t.Fatalf("%s is there already", key)
		}
		e.status, e.body = 201, make([]byte, size)
		c.finish(e, true)
	}
	has := func(key string) bool {
		_, ok := c.byKey["acme "+key]
		return ok
	}
	pending, _ := c.begin("acme", "pending", sha256.Sum256(nil))
	for i := range 4 {
		add("n"+strconv.Itoa(i), 1)
	}
	if has("n0") || !has("n3") || !has("pending") {
		t.Errorf("after too many: n0 %v, n3 %v, pending %v, want the oldest finished ones gone", has("n0"), has("n3"), has("pending"))
	}
	add("large", 100)
	if has("n3") || !has("large") {
		t.Errorf("after too much: n3 %v, large %v", has("n3"), has("large"))
	}
	now = now.Add(2 * time.Minute)
	add("late", 1)
	if has("large") || !has("late") {
		t.Errorf("after the window: large %v, late %v", has("large"), has("late"))
	}
	c.finish(pending, false)
	of := c.tenants["acme"]
	if has("pending") || of.bytes != 1 || of.order.Len() != 1 {
		t.Errorf("left: %d bytes, %d entries, want 1 and 1", of.bytes, of.order.Len())
	}
	for i := range 10 { // of another tenant
		e, _ := c.begin("rival", strconv.Itoa(i), sha256.Sum256(nil))
		e.status, e.body = 201, make([]byte, 90)
		c.finish(e, true)
	}
	if !has("late") {
		t.Error("another tenant's answers pushed it out")
	}
}
