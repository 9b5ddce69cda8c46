package keys

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/forkd/forkd/internal/store"
)

// ring opens a ring over the database in a file.
func ring(t *testing.T, path string) *Ring {
	t.Helper()
	db, err := store.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = db.Close() })
	r, err := Open(t.Context(), db, Limit{Rate: 10})
	if err != nil {
		t.Fatal(err)
	}
	return r
}

func TestRing(t *testing.T) {
	path := filepath.Join(t.TempDir(), "db")
	r := ring(t, path)
	if r.Any() {
		t.Error("an empty ring has keys")
	}
	now := time.Now()
	r.now = func() time.Time { return now }
	k, token, err := r.Create(t.Context(), Request{Name: "ci", Tenant: "acme", Scope: Run, ExpiresAt: now.Add(time.Hour)})
	if err != nil || !tokenPattern.MatchString(token) || !strings.HasPrefix(token, "fk_"+k.ID+"_") {
		t.Fatalf("Create: %+v %q %v", k, token, err)
	}
	_, other, err := r.Create(t.Context(), Request{Name: "ci", Tenant: "rival", Scope: Admin, Rate: 3, Burst: 1})
	if err != nil {
		t.Fatalf("the same name for another tenant: %v", err)
	}
	if _, _, err := r.Create(t.Context(), Request{Name: "ci", Tenant: "acme", Scope: Read}); !errors.Is(err, ErrExists) {
		t.Errorf("the same name again: %v, want ErrExists", err)
	}
	got, err := r.Check(token)
	if err != nil || got.ID != k.ID || got.Tenant != "acme" || got.Scope != Run || got.Limiter.Burst() != 20 {
		t.Errorf("Check: %+v, %v", got, err)
	}
	if o, err := r.Check(other); err != nil || o.Limiter.Burst() != 1 || o.Limiter.Limit() != 3 {
		t.Errorf("Check of one with limits of its own: %+v, %v", o, err)
	}
	secret := strings.TrimPrefix(token, "fk_"+k.ID+"_")
	for _, bad := range []string{"", "fk_", token[:len(token)-1], token + "0", strings.ToUpper(token), "fk_000000000000_" + secret, "fk_" + k.ID + "_" + strings.Repeat("0", 64),
		strings.Replace(other, other[:15], token[:15], 1)} {
		if _, err := r.Check(bad); !errors.Is(err, ErrUnknown) {
			t.Errorf("Check(%q) = %v, want ErrUnknown", bad, err)
		}
	}
	data, err := os.ReadFile(path + "-wal")
	if err != nil {
		t.Fatal(err)
	}
	if strings.Contains(string(data), secret) {
		t.Error("the secret of a key is on disk")
	}
	now = now.Add(time.Hour)
	if got, err := r.Check(token); !errors.Is(err, ErrExpired) || got.ID != k.ID {
		t.Errorf("at its end: %+v, %v, want ErrExpired", got, err)
	}
}

func TestRevoke(t *testing.T) {
	path := filepath.Join(t.TempDir(), "db")
	r := ring(t, path)
	k, token, err := r.Create(t.Context(), Request{Name: "ci", Tenant: "acme", Scope: Run})
	if err != nil {
		t.Fatal(err)
	}
	live, err := r.Check(token)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := r.Revoke(t.Context(), "rival", k.ID); !errors.Is(err, ErrNotFound) || live.Life.Err() != nil {
		t.Errorf("by another tenant: %v, want ErrNotFound", err)
	}
	if gone, err := r.Revoke(t.Context(), "acme", k.ID); err != nil || gone.RevokedAt.IsZero() {
		t.Errorf("Revoke: %+v, %v", gone, err)
	}
	if live.Life.Err() == nil {
		t.Error("what has it under way goes on")
	}
	if _, err := r.Revoke(t.Context(), "", k.ID); err != nil {
		t.Errorf("again: %v", err)
	}
	again := ring(t, path)
	for _, r := range []*Ring{r, again} {
		if _, err := r.Check(token); !errors.Is(err, ErrRevoked) || !r.Any() || len(r.List("acme")) != 1 || len(r.List("rival")) != 0 {
			t.Errorf("afterwards: %v, want ErrRevoked", err)
		}
	}
	if _, _, err := again.Create(t.Context(), Request{Name: "ci", Tenant: "acme", Scope: Run}); err != nil {
		t.Errorf("its name is not free: %v", err)
	}
}

func TestRequestsAreChecked(t *testing.T) {
	r := ring(t, filepath.Join(t.TempDir(), "db"))
	good := Request{Name: "a", Tenant: "b", Scope: Read}
	for what, spoil := range map[string]func(*Request){
		"no name": func(q *Request) { q.Name = "" }, "name": func(q *Request) { q.Name = "a\nb" }, "tenant": func(q *Request) { q.Tenant = "A/b" },
		"everybody": func(q *Request) { q.Tenant = "*" }, "scope": func(q *Request) { q.Scope = "root" }, "end": func(q *Request) { q.ExpiresAt = time.Unix(1, 0) },
		"negative": func(q *Request) { q.MaxSandboxes = -1 }, "rate": func(q *Request) { q.Rate = -1 }, "burst alone": func(q *Request) { q.Burst = 3 },
	} {
		q := good
		spoil(&q)
		if _, _, err := r.Create(t.Context(), q); !errors.Is(err, ErrInvalid) {
			t.Errorf("%s: %v, want ErrInvalid", what, err)
		}
	}
	if Scope("").Covers("") || Scope("root").Covers(Read) || Run.Covers("") || !Admin.Covers(Read) || Read.Covers(Run) {
		t.Error("scopes cover what they should not, or not what they should")
	}
}
