package server

import (
	"fmt"
	"net/http"
	"sync"
	"time"

	"github.com/forkd/forkd/internal/sandbox"
)

// What the keys of a tenant may have under way at a time, in all. Whoever has the host itself is not counted.
const (
	maxAtOnce = 1024 // requests, streams, tunnels
	maxJobs   = 4    // of those that read or write whole snapshots

	maxBodies = 256 << 20 // bytes of bodies that are held in memory: an exec's is, with its input, until it ends
)

// crowd counts what tenants have under way.
type crowd struct {
	what string
	max  int

	mu sync.Mutex
	by map[string]int
}

func newCrowd(what string, most int) *crowd {
	return &crowd{what: what, max: most, by: map[string]int{}}
}

// enter counts one more, until leave.
func (c *crowd) enter(who principal) (leave func(), err error) {
	if err := c.take(who, 1); err != nil {
		return nil, err
	}
	return sync.OnceFunc(func() { c.leave(who, 1) }), nil
}

// take counts n more, until leave takes them back.
func (c *crowd) take(who principal, n int) error {
	if who.caller.KeyID == "" {
		return nil
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.by[who.tenant]+n > c.max {
		return &sandbox.Error{Code: codeRateLimited, Message: fmt.Sprintf("the tenant %s has %d %s under way, of %d that it may", who.tenant, c.by[who.tenant], c.what, c.max),
			Hint: "let some of them end first", RetryAfter: time.Second}
	}
	c.by[who.tenant] += n
	return nil
}

func (c *crowd) leave(who principal, n int) {
	if who.caller.KeyID == "" {
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.by[who.tenant] -= n; c.by[who.tenant] <= 0 {
		delete(c.by, who.tenant)
	}
}

// job counts a handler's requests among the few that a tenant may have under way.
func (s *Server) job(next handler) handler {
	return func(w http.ResponseWriter, r *http.Request) error {
		leave, err := s.jobs.enter(noteOf(r.Context()).who)
		if err != nil {
			return err
		}
		defer leave()
		return next(w, r)
	}
}
