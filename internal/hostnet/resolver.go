package hostnet

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"strings"
	"time"

	"github.com/miekg/dns"

	"github.com/forkd/forkd/internal/netns"
)

// Bounds of what a guest can make the daemon do.
const (
	queriesAtOnce = 32 // of one guest; more are dropped, and asked again
	connsAtOnce   = 8  // of one guest, over TCP
	queryLimit    = 5 * time.Second
)

// resolver answers a guest, inside its namespace, for the names that its policy has.
type resolver struct {
	slot    *Slot
	packets net.PacketConn
	stream  net.Listener
	busy    chan struct{}
	life    context.Context
	end     context.CancelFunc
}

// startResolver listens where the guest expects its name server.
func startResolver(s *Slot) (*resolver, error) {
	r := &resolver{slot: s, busy: make(chan struct{}, queriesAtOnce)}
	address := netip.AddrPortFrom(gatewayAddr, 53).String()
	err := netns.Do(s.ns, func() (err error) {
		var lc net.ListenConfig
		if r.packets, err = lc.ListenPacket(context.Background(), "udp4", address); err != nil {
			return err
		}
		r.stream, err = lc.Listen(context.Background(), "tcp4", address)
		return err
	})
	if err != nil {
		if r.packets != nil {
			_ = r.packets.Close()
		}
		return nil, err
	}
	r.life, r.end = context.WithCancel(s.net.life)
	stream := &boundedListener{Listener: r.stream, slots: make(chan struct{}, connsAtOnce)}
	// They end when their sockets are closed.
	go func() { _ = (&dns.Server{PacketConn: r.packets, Handler: r}).ActivateAndServe() }()
	go func() { _ = (&dns.Server{Listener: stream, Handler: r, MaxTCPQueries: 128}).ActivateAndServe() }()
	return r, nil
}

func (r *resolver) close() {
	r.end()
	_ = r.packets.Close()
	_ = r.stream.Close()
}

// ServeDNS implements dns.Handler.
func (r *resolver) ServeDNS(w dns.ResponseWriter, query *dns.Msg) {
	select {
	case r.busy <- struct{}{}:
		defer func() { <-r.busy }()
	default:
		return
	}
	ctx, cancel := context.WithTimeout(r.life, queryLimit)
	defer cancel()
	answer := r.answer(ctx, query)
	size := dns.MaxMsgSize
	if w.LocalAddr().Network() == "udp" {
		size = dns.MinMsgSize
		if opt := query.IsEdns0(); opt != nil {
			size = min(max(int(opt.UDPSize()), dns.MinMsgSize), 1232)
		}
	}
	answer.Truncate(size)
	_ = w.WriteMsg(answer) // the guest asks again
}

// answer is what a guest is told. Names that its policy does not have don't exist; neither do addresses of IPv6.
func (r *resolver) answer(ctx context.Context, query *dns.Msg) *dns.Msg {
	out := new(dns.Msg).SetReply(query)
	out.RecursionAvailable = true
	if query.Opcode != dns.OpcodeQuery || len(query.Question) != 1 || query.Question[0].Qclass != dns.ClassINET {
		out.Rcode = dns.RcodeNotImplemented
		return out
	}
	q := query.Question[0]
	name := strings.TrimSuffix(strings.ToLower(q.Name), ".")
	if !r.slot.mayAsk(name) {
		r.slot.denials.note(name)
		out.Rcode = dns.RcodeNameError
		return out
	}
	switch q.Qtype {
	case dns.TypeAAAA, dns.TypeHTTPS, dns.TypeSVCB: // they would lead past what is allowed here
		return out
	case dns.TypeANY, dns.TypeAXFR, dns.TypeIXFR:
		out.Rcode = dns.RcodeNotImplemented
		return out
	}
	got, err := r.slot.net.upstream.ask(ctx, q)
	if err != nil {
		r.slot.net.log.Debug("a name was not resolved", "name", name, "error", err)
		out.Rcode = dns.RcodeServerFailure
		return out
	}
	out.Rcode = got.Rcode
	out.Answer = relevant(q, got.Answer)
	addrs, ttl := addresses(out.Answer)
	if len(addrs) > 0 {
		if err := r.slot.learn(name, addrs, ttl); err != nil {
			r.slot.net.log.Warn("an address can't be let through", "name", name, "error", err)
			out.Rcode, out.Answer = dns.RcodeServerFailure, nil
		}
	}
	return out
}

// maxChain bounds the aliases that are followed, maxAnswers the records of an answer.
const (
	maxChain   = 16
	maxAnswers = 64
)

// relevant are the records that answer a question: those of its name, and of the names that it is an alias of. All others are nobody's business.
func relevant(q dns.Question, records []dns.RR) []dns.RR {
	name := q.Name
	var out []dns.RR
	for range maxChain {
		next := ""
		for _, rr := range records {
			h := rr.Header()
			if !strings.EqualFold(h.Name, name) || h.Class != dns.ClassINET || len(out) >= maxAnswers {
				continue
			}
			if alias, ok := rr.(*dns.CNAME); ok && q.Qtype != dns.TypeCNAME {
				out = append(out, rr)
				next = alias.Target
				break
			}
			if h.Rrtype == q.Qtype {
				out = append(out, rr)
			}
		}
		if next == "" {
			break
		}
		name = next
	}
	return out
}

// addresses are those in an answer, and for how long it holds.
func addresses(records []dns.RR) (addrs []netip.Addr, ttl time.Duration) {
	least := uint32(maxTTL / time.Second)
	for _, rr := range records {
		least = min(least, rr.Header().Ttl)
		if a, ok := rr.(*dns.A); ok {
			if addr, ok := netip.AddrFromSlice(a.A.To4()); ok {
				addrs = append(addrs, addr)
			}
		}
	}
	for _, rr := range records {
		rr.Header().Ttl = min(rr.Header().Ttl, uint32(maxTTL/time.Second))
	}
	return addrs, time.Duration(least) * time.Second
}

// boundedListener takes a few connections at a time.
type boundedListener struct {
	net.Listener
	slots chan struct{}
}

// Accept implements net.Listener. What is too many is closed at once.
func (l *boundedListener) Accept() (net.Conn, error) {
	for {
		c, err := l.Listener.Accept()
		if err != nil {
			return nil, err
		}
		select {
		case l.slots <- struct{}{}:
			return &boundedConn{Conn: c, slots: l.slots}, nil
		default:
			_ = c.Close()
		}
	}
}

type boundedConn struct {
	net.Conn
	slots chan struct{}
}

// Close implements net.Conn.
func (c *boundedConn) Close() error {
	err := c.Conn.Close()
	if !errors.Is(err, net.ErrClosed) {
		<-c.slots
	}
	return err
}
