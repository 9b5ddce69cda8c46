package sandbox

import (
	"testing"
)

// TestCensus: how many sandboxes there may be, in all, of a tenant and of a key; a request gets all that it asks for or none.
func TestCensus(t *testing.T) {
	l := Limits{MaxSandboxes: 6, MaxTenantSandboxes: 4}
	a, b := Caller{Tenant: "a", KeyID: "k1", MaxSandboxes: 2}, Caller{Tenant: "b"}
	other := Caller{Tenant: "a", KeyID: "k2"}
	c := newCensus()
	take := func(who Caller, n int, want Code) {
		t.Helper()
		err := c.take(l, who, n)
		if want == "" {
			if err != nil {
				t.Errorf("%+v takes %d: %v", who, n, err)
			}
			return
		}
		checkCode(t, "take", err, want)
	}
	take(a, 3, CodeQuotaExceeded) // of the key
	take(a, 2, "")
	take(a, 1, CodeQuotaExceeded)
	take(other, 3, CodeQuotaExceeded) // of the tenant
	take(other, 2, "")
	take(b, 3, CodeQueueFull) // of the host
	take(b, 2, "")
	take(b, 1, CodeQueueFull)
	c.add("a", "k1", -1)
	take(b, 1, "")
	c.add("b", "", -3)
	take(a, 1, "")
	c.add("a", "k1", -2)
	c.add("a", "k2", -2)
	if c.total != 0 || len(c.byTenant) != 0 || len(c.byKey) != 0 {
		t.Errorf("after all have ended: %+v", c)
	}
}

// TestMaxSandboxes: those that a fork does not get are not counted, those that ended are not, and a daemon that starts counts those that live.
func TestMaxSandboxes(t *testing.T) {
	w := newWorld(t)
	o := options{limits: Limits{MaxSandboxes: 2}}
	d := w.start(t, o)
	d.snapshot(t, "base", nil)
	boxes := d.fork(t, "base", 2, nil)
	for range 2 {
		_, err := d.Fork(t.Context(), ForkRequest{Tag: "base", N: 1})
		checkCode(t, "a third", err, CodeQueueFull)
	}
	d.stop(t)
	d = w.start(t, o)
	_, err := d.Fork(t.Context(), ForkRequest{Tag: "base", N: 1})
	checkCode(t, "a third, of the next daemon", err, CodeQueueFull)
	if err := d.Kill(t.Context(), boxes[0].ID); err != nil {
		t.Fatal(err)
	}
	d.fork(t, "base", 1, nil)
}
