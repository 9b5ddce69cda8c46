package server

import (
	"context"
	"encoding/json"
	"net/http"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/forkd/forkd/api"
	"github.com/forkd/forkd/internal/keys"
	"github.com/forkd/forkd/internal/sandbox"
	"github.com/forkd/forkd/internal/store"
)

// newRing returns a ring over a database of its own.
func newRing(t *testing.T, limit keys.Limit) *keys.Ring {
	t.Helper()
	db, err := store.Open(filepath.Join(t.TempDir(), "db"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = db.Close() })
	ring, err := keys.Open(t.Context(), db, limit)
	if err != nil {
		t.Fatal(err)
	}
	return ring
}

func newKey(t *testing.T, ring *keys.Ring, q keys.Request) (keys.Key, string) {
	t.Helper()
	key, token, err := ring.Create(t.Context(), q)
	if err != nil {
		t.Fatal(err)
	}
	return key, token
}

// A daemon without keys answers this host; from the first key on it wants one, and gives what that is good for.
func TestFirstKey(t *testing.T) {
	t.Parallel()
	ring := newRing(t, keys.Limit{})
	f := newFixture(t, func(c *Config) { c.Keys = ring })
	if got := f.do(t, "GET", "/v1/sandboxes", ""); got.status != 200 {
		t.Errorf("before the first key = %d %s", got.status, got.body)
	}
	got := f.do(t, "POST", "/v1/keys", `{"name": "first", "scope": "run", "tenant": "acme"}`)
	var made api.NewKey
	if err := json.Unmarshal([]byte(got.body), &made); err != nil || got.status != 201 || got.header.Get("Cache-Control") != "no-store" {
		t.Fatalf("create = %d %s", got.status, got.body)
	}
	if got := f.do(t, "GET", "/v1/sandboxes", ""); got.status != 401 || got.code() != "unauthorized" {
		t.Errorf("without it = %d %s, want 401", got.status, got.body)
	}
	auth := []string{"Authorization", "Bearer " + made.Token}
	if got := f.do(t, "GET", "/v1/sandboxes", "", auth...); got.status != 200 {
		t.Errorf("with it = %d %s", got.status, got.body)
	}
	if got := f.do(t, "GET", "/v1/keys", "", auth...); got.status != 403 || got.code() != "forbidden" {
		t.Errorf("keys with scope run = %d %s, want 403", got.status, got.body)
	}
	if _, err := ring.Revoke(t.Context(), "", made.Key.ID); err != nil {
		t.Fatal(err)
	}
	if got := f.do(t, "GET", "/v1/sandboxes", "", auth...); got.status != 401 || !strings.Contains(got.body, "revoked") {
		t.Errorf("revoked = %d %s, want 401", got.status, got.body)
	}
}

// What a key has under way ends when it is revoked.
func TestRevokeEndsRequests(t *testing.T) {
	t.Parallel()
	ring := newRing(t, keys.Limit{})
	key, token := newKey(t, ring, keys.Request{Name: "k", Tenant: "acme", Scope: keys.Run})
	f := newFixture(t, func(c *Config) { c.Keys = ring })
	begun := make(chan struct{})
	f.exec = func(ctx context.Context, _ sandbox.ExecRequest) (sandbox.ExecResult, error) {
		close(begun)
		<-ctx.Done()
		return sandbox.ExecResult{}, ctx.Err()
	}
	answers := make(chan answer, 1)
	go func() {
		answers <- f.do(t, "POST", "/v1/sandboxes/sb1/exec", `{"args": ["sleep"]}`, "Authorization", "Bearer "+token)
	}()
	<-begun
	if _, err := ring.Revoke(t.Context(), "acme", key.ID); err != nil {
		t.Fatal(err)
	}
	if got := <-answers; got.status != 401 || !strings.Contains(got.body, "the key was revoked") {
		t.Errorf("= %d %s, want 401", got.status, got.body)
	}
}

// A limited key makes no unlimited ones.
func TestKeysOfLimitedKeys(t *testing.T) {
	t.Parallel()
	ring := newRing(t, keys.Limit{})
	_, token := newKey(t, ring, keys.Request{Name: "admin", Tenant: "acme", Scope: keys.Admin, MaxSandboxes: 3, Rate: 1000})
	f := newFixture(t, func(c *Config) { c.Keys = ring })
	auth := []string{"Authorization", "Bearer " + token}
	if got := f.do(t, "POST", "/v1/keys", `{"name": "a", "scope": "run"}`, auth...); got.status != 201 || !strings.Contains(got.body, `"max_sandboxes":3`) || !strings.Contains(got.body, `"rate_per_sec":1000`) {
		t.Errorf("nothing said = %d %s, want its own limits", got.status, got.body)
	}
	for _, more := range []string{`"max_sandboxes": 4`, `"rate_per_sec": 1001`} {
		if got := f.do(t, "POST", "/v1/keys", `{"name": "b", "scope": "run", `+more+`}`, auth...); got.status != 403 || got.code() != "forbidden" {
			t.Errorf("%s = %d %s, want 403", more, got.status, got.body)
		}
	}
}

