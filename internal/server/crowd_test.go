package server

import (
	"context"
	"net/http"
	"strings"
	"testing"

	"github.com/forkd/forkd/internal/keys"
	"github.com/forkd/forkd/internal/sandbox"
)

// TestCrowd: a tenant that has as much under way as it may waits for itself, and nobody else does.
func TestCrowd(t *testing.T) {
	t.Parallel()
	ring := newRing(t, keys.Limit{})
	_, acme := newKey(t, ring, keys.Request{Name: "a", Tenant: "acme", Scope: keys.Run})
	_, second := newKey(t, ring, keys.Request{Name: "b", Tenant: "acme", Scope: keys.Run})
	_, rival := newKey(t, ring, keys.Request{Name: "c", Tenant: "rival", Scope: keys.Run})
	f := newFixture(t, func(c *Config) { c.Keys, c.Token = ring, "0123456789abcdef" })
	f.server.atOnce.max = 3
	begun, release := make(chan struct{}), make(chan struct{})
	f.exec = func(ctx context.Context, _ sandbox.ExecRequest) (sandbox.ExecResult, error) {
		begun <- struct{}{}
		<-release
		return sandbox.ExecResult{}, nil
	}
	done := make(chan answer, 3)
	exec := func(token string) answer {
		return f.do(t, "POST", "/v1/sandboxes/sb1/exec", `{"args": ["sleep"]}`, "Authorization", "Bearer "+token)
	}
	for range 3 {
		go func() { done <- exec(acme) }()
		<-begun
	}
	for _, token := range []string{acme, second} {
		if got := f.do(t, "GET", "/v1/sandboxes", "", "Authorization", "Bearer "+token); got.status != 429 || got.code() != "rate_limited" || got.header.Get("Retry-After") == "" {
			t.Errorf("one too many = %d %s", got.status, got.body)
		}
	}
	for name, token := range map[string]string{"another tenant": rival, "an operator": f.server.Token} {
		if got := f.do(t, "GET", "/v1/sandboxes", "", "Authorization", "Bearer "+token); got.status != 200 {
			t.Errorf("%s = %d %s", name, got.status, got.body)
		}
	}
	close(release)
	for range 3 {
		if got := <-done; got.status != 200 {
			t.Errorf("= %d %s", got.status, got.body)
		}
	}
	if got := f.do(t, "GET", "/v1/sandboxes", "", "Authorization", "Bearer "+acme); got.status != 200 {
		t.Errorf("afterwards = %d %s", got.status, got.body)
	}
}

// Jobs that read or write whole snapshots are few at a time.
func TestJobs(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	who := principal{tenant: "acme", caller: sandbox.Caller{Tenant: "acme", KeyID: "k"}}
	for range maxJobs {
		if _, err := f.server.jobs.enter(who); err != nil {
			t.Fatal(err)
		}
	}
	ring := newRing(t, keys.Limit{})
	_, token := newKey(t, ring, keys.Request{Name: "a", Tenant: "acme", Scope: keys.Admin})
	f.server.Keys = ring
	for method, paths := range map[string][]string{
		http.MethodGet:  {"/v1/snapshots/py/pack"},
		http.MethodPost: {"/v1/snapshots/py/verify", "/v1/snapshots/py/compact", "/v1/snapshots/unpack"},
	} {
		for _, path := range paths {
			if got := f.do(t, method, path, "", "Authorization", "Bearer "+token); got.status != 429 || !strings.Contains(got.body, "jobs") {
				t.Errorf("%s = %d %s", path, got.status, got.body)
			}
		}
	}
}

// TestBodies: what a tenant's requests hold in memory is bounded in all, and given back when they end, or are refused.
func TestBodies(t *testing.T) {
	t.Parallel()
	ring := newRing(t, keys.Limit{})
	_, acme := newKey(t, ring, keys.Request{Name: "a", Tenant: "acme", Scope: keys.Run})
	_, rival := newKey(t, ring, keys.Request{Name: "b", Tenant: "rival", Scope: keys.Run})
	f := newFixture(t, func(c *Config) { c.Keys, c.Token = ring, "0123456789abcdef" })
	f.server.bodies.max = 2000
	begun, release := make(chan struct{}, 1), make(chan struct{})
	f.exec = func(ctx context.Context, _ sandbox.ExecRequest) (sandbox.ExecResult, error) {
		begun <- struct{}{}
		<-release
		return sandbox.ExecResult{}, nil
	}
	body := `{"args": ["cat"], "stdin": "` + strings.Repeat("x", 1500) + `"}`
	exec := func(token, body string) answer {
		return f.do(t, "POST", "/v1/sandboxes/sb1/exec", body, "Authorization", "Bearer "+token)
	}
	done := make(chan answer, 3)
	go func() { done <- exec(acme, body) }()
	<-begun
	if got := exec(acme, body); got.status != 429 || got.code() != "rate_limited" || !strings.Contains(got.body, "bytes") {
		t.Errorf("more than a tenant may hold = %d %s", got.status, got.body)
	}
	for _, token := range []string{rival, f.server.Token} {
		go func() { done <- exec(token, body) }()
		<-begun
	}
	close(release)
	for range 3 {
		if got := <-done; got.status != 200 {
			t.Errorf("= %d %s", got.status, got.body)
		}
	}
	if got := exec(acme, body[1:]); got.status != 400 {
		t.Errorf("no JSON = %d %s", got.status, got.body)
	}
	if got := exec(acme, body); got.status != 200 {
		t.Errorf("afterwards = %d %s", got.status, got.body)
	}
	f.http.Close()
	if len(f.server.bodies.by) > 0 {
		t.Errorf("still counted: %v", f.server.bodies.by)
	}
}
