package keys

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"time"
)

// maxPerTenant is how many keys a tenant may have that are good for something, and how many of those that are not are remembered.
const maxPerTenant = 1000

// hostTenant is the tenant whose administrators are the host's: sandbox.DefaultTenant.
const hostTenant = "default"

// Errors of Create that say how far somebody may go.
var (
	ErrBeyond  = errors.New("a key can't make one that may do more than itself")
	ErrTooMany = errors.New("the tenant has too many keys")
)

// burst is how many requests may be made at once.
func (l Limit) burst() int {
	if l.Burst > 0 {
		return l.Burst
	}
	return max(int(2*l.Rate), 1)
}

// bind bounds what is asked for to what the key that asks has: what is not said is taken from it. inherit is the limit of keys of by's tenant that
// have none of their own.
func (q *Request) bind(by Key, inherit Limit) error {
	if most := by.MaxSandboxes; most > 0 {
		if q.MaxSandboxes > most {
			return fmt.Errorf("%w: %d sandboxes, and %s has %d", ErrBeyond, q.MaxSandboxes, by.Name, most)
		}
		q.MaxSandboxes = cmp.Or(q.MaxSandboxes, most)
	}
	most := inherit
	if by.Rate > 0 {
		most = Limit{Rate: by.Rate, Burst: by.Burst}
	}
	switch {
	case most.Rate <= 0:
		return nil
	case q.Rate == 0:
		if by.Rate > 0 { // else it has the default, as the key that asks
			q.Rate, q.Burst = most.Rate, most.Burst
		}
		return nil
	case q.Rate > most.Rate || q.Burst > most.burst():
		return fmt.Errorf("%w: %v requests a second, %d at once, and %s has %v and %d", ErrBeyond, q.Rate, Limit{q.Rate, q.Burst}.burst(), by.Name, most.Rate, most.burst())
	}
	q.Burst = min(Limit{q.Rate, q.Burst}.burst(), most.burst())
	return nil
}

// inherit is the limit that a key with none of its own has, where it can't give others more: the host's administrators can.
func (r *Ring) inherit(by Key) Limit {
	if by.Tenant == hostTenant {
		return Limit{}
	}
	return r.limit
}

// makeRoom refuses a key more than a tenant may have, and forgets those that ended longest ago. Preconditions: r.change is held.
func (r *Ring) makeRoom(ctx context.Context, tenant string) error {
	now, good := r.now(), 0
	var ended []Key
	for _, k := range r.List(tenant) {
		if k.RevokedAt.IsZero() && (k.ExpiresAt.IsZero() || now.Before(k.ExpiresAt)) {
			good++
		} else {
			ended = append(ended, k)
		}
	}
	if good >= r.most {
		return fmt.Errorf("%w: %s has %d", ErrTooMany, tenant, good)
	}
	slices.SortStableFunc(ended, func(a, b Key) int { return endOf(a).Compare(endOf(b)) })
	for _, k := range ended[:max(0, len(ended)-r.most)] {
		if err := r.db.RemoveKey(ctx, k.ID); err != nil {
			return err
		}
		r.mu.Lock()
		delete(r.byID, k.ID)
		r.mu.Unlock()
	}
	return nil
}

// endOf is when a key that ended did.
func endOf(k Key) time.Time {
	if k.RevokedAt.IsZero() {
		return k.ExpiresAt
	}
	return k.RevokedAt
}
