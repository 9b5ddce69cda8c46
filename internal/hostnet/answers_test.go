package hostnet

import (
	"fmt"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/google/nftables"

	"github.com/forkd/forkd/internal/netpolicy"
)

// TestAnswers: what is over can't be reached any more and is remembered, by the names that led to it, as long as there is room.
func TestAnswers(t *testing.T) {
	a, b, c := netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("192.0.2.2"), netip.MustParseAddr("192.0.2.3")
	k := newAnswers()
	later, before := time.Now().Add(time.Hour), time.Now().Add(-time.Hour)
	k.note("www.example.com", a, later)
	k.note("www.example.com", a, before) // does not take the place of the later one
	k.note("api.example.com", b, before)
	k.note("*.example.org", c, later) // as a daemon finds it that takes over
	for domain, want := range map[string]struct{ live, all []netip.Addr }{
		"www.example.com":   {[]netip.Addr{a}, []netip.Addr{a}},
		"api.example.com":   {nil, []netip.Addr{b}},
		"*.example.com":     {[]netip.Addr{a}, []netip.Addr{a, b}},
		"*":                 {[]netip.Addr{a, c}, []netip.Addr{a, b, c}},
		"example.com":       {nil, nil},
		"*.example.org":     {[]netip.Addr{c}, []netip.Addr{c}},
		"sub.example.org":   {nil, nil},
		"*.sub.example.org": {nil, nil},
	} {
		var live []netip.Addr
		for addr := range k.live(domain) {
			live = append(live, addr)
		}
		slices.SortFunc(live, netip.Addr.Compare)
		if got := k.all(domain); !slices.Equal(live, want.live) || !slices.Equal(got, want.all) {
			t.Errorf("%s: live %v, all %v, want %v", domain, live, got, want)
		}
	}
	for i := range answersKept {
		k.note(fmt.Sprintf("n%d.example.net", i), netip.AddrFrom4([4]byte{198, 51, byte(i >> 8), byte(i)}), later)
	}
	if len(k.all("*")) != answersKept || len(k.all("*.example.com")) != 0 || k.count != answersKept || len(k.order) != len(k.byName) {
		t.Errorf("remembers %d addresses of %d names, in order %d, %v", k.count, len(k.byName), len(k.order), k.all("*.example.com"))
	}
}

// TestManyAnswers: as many addresses as are remembered fit into the sets of a policy, whose messages to the kernel are bounded.
func TestManyAnswers(t *testing.T) {
	if outside(t) {
		return
	}
	s := acquire(t, open(t, Config{}))
	if err := s.SetPolicy(t.Context(), netpolicy.Policy{Mode: netpolicy.Allow, Rules: []string{"*"}}); err != nil {
		t.Fatal(err)
	}
	for i := range answersKept {
		s.learned.note(fmt.Sprintf("n%d.example.net", i/4), netip.AddrFrom4([4]byte{198, 51, byte(i >> 8), byte(i)}), time.Now().Add(time.Hour))
	}
	for _, rules := range [][]string{{"*.example.net"}, {"*.example.net", "*"}} {
		if err := s.SetPolicy(t.Context(), netpolicy.Policy{Mode: netpolicy.Allow, Rules: rules}); err != nil {
			t.Fatalf("%v: %v", rules, err)
		}
		for i := range rules {
			for _, set := range []*nftables.Set{s.applied.domainSet(s.applied.domains[i]), s.applied.heldSet(s.applied.domains[i])} {
				got, err := s.conn.GetSetElements(set)
				if err != nil || len(got) != answersKept {
					t.Errorf("%v: %s has %d elements: %v", rules, set.Name, len(got), err)
				}
			}
		}
	}
}

// TestLearn lets an address be reached for longer when its name is asked for again.
func TestLearn(t *testing.T) {
	if outside(t) {
		return
	}
	s := acquire(t, open(t, Config{}))
	addr := netip.MustParseAddr("198.51.100.7")
	if err := s.SetPolicy(t.Context(), netpolicy.Policy{Mode: netpolicy.Allow, Rules: []string{"example.com", "*.com:443"}}); err != nil {
		t.Fatal(err)
	}
	for _, ttl := range []time.Duration{time.Minute, 10 * time.Minute, time.Second} {
		if err := s.learn("example.com", []netip.Addr{addr, netip.MustParseAddr("10.0.0.1")}, ttl); err != nil {
			t.Fatal(err)
		}
	}
	for _, d := range s.applied.domains {
		got, err := s.conn.GetSetElements(s.applied.domainSet(d))
		if err != nil || len(got) != 1 || got[0].Expires < 9*time.Minute {
			t.Errorf("%s leads to %v: %v, want one address for ten minutes", d, got, err)
		}
	}
}
