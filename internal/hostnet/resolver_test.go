package hostnet

import (
	"net"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/miekg/dns"

	"github.com/forkd/forkd/internal/netpolicy"
)

func rr(t *testing.T, text string) dns.RR {
	t.Helper()
	r, err := dns.NewRR(text)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

// TestRelevant takes of an answer what answers the question, and nothing that a server would like to say besides.
func TestRelevant(t *testing.T) {
	records := []dns.RR{
		rr(t, "www.good.test. 60 IN CNAME edge.cdn.test."), rr(t, "bad.test. 60 IN A 192.0.2.66"), rr(t, "edge.cdn.test. 60 IN A 192.0.2.1"),
		rr(t, "EDGE.cdn.test. 60 IN A 192.0.2.2"), rr(t, "other.cdn.test. 60 IN A 192.0.2.67"), rr(t, "edge.cdn.test. 60 IN AAAA 2001:db8::1"),
	}
	got := relevant(dns.Question{Name: "www.good.test.", Qtype: dns.TypeA}, records)
	addrs, ttl := addresses(got)
	if len(got) != 3 || len(addrs) != 2 || addrs[0] != netip.MustParseAddr("192.0.2.1") || addrs[1] != netip.MustParseAddr("192.0.2.2") || ttl != time.Minute {
		t.Errorf("= %v, %v, %v", got, addrs, ttl)
	}
	loop := []dns.RR{rr(t, "a.test. 60 IN CNAME b.test."), rr(t, "b.test. 60 IN CNAME a.test.")}
	if got := relevant(dns.Question{Name: "a.test.", Qtype: dns.TypeA}, loop); len(got) > maxChain {
		t.Errorf("a loop of aliases gives %d records", len(got))
	}
}

// TestResolver asks as a guest does: what is allowed is answered and may be reached for as long as the answer holds; all else does not exist.
func TestResolver(t *testing.T) {
	if outside(t) {
		return
	}
	run(t, "ip", "link", "set", "lo", "up")
	server, err := net.ListenPacket("udp", "127.0.0.1:53")
	if err != nil {
		t.Fatal(err)
	}
	asked := make(chan string, 16)
	go func() {
		_ = (&dns.Server{PacketConn: server, Handler: dns.HandlerFunc(func(w dns.ResponseWriter, q *dns.Msg) {
			asked <- q.Question[0].Name
			m := new(dns.Msg).SetReply(q)
			m.Answer = append(m.Answer, rr(t, q.Question[0].Name+" 3000 IN A 192.0.2.1"), rr(t, q.Question[0].Name+" 3000 IN A 169.254.169.254"),
				rr(t, "elsewhere.test. 3000 IN A 192.0.2.66"))
			if strings.HasPrefix(q.Question[0].Name, "lie.") {
				m.Question[0].Name = "truth.test."
			}
			_ = w.WriteMsg(m)
		})}).ActivateAndServe()
	}()
	defer server.Close()
	s := acquire(t, open(t, Config{Servers: []string{"127.0.0.1"}}))
	if err := s.SetPolicy(t.Context(), netpolicy.Policy{Mode: netpolicy.Allow, Rules: []string{"*.good.test"}}); err != nil {
		t.Fatal(err)
	}
	ask := func(name string, kind uint16) *dns.Msg {
		return s.names.answer(t.Context(), new(dns.Msg).SetQuestion(name, kind))
	}
	if m := ask("WWW.good.test.", dns.TypeA); m.Rcode != dns.RcodeSuccess || len(m.Answer) != 2 {
		t.Errorf("an allowed name: %v", m)
	}
	<-asked
	set := in(t, s, "nft", "list", "set", "inet", tableName, s.applied.domainSet("*.good.test").Name)
	if !strings.Contains(set, "192.0.2.1 timeout 50m5s") || strings.Contains(set, "169.254") || strings.Contains(set, "192.0.2.66") {
		t.Errorf("what may be reached:\n%s", set)
	}
	if m := ask("lie.good.test.", dns.TypeA); m.Rcode != dns.RcodeServerFailure || len(m.Answer) != 0 {
		t.Errorf("an answer to another question: %v", m)
	}
	<-asked
	for _, name := range []string{"good.test.", "bad.test.", "good.test.evil.org.", "1.0.0.127.in-addr.arpa."} {
		if m := ask(name, dns.TypeA); m.Rcode != dns.RcodeNameError {
			t.Errorf("%s: %v", name, m)
		}
	}
	for _, kind := range []uint16{dns.TypeAAAA, dns.TypeHTTPS, dns.TypeSVCB} {
		if m := ask("www.good.test.", kind); m.Rcode != dns.RcodeSuccess || len(m.Answer) != 0 {
			t.Errorf("a record of kind %d: %v", kind, m)
		}
	}
	if n := len(asked); n != 0 {
		t.Errorf("%d more questions went out: %s …", n, <-asked)
	}
	if names := s.denials.list(); len(names) != 4 {
		t.Errorf("names that were asked for in vain: %v", names)
	}
}
