package server

import (
	"fmt"
	"testing"
)

// Whoever comes too often without a key is answered, and neither fills the record nor keeps others out.
func TestStrangers(t *testing.T) {
	t.Parallel()
	kept := &recordOf{}
	f := newFixture(t, func(c *Config) { c.Token, c.Audit = "0123456789abcdef", kept })
	for range strangerBurst {
		f.server.strangers.tooMany("127.0.0.1:1")
	}
	if got := f.do(t, "GET", "/v1/sandboxes", "", "Authorization", "Bearer wrong"); got.status != 429 || got.header.Get("Retry-After") == "" {
		t.Errorf("= %d %s, want 429", got.status, got.body)
	}
	if got := f.do(t, "GET", "/v1/sandboxes", "", "Authorization", "Bearer 0123456789abcdef"); got.status != 200 {
		t.Errorf("with the right one = %d %s", got.status, got.body)
	}
	f.http.Close() // what was answered is in the record then
	if len(kept.entries) != 1 || kept.entries[0].Status != 200 {
		t.Errorf("record = %+v, want one line", kept.entries)
	}
	s := newStrangers()
	for i := range 2 * maxStrangers {
		if s.tooMany(fmt.Sprintf("[2001:db8:%x:%x::1]:1", i>>16, i&0xffff)) && i < maxStrangers {
			t.Fatalf("address %d is kept out", i)
		}
	}
	if len(s.byAddr) > maxStrangers {
		t.Errorf("%d addresses are remembered", len(s.byAddr))
	}
	if s.limiterLocked("[2001:db8::1]:1") != s.limiterLocked("[2001:db8::2]:99") || s.limiterLocked("192.0.2.1:1") == s.limiterLocked("192.0.2.2:1") && len(s.byAddr) < maxStrangers {
		t.Error("addresses are told apart the wrong way")
	}
}
