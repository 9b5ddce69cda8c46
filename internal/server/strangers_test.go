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

// TestStrangersByOtherWays: whatever a request of somebody unknown is refused for, it counts.
func TestStrangersByOtherWays(t *testing.T) {
	t.Parallel()
	kept := &recordOf{}
	f := newFixture(t, func(c *Config) { c.Token, c.Audit = "0123456789abcdef", kept })
	ask := func() {
		for _, tt := range []struct {
			method, path string
			status       int
			header       []string
		}{
			{"POST", "/healthz", 405, nil},
			{"POST", "/v1/sandboxes", 403, []string{"Sec-Fetch-Site", "cross-site"}},
			{"POST", "/v1/sandboxes", 403, []string{"Sec-Fetch-Site", "cross-site", "Authorization", "Bearer 0123456789abcdef"}},
		} {
			if got := f.do(t, tt.method, tt.path, "{}", tt.header...); got.status != tt.status {
				t.Errorf("%s %s = %d %s, want %d", tt.method, tt.path, got.status, got.body, tt.status)
			}
		}
	}
	ask()
	for !f.server.strangers.tooMany("127.0.0.1:1") {
	}
	for range 20 {
		ask()
	}
	f.http.Close()
	if n := len(kept.entries); n < 3 || n > 40 { // a few may be let through again meanwhile
		t.Errorf("the record has %d lines, want that those of strangers are bounded", n)
	}
}
