package e2e

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"strings"
	"sync"
	"testing"

	"github.com/miekg/dns"

	"github.com/forkd/forkd/internal/netns"
)

// internet is what a daemon's host is connected to in a test: a network namespace for the host, and one with servers that stand for everybody
// else. Addresses are of documentation's ranges, but where private ones are what is tested.
type internet struct {
	t           *testing.T
	host, world string // names of the namespaces

	mu   sync.Mutex
	seen map[string]int                     // by server: how often somebody came
	held map[string]map[string]func(string) // by server and who came: how to say something to them
}

// Who is where.
const (
	hostAddr  = "203.0.113.2"
	goodAddr  = "198.51.100.10"
	badAddr   = "198.51.100.20"
	oddAddr   = "198.51.100.30" // of a name that is allowed for TCP only
	briefAddr = "198.51.100.40" // of a name whose answers hold no time at all
	rogueAddr = "198.51.100.53" // a resolver that says what it likes
	metaAddr  = "169.254.169.254"
	lanAddr   = "192.168.77.9"
	wideAddr  = "2001:db8:1::1"
	dnsAddr   = "203.0.113.1" // the resolver that the daemon asks
)

// zone is what the resolver knows.
var zone = map[string]string{
	"good.test.": goodAddr, "www.good.test.": goodAddr, "bad.test.": badAddr, "rebind.good.test.": metaAddr, "forged.good.test.": goodAddr,
	"odd.test.": oddAddr, "brief.test.": briefAddr,
}

func newInternet(t *testing.T) *internet {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("network namespaces need root")
	}
	n := &internet{t: t, host: fmt.Sprintf("fke-h%d", os.Getpid()), world: fmt.Sprintf("fke-w%d", os.Getpid()), seen: map[string]int{}, held: map[string]map[string]func(string){}}
	for _, ns := range []string{n.host, n.world} {
		n.ip("netns add " + ns)
		t.Cleanup(func() { _ = exec.Command("ip", "netns", "del", ns).Run() })
		n.ip("-n " + ns + " link set lo up")
	}
	n.ip("-n " + n.host + " link add eth0 type veth peer name eth0 netns " + n.world)
	for _, args := range []string{
		"-n H addr add " + hostAddr + "/24 dev eth0", "-n H addr add 2001:db8:1::2/64 dev eth0 nodad", "-n H link set eth0 up", "-n H route add default via " + dnsAddr,
		"-n W addr add " + dnsAddr + "/24 dev eth0", "-n W addr add " + wideAddr + "/64 dev eth0 nodad", "-n W link set eth0 up",
		"-n W addr add " + goodAddr + "/32 dev lo", "-n W addr add " + badAddr + "/32 dev lo", "-n W addr add " + rogueAddr + "/32 dev lo",
		"-n W addr add " + oddAddr + "/32 dev lo", "-n W addr add " + briefAddr + "/32 dev lo",
		"-n W addr add " + metaAddr + "/32 dev lo", "-n W addr add " + lanAddr + "/32 dev lo",
	} {
		n.ip(strings.Replace(strings.Replace(args, "-n H ", "-n "+n.host+" ", 1), "-n W ", "-n "+n.world+" ", 1))
	}
	for _, addr := range []string{goodAddr, badAddr, oddAddr, briefAddr, rogueAddr, metaAddr, lanAddr} {
		n.serve(n.world, addr, 80, 443, 8080)
	}
	n.serve(n.world, wideAddr, 80)
	n.serve(n.host, hostAddr, 80, 8080)
	n.resolve(dnsAddr, honest)
	n.resolve(rogueAddr, rogue)
	return n
}

func (n *internet) ip(args string) {
	n.t.Helper()
	if out, err := exec.Command("ip", strings.Fields(args)...).CombinedOutput(); err != nil {
		n.t.Fatalf("ip %s: %v: %s", args, err, out)
	}
}

func (n *internet) in(ns string, do func() error) {
	n.t.Helper()
	f, err := os.Open("/run/netns/" + ns)
	if err == nil {
		defer f.Close()
		err = netns.Do(f, do)
	}
	if err != nil {
		n.t.Fatalf("in %s: %v", ns, err)
	}
}

func (n *internet) note(server string) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.seen[server]++
}

func (n *internet) visits(server string) int {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.seen[server]
}

