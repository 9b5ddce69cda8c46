package e2e

import (
	"encoding/json"
	"fmt"
	"maps"
	"os/exec"
	"slices"
	"strings"
	"testing"

	"github.com/forkd/forkd/api"
	"github.com/forkd/forkd/client"
)

// probes is what a guest tries: every way to every place. What it returns has a word for each that got through.
const probes = `
import struct
def tcp(addr, port, family=socket.AF_INET):
    with socket.socket(family) as s:
        s.settimeout(2)
        s.connect((addr, port))
        s.sendall(b"x")
        return s.recv(1) == b"x"
def udp(addr, port):
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        s.settimeout(0.5)
        s.connect((addr, port))
        s.send(b"x")
        return s.recv(1) == b"x"
def ping(addr):
    with socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP) as s:
        s.settimeout(0.3)
        body = struct.pack("!BBHHH", 8, 0, 0, 7, 1)
        total = sum(struct.unpack("!4H", body))
        total = (total >> 16) + (total & 0xffff)
        s.connect((addr, 0))
        s.send(struct.pack("!BBHHH", 8, 0, ~total & 0xffff, 7, 1))
        deadline = time.monotonic() + 0.3
        while time.monotonic() < deadline:
            data, sender = s.recvfrom(1024)
            if sender[0] == addr and data[20] == 0:
                return True
def ask(server, name, stream=False):
    query = struct.pack("!6H", 7, 0x100, 1, 0, 0, 0) + b"".join(bytes([len(l)]) + l.encode() for l in name.split(".")) + b"\0" + struct.pack("!2H", 1, 1)
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM if stream else socket.SOCK_DGRAM) as s:
        s.settimeout(2)
        s.connect((server, 53))
        s.sendall(struct.pack("!H", len(query)) + query if stream else query)
        got = s.recv(2048)[2 if stream else 0:]
        return got[3] & 15 == 0 and struct.unpack("!H", got[6:8])[0] > 0
def name(n, port):
    return tcp(socket.getaddrinfo(n, port, socket.AF_INET, socket.SOCK_STREAM)[0][4][0], port)
def route6():
    # As somebody with root in the guest would: an address and a route of its own.
    with open("/proc/sys/net/ipv6/conf/eth0/disable_ipv6", "w") as f: f.write("0")
    time.sleep(0.1)
def raw6():
    # A packet of UDP over IPv6, made by hand.
    with socket.socket(socket.AF_PACKET, socket.SOCK_RAW) as s:
        s.bind(("eth0", 0))
        s.send(bytes.fromhex("02f04bd00001") + bytes.fromhex("02f04bd00002") + b"\x86\xdd" + struct.pack("!IHBB", 6 << 28, 8, 17, 64)
            + socket.inet_pton(socket.AF_INET6, "fe80::1") + socket.inet_pton(socket.AF_INET6, "2001:db8:1::1") + struct.pack("!4H", 9, 80, 8, 0))
def forge():
    # A packet with an address that is not the guest's.
    with socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_RAW) as s:
        s.sendto(struct.pack("!BBHHHBBH4s4s4H", 69, 0, 28, 0, 0, 64, 17, 0, socket.inet_aton("10.117.0.3"), socket.inet_aton("198.51.100.10"), 9, 443, 8, 0), ("198.51.100.10", 0))
def attempt(tries):
    # Side by side, but for names, which come first: what is refused in silence takes its whole time.
    import concurrent.futures
    def one(t):
        try:
            return globals()[t[1]](*t[2])
        except (OSError, IndexError):
            return False
    through = [t[0] for t in tries if t[1] == "name" and one(t)]
    rest = [t for t in tries if t[1] != "name"]
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        return through + [t[0] for t, ok in zip(rest, pool.map(one, rest)) if ok]
`

// try is one thing that a guest does, and what it is called.
type try struct {
	word, way string
	args      []any
}

