package e2e

import (
	"fmt"
	"os"
	"strconv"
	"testing"

	"github.com/forkd/forkd/api"
	"github.com/forkd/forkd/client"
)

// countOf is a number from the environment.
func countOf(variable string, otherwise int) int {
	if n, err := strconv.Atoi(os.Getenv(variable)); err == nil {
		return n
	}
	return otherwise
}

// TestManyNetworks has sandboxes with the same address talk to one server at once, and reaches each of them by its port.
func TestManyNetworks(t *testing.T) {
	needVM(t)
	n := newInternet(t)
	many := countOf("FORKD_NETWORKS", 8)
	d := ownDaemon(t, n.setup("--network-pool", fmt.Sprint(countOf("FORKD_NETWORK_POOL", 16))))
	policy := client.NetworkPolicy{Mode: api.NetworkPolicyModeAllow, Allow: []string{goodAddr + ":8080/tcp"}}
	guests := d.fork(many, withNetwork(policy))
	addrs := map[string]bool{}
	for _, g := range guests {
		addrs[slotAddr(g)] = true
		if g.GuestAddr == nil || *g.GuestAddr != "10.117.0.2" {
			t.Errorf("%v is at %v", g, g.GuestAddr)
		}
	}
	if len(addrs) != many {
		t.Errorf("%d sandboxes have %d addresses on the host", many, len(addrs))
	}
	d.each(guests, func(i int, g *guest) error {
		_, err := g.tryPy(fmt.Sprintf("s = socket.create_connection((%q, 8080), 20); s.sendall(b'%d.')", goodAddr, i))
		serveInGuest(g, 8080)
		return err
	})
	if got := n.visits("tcp " + goodAddr + ":8080"); got != many {
		t.Errorf("%d connections arrived, want %d", got, many)
	}
	// All of them hold their connections now; each reads what it wrote itself.
	d.each(guests, func(i int, g *guest) error {
		got, err := g.tryPy("s.recv(64).decode()")
		if want := fmt.Sprintf("'%d.'", i); err == nil && got != want {
			err = fmt.Errorf("read %s, wrote %s", got, want)
		}
		return err
	})
	// Here not all of them at once: their processors are emulated by those of this host, and none has five seconds to answer then.
	d.each(guests, func(i int, g *guest) error {
		path := fmt.Sprintf("guest-%d", i)
		got, err := tryGetPort(g, 8080, path)
		if err == nil && got != "GET /"+path {
			err = fmt.Errorf("by its port: %q", got)
		}
		return err
	})
	checkBandwidth(guests[0], policy)
}

// checkBandwidth limits the traffic of a live sandbox: so many bytes take as long, at least.
func checkBandwidth(g *guest, policy client.NetworkPolicy) {
	g.d.t.Helper()
	policy.BandwidthMbit = 8 // a million bytes a second
	g.setNetwork(policy)
	g.py(`
import threading, time
def echo(addr, n):
    s = socket.create_connection((addr, 8080), 60)
    begin, got = time.monotonic(), 0
    threading.Thread(target=lambda: s.sendall(bytes(n)), daemon=True).start()
    while got < n: got += len(s.recv(1 << 16))
    return time.monotonic() - begin`)
	var took float64
	if err := g.tryPyJSON(fmt.Sprintf("echo(%q, 3_000_000)", goodAddr), &took); err != nil {
		g.d.t.Fatalf("3 MB there and back: %v", err)
	}
	if took < 2.5 {
		g.d.t.Errorf("3 MB there and back took %.2f s at 8 Mbit/s", took)
	}
	g.d.t.Logf("3 MB there and back at 8 Mbit/s: %.2f s", took)
}
