package e2e

import (
	"fmt"
	"strings"
	"testing"

	"github.com/forkd/forkd/api"
	"github.com/forkd/forkd/client"
	"github.com/forkd/forkd/internal/failpoint"
)

// flows is what a guest holds connections with. Each has a thread that listens, so that an end is seen when it comes.
const flows = `
import queue, threading
held, heard = {}, {}
def hold(word, host, port, kind):
    s = socket.socket(socket.AF_INET, kind)
    s.settimeout(10)
    s.connect((host, port))
    s.send(b"first")
    assert s.recv(16) == b"first"
    s.settimeout(None)
    q = queue.Queue()
    held[word], heard[word] = s, q
    def listen():
        while True:
            try: got = s.recv(64).decode() or "end"
            except OSError as e: got = type(e).__name__
            q.put(got)
            if got == "end" or got.endswith("Error"):
                if kind == socket.SOCK_STREAM: return
    threading.Thread(target=listen, daemon=True).start()
def hear(word, seconds):
    try: return heard[word].get(timeout=seconds)
    except queue.Empty: return "nothing"
def say(word, seconds=10):
    try: held[word].send(b"x")
    except OSError as e: return type(e).__name__
    return hear(word, seconds)
def reach(host, port):
    try:
        with socket.create_connection((host, port), 5) as s: return True
    except OSError: return False
`

// TestNetworkChanges changes the policy of a sandbox that talks: what is allowed goes on, whoever speaks next, and what is not ends then and there.
func TestNetworkChanges(t *testing.T) {
	needVM(t)
	n := newInternet(t)
	d := ownDaemon(t, n.setup())
	g := d.fork1(withNetwork(open))
	g.py(flows)
	hold := func(place, host string) {
		g.py(fmt.Sprintf("hold('%s tcp', %q, 8080, socket.SOCK_STREAM)", place, host))
		g.py(fmt.Sprintf("hold('%s udp', %q, 443, socket.SOCK_DGRAM)", place, host))
	}
	expect := func(when, code, want string) {
		t.Helper()
		if got := g.py(code); got != "'"+want+"'" {
			t.Errorf("%s: %s gives %s, want %s", when, code, got, want)
		}
	}
	goesOn := func(when, place, addr string) {
		t.Helper()
		// The server speaks first: a guest that only listens must not be left in the dark.
		n.say("tcp "+addr+":8080", "news")
		expect(when, "hear('"+place+" tcp', 10)", "news")
		n.say("udp "+addr+":443", "news")
		expect(when, "hear('"+place+" udp', 10)", "news")
		expect(when, "say('"+place+" tcp')", "x")
		expect(when, "say('"+place+" udp')", "x")
	}
	isCut := func(when, place, addr string) {
		t.Helper()
		// Nobody has said anything: it is the change that ends it.
		expect(when, "hear('"+place+" tcp', 10)", "ConnectionResetError")
		n.say("udp "+addr+":443", "news")
		expect(when, "hear('"+place+" udp', 0.5)", "nothing")
		if got := g.py("say('" + place + " udp', 0.5)"); got == "'x'" || got == "'news'" {
			t.Errorf("%s: UDP goes on: %s", when, got)
		}
	}
	allow := func(rules ...string) client.NetworkPolicy {
		return client.NetworkPolicy{Mode: api.NetworkPolicyModeAllow, Allow: rules}
	}

	hold("good", "good.test")
	hold("bad", "bad.test")
	g.setNetwork(allow("good.test"))
	goesOn("open, changed to allow with it", "good", goodAddr)
	isCut("open, changed to allow without it", "bad", badAddr)

	g.setNetwork(open)
	goesOn("allow, changed to open", "good", goodAddr)
	hold("bad", "bad.test")
	g.setNetwork(allow(badAddr+":8080/tcp", badAddr+":443/udp"))
	goesOn("open, changed to allow by address and port", "bad", badAddr)
	isCut("open, changed to allow by another address", "good", goodAddr)

	g.setNetwork(allow("*.test", "brief.test"))
	hold("brief", "brief.test")
	goesOn("by address, changed to a wildcard", "bad", badAddr)
	// A name's answer is over; a connection from then goes on, and does so under a policy that has the name as well.
	eventually(t, callLimit, func() error {
		if g.py(fmt.Sprintf("reach(%q, 8080)", briefAddr)) == "True" {
			return fmt.Errorf("the address of brief.test can be reached although its answer is over")
		}
		return nil
	})
	g.setNetwork(allow("brief.test", "other.test"))
	goesOn("allow, changed to other rules with the same name", "brief", briefAddr)
	if g.py(fmt.Sprintf("reach(%q, 8080)", briefAddr)) == "True" {
		t.Error("what is remembered for connections lets new ones through")
	}
	isCut("wildcard, changed to names without it", "bad", badAddr)
	checkOtherRange(n, g, goesOn)
	g.setNetwork(nothing)
	isCut("allow, changed to none", "brief", briefAddr)

	// Killed when the policy is recorded and the kernel does not hold it yet: the next daemon sees to it.
	d.stop()
	crashing := n.setup()
	crashing.env = []string{failpoint.Variable + "=sandbox.network.recorded@1=kill"}
	d.start(crashing)
	ctx, cancel := d.limited()
	defer cancel()
	if _, err := d.client.SetNetwork(ctx, g.ID, open); err == nil {
		t.Error("a daemon that was killed answered")
	}
	d.awaitDeath()
	d.start(n.setup())
	if st := g.network(); st.Policy.Mode != open.Mode || g.py(fmt.Sprintf("reach(%q, 8080)", badAddr)) != "True" {
		t.Errorf("after a crash amid a change to open its policy is %+v, and the kernel holds another", st.Policy)
	}
}

// checkOtherRange starts the daemon again with another range for its networks: what runs goes on in the old one.
func checkOtherRange(n *internet, g *guest, goesOn func(when, place, addr string)) {
	d := g.d
	d.t.Helper()
	d.kill9()
	d.start(n.setup("--network-range", "10.119.0.0/16"))
	goesOn("after a restart with another range", "brief", briefAddr)
	fresh := d.fork1(withNetwork(open))
	fresh.py(flows)
	for _, guest := range []*guest{g, fresh} {
		guest.setNetwork(client.NetworkPolicy{Mode: api.NetworkPolicyModeAllow, Allow: []string{"brief.test", goodAddr}})
		if got := guest.py(fmt.Sprintf("reach(%q, 8080)", goodAddr)); got != "True" {
			d.t.Errorf("%v at %s reaches nothing after a restart with another range", guest, slotAddr(guest))
		}
	}
	if old, own := slotAddr(g), slotAddr(fresh); !strings.HasPrefix(old, "10.118.") || !strings.HasPrefix(own, "10.119.") {
		d.t.Errorf("one that went on is at %s, a new one at %s", old, own)
	}
	goesOn("after that and a change", "brief", briefAddr)
	fresh.kill()
}