// MarshalJSON is for the probes.
func (p try) MarshalJSON() ([]byte, error) { return json.Marshal([]any{p.word, p.way, p.args}) }

// netTable is what is tried; neighbour is the address of another sandbox's network, own that of this one's.
func netTable(own, neighbour string) []try {
	var all []try
	add := func(word, way string, args ...any) { all = append(all, try{word, way, args}) }
	// Names first: what they lead to is open afterwards.
	for _, n := range []string{"good.test", "www.good.test", "bad.test", "rebind.good.test", "forged.good.test", "nowhere.good.test", "odd.test"} {
		add("name "+n, "name", n, 443)
	}
	names := len(all)
	for place, addr := range map[string]string{"good": goodAddr, "bad": badAddr, "odd": oddAddr, "meta": metaAddr, "lan": lanAddr, "host": hostAddr, "rogue": rogueAddr,
		"gateway": "10.117.0.1", "next hop": "169.254.117.1", "own slot": own, "neighbour": neighbour, "loopback": "10.118.0.1"} {
		add(place+" tcp 80", "tcp", addr, 80)
		add(place+" tcp 8080", "tcp", addr, 8080)
		add(place+" udp 443", "udp", addr, 443)                             // as QUIC does
		if place != "rogue" && place != "loopback" && place != "own slot" { // a ping that is refused costs its whole time
			add(place+" ping", "ping", addr)
		}
	}
	add("dns good", "ask", "10.117.0.1", "good.test")
	add("dns good tcp", "ask", "10.117.0.1", "good.test", true)
	add("dns bad", "ask", "10.117.0.1", "bad.test")
	add("dns bad tcp", "ask", "10.117.0.1", "bad.test", true)
	add("dns rogue", "ask", rogueAddr, "good.test")
	add("dns rogue tcp", "ask", rogueAddr, "good.test", true)
	add("ipv6", "tcp", wideAddr, 80, 10)
	slices.SortStableFunc(all[names:], func(a, b try) int { return strings.Compare(a.word, b.word) })
	return all
}

// What gets through with each policy; nothing else does.
var (
	allowed     = client.NetworkPolicy{Mode: api.NetworkPolicyModeAllow, Allow: []string{"good.test", "*.good.test:443/tcp", "odd.test:443/tcp", badAddr + ":8080/tcp"}}
	allowedGets = []string{"name good.test", "name www.good.test", "name forged.good.test", "name odd.test", "good tcp 80", "good tcp 8080", "good udp 443", "good ping",
		"bad tcp 8080", "dns good", "dns good tcp"}
	open     = client.NetworkPolicy{Mode: api.NetworkPolicyModeOpen}
	openGets = []string{"name good.test", "name www.good.test", "name forged.good.test", "name bad.test", "name odd.test", "good tcp 80", "good tcp 8080", "good udp 443", "good ping",
		"bad tcp 80", "bad tcp 8080", "bad udp 443", "bad ping", "odd tcp 80", "odd tcp 8080", "odd udp 443", "odd ping", "rogue tcp 80", "rogue tcp 8080", "rogue udp 443",
		"dns good", "dns good tcp", "dns bad", "dns bad tcp", "dns rogue", "dns rogue tcp"}
	nothing = client.NetworkPolicy{Mode: api.NetworkPolicyModeNone}
)

// checkNetwork has a guest try everything and compares with what its policy says.
func checkNetwork(g *guest, neighbour string, want []string, when string) {
	g.d.t.Helper()
	now, err := g.now()
	if err != nil {
		g.d.t.Fatal(err)
	}
	g.Sandbox = now
	tries, err := json.Marshal(netTable(slotAddr(g), neighbour))
	if err != nil {
		g.d.t.Fatal(err)
	}
	var got []string
	if err := g.tryPyJSON("attempt(json.loads("+pyString(string(tries))+"))", &got); err != nil {
		g.d.t.Fatalf("%s: %v: %v", when, g, err)
	}
	want = slices.Sorted(slices.Values(want))
	slices.Sort(got)
	if !slices.Equal(got, want) {
		g.d.t.Errorf("%s: got through:\n %s\nwant exactly:\n %s", when, strings.Join(got, ", "), strings.Join(want, ", "))
	}
}

