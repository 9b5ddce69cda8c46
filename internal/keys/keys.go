// Package keys holds the API keys of a daemon: it makes them, tells whose one is and what it is good for, and revokes them.
//
// A key is "fk_", the 12 hexadecimal digits of its id, "_", and 64 of its secret. It is shown once, when it is made: what is kept is its
// SHA-256, which is enough for a secret of 256 random bits. The id is no secret: it stands in records and lists, and finds the digest to compare
// with, in constant time. All keys are in memory: a revoked one is refused from the next request on, and what it has under way is ended
// (Key.Life).
//
// The package is not for what a key may do in each route (internal/server) nor for whose things are whose (internal/sandbox).
package keys

import (
	"cmp"
	"context"
	"crypto/rand"
	"crypto/sha256"
	"crypto/subtle"
	"encoding/hex"
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/time/rate"

	"github.com/forkd/forkd/internal/store"
)

// Scope is what a key is good for. Each has all that the one before has.
type Scope string

// Scopes.
const (
	Read  Scope = "read"  // look
	Run   Scope = "run"   // start, use and end sandboxes, make and delete snapshots
	Admin Scope = "admin" // the tenant's keys, pools and packs; with the default tenant the host's images and what all share
)

var rank = map[Scope]int{Read: 1, Run: 2, Admin: 3}

// Covers says whether a key of scope s is good for what needs scope need. What is not known covers nothing and is covered by nothing.
func (s Scope) Covers(need Scope) bool { return rank[need] > 0 && rank[s] >= rank[need] }

// Errors of Check. An expired or revoked key is known to be that only when its secret is right.
var (
	ErrUnknown = errors.New("the key is not known")
	ErrExpired = errors.New("the key has expired")
	ErrRevoked = errors.New("the key was revoked")
)

// Errors of Create and Revoke.
var (
	ErrInvalid  = errors.New("key request is not valid")
	ErrExists   = errors.New("a key of that name exists")
	ErrNotFound = errors.New("no such key")
)

// Key is a key without its secret.
type Key struct {
	ID, Name, Tenant string
	Scope            Scope
	CreatedAt        time.Time
	ExpiresAt        time.Time // zero: never
	RevokedAt        time.Time // zero: it was not
	MaxSandboxes     int       // 0: as many as the tenant may have
	Rate             float64   // requests a second; 0: the ring's default
	Burst            int       // requests at once; 0: from Rate
}

// Live is a key as a request uses it.
type Live struct {
	Key
	Limiter *rate.Limiter   // nil: no limit
	Life    context.Context // ends when the key is revoked; its cause is ErrRevoked
}

// Limit is how many requests a key may make.
type Limit struct {
	Rate  float64 // a second; 0: no limit
	Burst int     // at once; 0: two seconds' worth
}

// Limiter returns a limiter of l; nil for no limit.
func (l Limit) Limiter() *rate.Limiter {
	if l.Rate <= 0 {
		return nil
	}
	return rate.NewLimiter(rate.Limit(l.Rate), l.burst())
}

// Ring is all keys of a daemon. Its methods may be called concurrently.
type Ring struct {
	db    records
	limit Limit
	now   func() time.Time
	most  int // keys of a tenant that are good, and that are not

	change sync.Mutex // held over a change, in the database and in memory; taken before mu

	mu   sync.RWMutex // never held over what may take time: every request needs it
	byID map[string]*entry
}

// records are what outlives the daemon.
type records interface {
	AddKey(context.Context, store.Key) error
	RevokeKey(ctx context.Context, id string, at time.Time) error
	RemoveKey(ctx context.Context, id string) error
}

type entry struct {
	live Live
	hash [sha256.Size]byte
	end  context.CancelCauseFunc
}

