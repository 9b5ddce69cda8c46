package sandbox

import (
	"sync"
)

// census counts the sandboxes that live, or are about to, in all and by who has them: how many there may be is decided before anything is
// started.
type census struct {
	mu       sync.Mutex
	total    int
	byTenant map[string]int
	byKey    map[string]int
}

func newCensus() *census { return &census{byTenant: map[string]int{}, byKey: map[string]int{}} }

// take counts n sandboxes of a caller, or says why there may not be so many: all of them or none.
func (c *census) take(l Limits, who Caller, n int) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	switch {
	case l.MaxSandboxes > 0 && c.total+n > l.MaxSandboxes:
		return &Error{Code: CodeQueueFull, RetryAfter: retryLater, Hint: "end sandboxes, or try again later", Message: "this host has no room for as many sandboxes"}
	case l.MaxTenantSandboxes > 0 && c.byTenant[who.Tenant]+n > l.MaxTenantSandboxes:
		return quotaExceeded("the tenant "+who.Tenant, c.byTenant[who.Tenant], n, l.MaxTenantSandboxes)
	case who.KeyID != "" && who.MaxSandboxes > 0 && c.byKey[who.KeyID]+n > who.MaxSandboxes:
		return quotaExceeded("this key", c.byKey[who.KeyID], n, who.MaxSandboxes)
	}
	c.addLocked(who.Tenant, who.KeyID, n)
	return nil
}

// quotaExceeded is the error of a request for more than somebody may have.
func quotaExceeded(whose string, has, n, most int) error {
	return newError(CodeQuotaExceeded, nil, "end some of them, suspended ones too: `forkd ls`", "%s has %d sandboxes and asks for %d more: it may have %d", whose, has, n, most)
}

// add counts sandboxes that are there, whether there may be as many or not.
func (c *census) add(tenant, key string, n int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.addLocked(tenant, key, n)
}

func (c *census) addLocked(tenant, key string, n int) {
	c.total += n
	bump(c.byTenant, tenant, n)
	if key != "" {
		bump(c.byKey, key, n)
	}
}

// bump adds to a count and forgets it when it is 0.
func bump(counts map[string]int, name string, n int) {
	if counts[name] += n; counts[name] == 0 {
		delete(counts, name)
	}
}