func (n *internet) hold(server string, from net.Addr, say func(string)) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.held[server] == nil {
		n.held[server] = map[string]func(string){}
	}
	n.held[server][from.String()] = say
}

// say has a server say something to all who ever came to it, unasked.
func (n *internet) say(server, text string) {
	n.mu.Lock()
	defer n.mu.Unlock()
	for _, say := range n.held[server] {
		say(text)
	}
}

// serve answers at an address: over TCP and UDP whoever comes gets back what was sent.
func (n *internet) serve(ns, addr string, ports ...int) {
	n.t.Helper()
	for _, port := range ports {
		at := netip.AddrPortFrom(netip.MustParseAddr(addr), uint16(port)).String()
		n.in(ns, func() error {
			var lc net.ListenConfig
			l, err := lc.Listen(context.Background(), "tcp", at)
			if err != nil {
				return err
			}
			p, err := lc.ListenPacket(context.Background(), "udp", at)
			if err != nil {
				return err
			}
			n.t.Cleanup(func() { l.Close(); p.Close() })
			go n.echoStreams(l)
			go n.echoPackets(p)
			return nil
		})
	}
}

func (n *internet) echoStreams(l net.Listener) {
	for {
		c, err := l.Accept()
		if err != nil {
			return
		}
		n.note("tcp " + l.Addr().String())
		n.hold("tcp "+l.Addr().String(), c.RemoteAddr(), func(text string) { _, _ = io.WriteString(c, text) })
		go func() { defer c.Close(); _, _ = io.Copy(c, c) }()
	}
}

func (n *internet) echoPackets(p net.PacketConn) {
	buf := make([]byte, 2048)
	for {
		size, from, err := p.ReadFrom(buf)
		if err != nil {
			return
		}
		n.note("udp " + p.LocalAddr().String())
		n.hold("udp "+p.LocalAddr().String(), from, func(text string) { _, _ = p.WriteTo([]byte(text), from) })
		_, _ = p.WriteTo(buf[:size], from)
	}
}

// resolve answers for names, over UDP and TCP.
func (n *internet) resolve(addr string, h dns.HandlerFunc) {
	n.t.Helper()
	n.in(n.world, func() error {
		var lc net.ListenConfig
		p, err := lc.ListenPacket(context.Background(), "udp", addr+":53")
		if err != nil {
			return err
		}
		l, err := lc.Listen(context.Background(), "tcp", addr+":53")
		if err != nil {
			return err
		}
		n.t.Cleanup(func() { l.Close(); p.Close() })
		go func() { _ = (&dns.Server{PacketConn: p, Handler: h}).ActivateAndServe() }()
		go func() { _ = (&dns.Server{Listener: l, Handler: h}).ActivateAndServe() }()
		return nil
	})
}

func record(name, addr string) dns.RR {
	ttl := uint32(60)
	if addr == briefAddr {
		ttl = 0
	}
	return &dns.A{Hdr: dns.RR_Header{Name: name, Rrtype: dns.TypeA, Class: dns.ClassINET, Ttl: ttl}, A: net.ParseIP(addr)}
}

// honest answers from the zone; for one name it puts in a word for another one.
func honest(w dns.ResponseWriter, q *dns.Msg) {
	m := new(dns.Msg).SetReply(q)
	name := strings.ToLower(q.Question[0].Name)
	addr, known := zone[name]
	switch {
	case !known:
		m.Rcode = dns.RcodeNameError
	case q.Question[0].Qtype == dns.TypeA:
		m.Answer = append(m.Answer, record(name, addr))
		if strings.HasPrefix(name, "forged.") {
			m.Answer = append(m.Answer, record("bad.test.", badAddr))
			m.Extra = append(m.Extra, record(name, badAddr))
		}
	}
	_ = w.WriteMsg(m)
}

// rogue says that every name is at the bad address.
func rogue(w dns.ResponseWriter, q *dns.Msg) {
	m := new(dns.Msg).SetReply(q)
	m.Answer = append(m.Answer, record(q.Question[0].Name, badAddr))
	_ = w.WriteMsg(m)
}

// args are the daemon's.
func (n *internet) setup(more ...string) setup {
	return setup{netns: "/run/netns/" + n.host, args: append([]string{"--networking", "on", "--network-pool", "4", "--dns", dnsAddr}, more...)}
}