// pyString is a string as Python has it.
func pyString(s string) string {
	b, _ := json.Marshal(s)
	return string(b)
}

// slotAddr is the address of a sandbox's network on the host.
func slotAddr(g *guest) string {
	g.d.t.Helper()
	if g.Netns == nil {
		g.d.t.Fatalf("%v has no network namespace", g)
	}
	out, err := exec.Command("nsenter", "--net="+*g.Netns, "ip", "-o", "-4", "addr", "show", "up0").Output()
	fields := strings.Fields(string(out))
	if err != nil || len(fields) < 4 {
		g.d.t.Fatalf("address of the network of %v: %v %q", g, err, out)
	}
	addr, _, _ := strings.Cut(fields[3], "/")
	return addr
}

func withNetwork(p client.NetworkPolicy) func(*client.ForkRequest) {
	return func(r *client.ForkRequest) { r.Network = &p }
}

func (g *guest) setNetwork(p client.NetworkPolicy) client.NetworkStatus {
	g.d.t.Helper()
	ctx, cancel := g.d.limited()
	defer cancel()
	st, err := g.d.client.SetNetwork(ctx, g.ID, p)
	if err != nil {
		g.d.t.Fatalf("network of %v: %v", g, err)
	}
	return st
}

func (g *guest) network() client.NetworkStatus {
	g.d.t.Helper()
	ctx, cancel := g.d.limited()
	defer cancel()
	st, err := g.d.client.Network(ctx, g.ID)
	if err != nil {
		g.d.t.Fatalf("network of %v: %v", g, err)
	}
	return st
}

// TestNetworkPolicies has guests try every way to every place, with each policy, and after everything that can happen to a sandbox.
func TestNetworkPolicies(t *testing.T) {
	needVM(t)
	n := newInternet(t)
	d := ownDaemon(t, n.setup())
	neighbour := d.fork1(withNetwork(open))
	serveInGuest(neighbour, 8080)
	next := slotAddr(neighbour)
	fork := func(p client.NetworkPolicy) *guest {
		g := d.fork1(withNetwork(p))
		g.py(probes)
		return g
	}

	none := fork(nothing)
	checkNetwork(none, next, nil, "none")
	st := none.network()
	if st.DeniedAttempts == 0 || len(st.Denied) == 0 {
		t.Errorf("what was tried in vain is not counted: %+v", st)
	}
	checkAttempts(none)
	allow := fork(allowed)
	checkNetwork(allow, next, allowedGets, "allow")
	if st := allow.network(); !slices.ContainsFunc(st.DeniedNames, func(n api.DeniedName) bool { return n.Name == "bad.test" }) {
		t.Errorf("the name that was asked for in vain is not listed: %+v", st.DeniedNames)
	}
	opened := fork(open)
	checkNetwork(opened, next, openGets, "open")
	checkForgery(n, opened)
	checkWhole(n, d)

	allow.setNetwork(nothing)
	checkNetwork(allow, next, nil, "allow, changed to none")
	allow.setNetwork(open)
	checkNetwork(allow, next, openGets, "none, changed to open")
	allow.setNetwork(allowed)
	checkNetwork(allow, next, allowedGets, "open, changed to allow")

	d.kill9()
	d.start(n.setup())
	checkNetwork(allow, next, allowedGets, "allow, after the daemon was killed")
	checkNetwork(none, next, nil, "none, after the daemon was killed")
	checkInherited(allow, next)
	d.checkNeighbour(neighbour, next)
}