// Open reads the keys. limit is for keys that have none of their own.
func Open(ctx context.Context, db *store.DB, limit Limit) (*Ring, error) {
	r := &Ring{db: db, limit: limit, now: time.Now, most: maxPerTenant, byID: map[string]*entry{}}
	recs, err := db.Keys(ctx)
	if err != nil {
		return nil, err
	}
	for _, rec := range recs {
		r.byID[rec.ID] = r.entry(rec)
	}
	return r, nil
}

func (r *Ring) entry(rec store.Key) *entry {
	k := Key{ID: rec.ID, Name: rec.Name, Tenant: rec.Tenant, Scope: Scope(rec.Scope), CreatedAt: rec.CreatedAt, ExpiresAt: rec.ExpiresAt,
		RevokedAt: rec.RevokedAt, MaxSandboxes: rec.MaxSandboxes, Rate: rec.Rate, Burst: rec.Burst}
	limit := r.limit
	if k.Rate > 0 {
		limit = Limit{Rate: k.Rate, Burst: k.Burst}
	}
	e := &entry{live: Live{Key: k, Limiter: limit.Limiter()}, hash: rec.Hash}
	e.live.Life, e.end = context.WithCancelCause(context.Background())
	if !k.RevokedAt.IsZero() {
		e.end(ErrRevoked)
	}
	return e
}

// Any says whether a key was ever made: from then on a daemon answers to nobody without one.
func (r *Ring) Any() bool {
	r.mu.RLock()
	defer r.mu.RUnlock()
	return len(r.byID) > 0
}

// List returns the keys of a tenant, or with "" all of them, oldest first; those that expired or were revoked too.
func (r *Ring) List(tenant string) []Key {
	r.mu.RLock()
	defer r.mu.RUnlock()
	all := []Key{}
	for _, e := range r.byID {
		if tenant == "" || e.live.Tenant == tenant {
			all = append(all, e.live.Key)
		}
	}
	slices.SortFunc(all, func(a, b Key) int { return cmp.Or(a.CreatedAt.Compare(b.CreatedAt), cmp.Compare(a.ID, b.ID)) })
	return all
}

const (
	prefix      = "fk_"
	idBytes     = 6
	secretBytes = 32
)

var tokenPattern = regexp.MustCompile(`^fk_[0-9a-f]{12}_[0-9a-f]{64}$`)

// IsKey says whether a bearer token looks like a key, right or wrong.
func IsKey(token string) bool { return strings.HasPrefix(token, prefix) }

// Check finds the key that a bearer token is. A token that is none, or has the wrong secret, is ErrUnknown; with ErrExpired and ErrRevoked the
// key is returned too.
func (r *Ring) Check(token string) (Live, error) {
	e := &entry{} // a digest that nothing has: an unknown id takes the way that a known one takes
	if tokenPattern.MatchString(token) {
		r.mu.RLock()
		if known, ok := r.byID[token[len(prefix):len(prefix)+2*idBytes]]; ok {
			e = known
		}
		r.mu.RUnlock()
	}
	sum := sha256.Sum256([]byte(token))
	if subtle.ConstantTimeCompare(sum[:], e.hash[:]) != 1 {
		return Live{}, ErrUnknown
	}
	switch now := r.now(); {
	case e.live.Life.Err() != nil:
		return e.live, ErrRevoked
	case !e.live.ExpiresAt.IsZero() && !now.Before(e.live.ExpiresAt):
		return e.live, ErrExpired
	}
	return e.live, nil
}

// Request asks for a key.
type Request struct {
	Name, Tenant string
	Scope        Scope
	ExpiresAt    time.Time // zero: never
	MaxSandboxes int
	Rate         float64
	Burst        int

	By *Key // whose limits it can't exceed; nil: those of nobody
}

