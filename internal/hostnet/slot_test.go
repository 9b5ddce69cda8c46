package hostnet

import (
	"strings"
	"testing"

	"github.com/vishvananda/netlink"

	"github.com/forkd/forkd/internal/netpolicy"
)

// open makes networks in the test's own host.
func open(t *testing.T, cfg Config) *Network {
	t.Helper()
	cfg.Name = "forkd-test"
	n, err := Open(cfg)
	if err != nil {
		t.Fatal(err)
	}
	n.Start()
	t.Cleanup(func() { _ = n.Close() })
	return n
}

func acquire(t *testing.T, n *Network) *Slot {
	t.Helper()
	s, err := n.Acquire(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// TestPolicies replaces one policy by another: the kernel takes them all, and keeps nothing of those before.
func TestPolicies(t *testing.T) {
	if outside(t) {
		return
	}
	s := acquire(t, open(t, Config{}))
	for _, p := range []netpolicy.Policy{
		{Mode: netpolicy.Open},
		{Mode: netpolicy.Allow, Rules: []string{"example.com", "*.example.org:443", "1.2.3.0/24:80-90/tcp", "10.1.0.0/16", "169.254.169.254:80"}},
		{Mode: netpolicy.Allow, Rules: []string{"example.com"}, BandwidthMbit: 10},
		{Mode: netpolicy.Allow, Rules: []string{"example.com"}},
	} {
		if err := s.SetPolicy(t.Context(), p); err != nil {
			t.Fatalf("%v: %v", p, err)
		}
		st, err := s.Status()
		if err != nil || st.Policy.String() != p.String() {
			t.Errorf("Status = %v, %v, want the policy %v", st.Policy, err, p)
		}
		shaped := strings.Contains(in(t, s, "tc", "qdisc", "show", "dev", tapName), "tbf")
		if shaped != (p.BandwidthMbit > 0) {
			t.Errorf("%v: the tap is shaped: %v", p, shaped)
		}
	}
	if err := s.SetPolicy(t.Context(), netpolicy.Policy{}); err != nil {
		t.Fatal(err)
	}
	if rules := in(t, s, "nft", "list", "ruleset"); strings.Contains(rules, "names-") || strings.Contains(rules, "goto pass") {
		t.Errorf("something is left of earlier policies:\n%s", rules)
	}
}

// TestUnplugAll removes the pairs of several slots, and of no other, in one step.
func TestUnplugAll(t *testing.T) {
	if outside(t) {
		return
	}
	n := open(t, Config{})
	gone, stays := []*Slot{acquire(t, n), acquire(t, n)}, acquire(t, n)
	names := []string{hostLink(gone[0].number), hostLink(gone[1].number)}
	n.unplugAll(gone)
	for i, name := range names {
		if _, err := netlink.LinkByName(name); err == nil || gone[i].number != 0 {
			t.Errorf("%s is still there (%v), or its slot has the number %d still", name, err, gone[i].number)
		}
	}
	if _, err := netlink.LinkByName(hostLink(stays.number)); err != nil {
		t.Errorf("the pair of another slot: %v", err)
	}
}