// Administrators of a tenant make and see its keys, and nobody else's.
func TestKeysOfTenants(t *testing.T) {
	t.Parallel()
	ring := newRing(t, keys.Limit{})
	_, acme := newKey(t, ring, keys.Request{Name: "admin", Tenant: "acme", Scope: keys.Admin})
	other, _ := newKey(t, ring, keys.Request{Name: "admin", Tenant: "rival", Scope: keys.Admin})
	f := newFixture(t, func(c *Config) { c.Keys = ring })
	auth := []string{"Authorization", "Bearer " + acme}
	if got := f.do(t, "POST", "/v1/keys", `{"name": "ci", "scope": "admin"}`, auth...); got.status != 201 || !strings.Contains(got.body, `"tenant":"acme"`) {
		t.Errorf("own = %d %s", got.status, got.body)
	}
	if got := f.do(t, "POST", "/v1/keys", `{"name": "ci", "scope": "read"}`, auth...); got.status != 409 || got.code() != "key_exists" {
		t.Errorf("again = %d %s", got.status, got.body)
	}
	if got := f.do(t, "POST", "/v1/keys", `{"name": "x", "scope": "read", "tenant": "rival"}`, auth...); got.status != 403 {
		t.Errorf("another tenant's = %d %s", got.status, got.body)
	}
	theirs, unknown := f.do(t, "DELETE", "/v1/keys/"+other.ID, "", auth...), f.do(t, "DELETE", "/v1/keys/0123456789ab", "", auth...)
	if theirs.status != 404 || unknown.status != 404 || theirs.code() != "key_not_found" {
		t.Errorf("revoke another tenant's = %d %s, want 404 as for an unknown one %s", theirs.status, theirs.body, unknown.body)
	}
	if got := f.do(t, "GET", "/v1/keys", "", auth...); strings.Contains(got.body, "rival") || strings.Contains(got.body, "hash") || strings.Contains(got.body, "fk_") {
		t.Errorf("list = %s", got.body)
	}
	for _, bad := range []string{`{"name": "", "scope": "run"}`, `{"name": "a b", "scope": "run"}`, `{"name": "a", "scope": "root"}`, `{"name": "a", "scope": "run", "tenant": "../x"}`,
		`{"name": "a", "scope": "run", "expires_at_unix": 1}`, `{"name": "a", "scope": "run", "expires_at_unix": 99999999999999}`, `{"name": "a", "scope": "run", "rate_per_sec": -1}`} {
		if got := f.do(t, "POST", "/v1/keys", bad, auth...); got.status != 400 && got.status != 403 {
			t.Errorf("%s = %d %s", bad, got.status, got.body)
		}
	}
}

func TestRateLimit(t *testing.T) {
	t.Parallel()
	ring := newRing(t, keys.Limit{Rate: 0.001, Burst: 2})
	_, slow := newKey(t, ring, keys.Request{Name: "slow", Tenant: "acme", Scope: keys.Read})
	_, own := newKey(t, ring, keys.Request{Name: "own", Tenant: "acme", Scope: keys.Read, Rate: 1e6})
	f := newFixture(t, func(c *Config) {
		c.Keys, c.Token, c.KeyRate = ring, "0123456789abcdef", keys.Limit{Rate: 0.001, Burst: 1}
	})
	get := func(token string) answer {
		return f.do(t, "GET", "/v1/sandboxes", "", "Authorization", "Bearer "+token)
	}
	for i := range 2 {
		if got := get(slow); got.status != 200 {
			t.Errorf("request %d = %d %s", i, got.status, got.body)
		}
	}
	if got := get(slow); got.status != 429 || got.code() != "rate_limited" || got.header.Get("Retry-After") == "" {
		t.Errorf("one more = %d %s Retry-After %q, want 429", got.status, got.body, got.header.Get("Retry-After"))
	}
	for range 5 {
		if got := get(own); got.status != 200 {
			t.Errorf("a key with a rate of its own = %d %s", got.status, got.body)
		}
	}
	if first, second := get("0123456789abcdef"), get("0123456789abcdef"); first.status != 200 || second.status != 429 {
		t.Errorf("the token = %d, then %d, want 200 and 429", first.status, second.status)
	}
}

// An Idempotency-Key is its owner's: nobody gets what somebody else was answered.
func TestIdempotencyKeysAreTheirOwners(t *testing.T) {
	t.Parallel()
	ring := newRing(t, keys.Limit{})
	_, one := newKey(t, ring, keys.Request{Name: "a", Tenant: "acme", Scope: keys.Run})
	_, two := newKey(t, ring, keys.Request{Name: "a", Tenant: "rival", Scope: keys.Run})
	f := newFixture(t, func(c *Config) { c.Keys = ring })
	for _, token := range []string{one, two} {
		got := f.do(t, "POST", "/v1/sandboxes", forkBody, "Authorization", "Bearer "+token, "Idempotency-Key", "same")
		if got.status != 201 || got.header.Get("Idempotency-Replayed") != "" {
			t.Errorf("= %d replayed %q", got.status, got.header.Get("Idempotency-Replayed"))
		}
	}
}