var (
	namePattern   = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$`)
	tenantPattern = regexp.MustCompile(`^[a-z0-9][a-z0-9-]{0,31}$`)
)

func (q Request) check(now time.Time) error {
	switch {
	case !namePattern.MatchString(q.Name):
		return fmt.Errorf("%w: the name %.80q can't be used: take 1 to 64 of A-Z a-z 0-9 . _ -, beginning with a letter or digit", ErrInvalid, q.Name)
	case !tenantPattern.MatchString(q.Tenant):
		return fmt.Errorf("%w: the tenant %.80q can't be used: take 1 to 32 of a-z 0-9 -, beginning with a letter or digit", ErrInvalid, q.Tenant)
	case rank[q.Scope] == 0:
		return fmt.Errorf("%w: the scope %.80q is not known: use read, run or admin", ErrInvalid, q.Scope)
	case !q.ExpiresAt.IsZero() && !q.ExpiresAt.After(now):
		return fmt.Errorf("%w: it would have expired already, at %s", ErrInvalid, q.ExpiresAt.UTC().Format(time.RFC3339))
	case q.MaxSandboxes < 0 || !(q.Rate >= 0 && q.Rate <= 1e6) || q.Burst < 0 || q.Burst > 1e6:
		return fmt.Errorf("%w: limits are not negative, and rates at most a million: %d sandboxes, %v requests a second, %d at once", ErrInvalid, q.MaxSandboxes, q.Rate, q.Burst)
	case q.Burst > 0 && q.Rate == 0:
		return fmt.Errorf("%w: a burst of %d needs a rate", ErrInvalid, q.Burst)
	}
	return nil
}

// Create makes a key. The token is returned here and never again. Errors wrap ErrInvalid, ErrExists, ErrBeyond or ErrTooMany.
func (r *Ring) Create(ctx context.Context, q Request) (k Key, token string, err error) {
	if err := q.check(r.now()); err != nil {
		return Key{}, "", err
	}
	if q.By != nil {
		if err := q.bind(*q.By, r.inherit(*q.By)); err != nil {
			return Key{}, "", err
		}
	}
	id, secret := randomHex(idBytes), randomHex(secretBytes)
	token = prefix + id + "_" + secret
	rec := store.Key{ID: id, Name: q.Name, Tenant: q.Tenant, Scope: string(q.Scope), Hash: sha256.Sum256([]byte(token)), CreatedAt: r.now(),
		ExpiresAt: q.ExpiresAt, MaxSandboxes: q.MaxSandboxes, Rate: q.Rate, Burst: q.Burst}
	ctx = context.WithoutCancel(ctx)
	r.change.Lock()
	defer r.change.Unlock()
	if err := r.makeRoom(ctx, q.Tenant); err != nil {
		return Key{}, "", err
	}
	if err := r.db.AddKey(ctx, rec); err != nil {
		if errors.Is(err, store.ErrExists) {
			return Key{}, "", fmt.Errorf("%w: tenant %s has a key named %s", ErrExists, q.Tenant, q.Name)
		}
		return Key{}, "", err
	}
	e := r.entry(rec)
	r.put(id, e)
	return e.live.Key, token, nil
}

func (r *Ring) put(id string, e *entry) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.byID[id] = e
}

// Revoke makes a key of a tenant, found by its id, good for nothing, now and for ever; with tenant "" it may be anybody's. A key that was revoked
// before stays so.
func (r *Ring) Revoke(ctx context.Context, tenant, id string) (Key, error) {
	r.change.Lock()
	defer r.change.Unlock()
	r.mu.RLock()
	e, ok := r.byID[id]
	r.mu.RUnlock()
	if !ok || tenant != "" && e.live.Tenant != tenant {
		return Key{}, fmt.Errorf("%w: %.80q", ErrNotFound, id)
	}
	if e.live.Life.Err() != nil {
		return e.live.Key, nil
	}
	now := r.now()
	if err := r.db.RevokeKey(context.WithoutCancel(ctx), id, now); err != nil {
		return Key{}, err
	}
	e.end(ErrRevoked)
	// A new entry: the old one is read without the lock.
	again := *e
	again.live.RevokedAt = now
	r.put(id, &again)
	return again.live.Key, nil
}

func randomHex(n int) string {
	b := make([]byte, n)
	_, _ = rand.Read(b) // never fails
	return hex.EncodeToString(b)
}