// checkAttempts counts what a guest tries in vain: connections, not packets.
func checkAttempts(g *guest) {
	g.d.t.Helper()
	before := g.network().DeniedAttempts
	g.py(fmt.Sprintf(`
for _ in range(3):
    try: socket.create_connection((%q, 4321), 5)
    except OSError: pass
u = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
for _ in range(20):
    try: u.sendto(b'x', (%q, 4321))
    except OSError: pass`, goodAddr, goodAddr))
	if got := g.network().DeniedAttempts - before; got != 4 {
		g.d.t.Errorf("three connections and a program that sends 20 packets over UDP are %d attempts, want 4", got)
	}
}

// checkInherited looks at what comes of a sandbox that may reach what is allowed.
func checkInherited(g *guest, next string) {
	d := g.d
	d.t.Helper()
	ctx, cancel := d.limited()
	defer cancel()
	forked, err := d.client.ForkRunning(ctx, g.ID, client.ForkRunningRequest{})
	if err != nil {
		d.t.Fatal(err)
	}
	child := d.guestOf(forked.Sandboxes[0])
	checkNetwork(child, next, allowedGets, "allow, forked while it ran")
	if _, err := d.client.Branch(ctx, g.ID, client.BranchRequest{Tag: "branched"}); err != nil {
		d.t.Fatal(err)
	}
	checkNetwork(d.fork1(of("branched")), next, allowedGets, "allow, branched and forked")
	checkNetwork(d.fork1(of("branched"), withNetwork(nothing)), next, nil, "allow, branched, and forked with none")
	if _, err := d.client.Suspend(ctx, g.ID); err != nil {
		d.t.Fatal(err)
	}
	d.suspended.Store(g.ID, true)
	if _, err := d.client.Resume(ctx, g.ID); err != nil {
		d.t.Fatal(err)
	}
	checkNetwork(g, next, allowedGets, "allow, suspended and resumed")
}

func (d *daemon) guestOf(s client.Sandbox) *guest {
	g := &guest{s, d}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.guests = append(d.guests, g)
	return g
}

// checkForgery sends packets that no program sends.
func checkForgery(n *internet, g *guest) {
	g.d.t.Helper()
	before := n.visits("udp " + goodAddr + ":443")
	g.py("route6()")
	g.py("raw6()")
	g.py("forge()")
	st := g.network()
	if st.ForgedPackets == 0 || st.Ipv6Packets == 0 {
		g.d.t.Errorf("forged packets and those of IPv6 are not counted: %+v", st)
	}
	if after := n.visits("udp " + goodAddr + ":443"); after != before {
		g.d.t.Errorf("a packet with a forged address arrived")
	}
}

// checkWhole looks at the servers that nobody may have come to, whatever guests believe.
func checkWhole(n *internet, d *daemon) {
	d.t.Helper()
	n.mu.Lock()
	defer n.mu.Unlock()
	for _, server := range slices.Sorted(maps.Keys(n.seen)) {
		for _, addr := range []string{metaAddr, lanAddr, hostAddr, wideAddr} {
			if strings.Contains(server, addr+":") || strings.Contains(server, addr+"]") {
				d.t.Errorf("%s was reached", server)
			}
		}
	}
}

// checkNeighbour makes sure that the neighbour was there to be found all the time.
func (d *daemon) checkNeighbour(g *guest, addr string) {
	d.t.Helper()
	if now := slotAddr(g); now != addr {
		d.t.Errorf("the neighbour is at %s, was at %s", now, addr)
	}
	if got := getPort(g, 8080, "x"); got != "GET /x" {
		d.t.Errorf("the neighbour's server answers %q", got)
	}
}

// serveInGuest starts a web server that says what it was asked.
func serveInGuest(g *guest, port int) {
	g.d.t.Helper()
	g.py(fmt.Sprintf(`
import http.server, threading
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        body = ("GET " + self.path).encode()
        self.send_response(200); self.send_header("Content-Length", str(len(body))); self.end_headers()
        self.wfile.write(body)
    def log_message(self, *a): pass
threading.Thread(target=http.server.ThreadingHTTPServer(("", %d), Handler).serve_forever, daemon=True).start()`, port))
}
