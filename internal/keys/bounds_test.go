package keys

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"testing"
	"time"

	"github.com/forkd/forkd/internal/store"
)

// TestBeyond: a key makes none that may do more than itself.
func TestBeyond(t *testing.T) {
	r := ring(t, filepath.Join(t.TempDir(), "db")) // 10 requests a second, 20 at once
	limited := &Key{ID: "k1", Name: "limited", Tenant: "acme", MaxSandboxes: 5, Rate: 4, Burst: 3}
	for i, c := range []struct {
		name string
		by   *Key
		ask  Request
		want Request // the limits
		err  error
	}{
		{"nothing said", limited, Request{}, Request{MaxSandboxes: 5, Rate: 4, Burst: 3}, nil},
		{"less", limited, Request{MaxSandboxes: 2, Rate: 1, Burst: 1}, Request{MaxSandboxes: 2, Rate: 1, Burst: 1}, nil},
		{"a burst that follows from the rate", limited, Request{Rate: 3}, Request{MaxSandboxes: 5, Rate: 3, Burst: 3}, nil},
		{"more sandboxes", limited, Request{MaxSandboxes: 6}, Request{}, ErrBeyond},
		{"more requests", limited, Request{Rate: 5}, Request{}, ErrBeyond},
		{"more at once", limited, Request{Rate: 4, Burst: 4}, Request{}, ErrBeyond},
		{"more than the default", &Key{Name: "plain", Tenant: "acme"}, Request{Rate: 11}, Request{}, ErrBeyond},
		{"the default", &Key{Name: "plain", Tenant: "acme"}, Request{}, Request{}, nil},
		{"the host's administrator", &Key{Name: "root", Tenant: "default"}, Request{MaxSandboxes: 9, Rate: 99, Burst: 9}, Request{MaxSandboxes: 9, Rate: 99, Burst: 9}, nil},
		{"the host's administrator with limits", &Key{Name: "root", Tenant: "default", Rate: 2}, Request{Rate: 3}, Request{}, ErrBeyond},
		{"nobody's key", nil, Request{Rate: 99}, Request{Rate: 99}, nil},
	} {
		c.ask.Name, c.ask.Tenant, c.ask.Scope, c.ask.By = fmt.Sprintf("n%d", i), "acme", Admin, c.by
		k, _, err := r.Create(t.Context(), c.ask)
		if !errors.Is(err, c.err) || k.MaxSandboxes != c.want.MaxSandboxes || k.Rate != c.want.Rate || k.Burst != c.want.Burst {
			t.Errorf("%s: got %+v, %v, want %+v, %v", c.name, k, err, c.want, c.err)
		}
	}
}

// TestManyKeys: a tenant's keys are bounded, and so are those that are remembered though they are good for nothing.
func TestManyKeys(t *testing.T) {
	path := filepath.Join(t.TempDir(), "db")
	r := ring(t, path)
	r.most = 2
	make := func(name, tenant string) (Key, error) {
		k, _, err := r.Create(t.Context(), Request{Name: name, Tenant: tenant, Scope: Run})
		return k, err
	}
	for i := range 5 {
		k, err := make(fmt.Sprintf("n%d", i), "acme")
		if err == nil {
			_, err = r.Revoke(t.Context(), "acme", k.ID)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	for _, name := range []string{"a", "b"} {
		if _, err := make(name, "acme"); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := make("c", "acme"); !errors.Is(err, ErrTooMany) {
		t.Errorf("a third key of two: got %v, want ErrTooMany", err)
	}
	if _, err := make("c", "rival"); err != nil {
		t.Errorf("a key of another tenant: %v", err)
	}
	for _, r := range []*Ring{r, ring(t, path)} {
		var names []string
		for _, k := range r.List("acme") {
			names = append(names, k.Name)
		}
		if got := fmt.Sprint(names); got != "[n3 n4 a b]" {
			t.Errorf("keys: got %s, want [n3 n4 a b]", got)
		}
	}
}

// slowRecords take as long as they are told to.
type slowRecords struct {
	records
	asked, answer chan struct{}
}

func (s slowRecords) AddKey(ctx context.Context, k store.Key) error {
	s.asked <- struct{}{}
	<-s.answer
	return s.records.AddKey(ctx, k)
}

func (s slowRecords) RevokeKey(ctx context.Context, id string, at time.Time) error {
	s.asked <- struct{}{}
	<-s.answer
	return s.records.RevokeKey(ctx, id, at)
}

// TestChecksGoOn: requests are let in while a change waits for the database.
func TestChecksGoOn(t *testing.T) {
	r := ring(t, filepath.Join(t.TempDir(), "db"))
	k, token, err := r.Create(t.Context(), Request{Name: "a", Tenant: "acme", Scope: Run})
	if err != nil {
		t.Fatal(err)
	}
	slow := slowRecords{records: r.db, asked: make(chan struct{}), answer: make(chan struct{})}
	r.db = slow
	made := make(chan error)
	for name, change := range map[string]func() error{
		"Create": func() error {
			_, _, err := r.Create(context.Background(), Request{Name: "b", Tenant: "acme", Scope: Run})
			return err
		},
		"Revoke": func() error { _, err := r.Revoke(context.Background(), "acme", k.ID); return err },
	} {
		go func() { made <- change() }()
		<-slow.asked
		if !r.mu.TryRLock() {
			t.Fatalf("%s: requests wait for the database", name)
		}
		r.mu.RUnlock()
		if _, err := r.Check(token); err != nil && name == "Revoke" {
			t.Errorf("%s: a key that is not revoked yet: %v", name, err)
		}
		slow.answer <- struct{}{}
		if err := <-made; err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
}
