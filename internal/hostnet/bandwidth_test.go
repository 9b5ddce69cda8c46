package hostnet

import (
	"strings"
	"testing"

	"github.com/vishvananda/netlink"
)

// TestShape: whatever the rate is, the largest packet may be sent at once; else it would never be sent.
func TestShape(t *testing.T) {
	if outside(t) {
		return
	}
	run(t, "ip", "link", "add", "a0", "type", "veth", "peer", "name", "a1")
	link, err := netlink.LinkByName("a0")
	if err != nil {
		t.Fatal(err)
	}
	h, err := netlink.NewHandle()
	if err != nil {
		t.Fatal(err)
	}
	defer h.Close()
	for mbit, want := range map[int]string{1: "rate 1Mbit burst 64Kb", 8: "rate 8Mbit burst 64Kb", 1000: "rate 1Gbit burst 1250000b"} {
		if err := shape(h, link, mbit); err != nil {
			t.Fatal(err)
		}
		if got := run(t, "tc", "qdisc", "show", "dev", "a0"); !strings.Contains(got, want) {
			t.Errorf("%d Mbit/s: %q, want %q", mbit, got, want)
		}
	}
	if err := shape(h, link, 0); err != nil {
		t.Fatal(err)
	}
	if got := run(t, "tc", "qdisc", "show", "dev", "a0"); strings.Contains(got, "tbf") {
		t.Errorf("without a limit: %q", got)
	}
}