// A route that does not say what it needs lets nobody in.
func TestRoutesSayWhatTheyNeed(t *testing.T) {
	t.Parallel()
	if err := access("").allowed(operator("root")); err == nil {
		t.Error("a route that says nothing is open")
	}
	f := newFixture(t)
	c := loadContract(t)
	for _, rt := range f.server.routes() {
		item := c.doc.Paths.Value(rt.path)
		if item == nil || item.GetOperation(rt.method) == nil {
			t.Errorf("%s %s is not in openapi.yaml", rt.method, rt.path)
			continue
		}
		if want := item.GetOperation(rt.method).Extensions["x-forkd-access"]; want != string(rt.access) {
			t.Errorf("%s %s needs %q, openapi.yaml says %q", rt.method, rt.path, rt.access, want)
		}
	}
}

func TestAccess(t *testing.T) {
	t.Parallel()
	host := sandbox.DefaultTenant
	for _, tt := range []struct {
		access access
		tenant string
		scope  keys.Scope
		want   bool
	}{
		{accessOpen, "", "", true},
		{accessRead, host, "", false}, {accessRead, host, keys.Read, true}, {accessRead, "acme", keys.Run, true}, {accessRead, "acme", "root", false},
		{accessRun, host, keys.Read, false}, {accessRun, "acme", keys.Run, true}, {accessRun, "acme", keys.Admin, true},
		{accessAdmin, "acme", keys.Run, false}, {accessAdmin, "acme", keys.Admin, true},
		{accessHostRead, "acme", keys.Admin, false}, {accessHostRead, host, keys.Read, true}, {accessHostRead, host, "", false},
		{accessHostAdmin, "acme", keys.Admin, false}, {accessHostAdmin, host, keys.Run, false}, {accessHostAdmin, host, keys.Admin, true},
	} {
		if err := tt.access.allowed(principal{tenant: tt.tenant, scope: tt.scope}); (err == nil) != tt.want {
			t.Errorf("%s for %s of %s: %v, want allowed %v", tt.access, tt.scope, tt.tenant, err, tt.want)
		}
	}
}

// Peers of the Unix socket are who the kernel says.
func TestPeers(t *testing.T) {
	t.Parallel()
	f := newFixture(t, func(c *Config) { c.Socket = SocketAccess{Group: 700, Scope: keys.Run} })
	for _, tt := range []struct {
		name  string
		peer  any
		scope keys.Scope
	}{
		{"root", peer{uid: 0}, keys.Admin}, {"a member", peer{uid: 5, groups: []uint32{5, 700}}, keys.Run}, {"somebody else", peer{uid: 5, groups: []uint32{5}}, ""}, {"unknown", nil, ""},
	} {
		req, _ := newRequestAs(t.Context(), tt.peer)
		who, err := f.server.identify(req, true)
		if who.scope != tt.scope || (err == nil) != (tt.scope != "") {
			t.Errorf("%s: scope %q, %v, want %q", tt.name, who.scope, err, tt.scope)
		}
	}
	f.server.Socket = SocketAccess{}
	req, _ := newRequestAs(t.Context(), peer{uid: 5, groups: []uint32{0, 700}})
	if who, err := f.server.identify(req, true); err == nil || who.scope != "" {
		t.Errorf("without --socket-group: %q, %v, want nobody", who.scope, err)
	}
}

// contractKey is the id of the key that TestContract revokes.
var contractKey = "0123456789ab"

// withKeys gives a server a ring with one key, contractKey, that was made long ago.
func withKeys(t *testing.T) func(*Config) {
	t.Helper()
	db, err := store.Open(filepath.Join(t.TempDir(), "db"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = db.Close() })
	if err := db.AddKey(t.Context(), store.Key{ID: contractKey, Name: "c", Tenant: "acme", Scope: "run", CreatedAt: time.Unix(1, 0)}); err != nil {
		t.Fatal(err)
	}
	ring, err := keys.Open(t.Context(), db, keys.Limit{})
	if err != nil {
		t.Fatal(err)
	}
	return func(c *Config) { c.Keys, c.Token = ring, "0123456789abcdef" }
}

// newRequestAs is a request that came from a peer.
func newRequestAs(ctx context.Context, p any) (*http.Request, error) {
	if p != nil {
		ctx = context.WithValue(ctx, peerKey{}, p)
	}
	return http.NewRequestWithContext(ctx, "GET", "http://forkd/v1/sandboxes", nil)
}
