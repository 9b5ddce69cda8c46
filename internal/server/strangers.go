package server

import (
	"net/http"
	"net/netip"
	"sync"
	"time"

	"golang.org/x/time/rate"
)

// How often an address may come without a valid key. Somebody with an old key in a loop stays below it; what is beyond is not even recorded.
const (
	strangerRate  = 5 // a second
	strangerBurst = 1000
	strangerRetry = 10 * time.Second
	maxStrangers  = 4096 // addresses that are remembered
)

// strangers counts requests without a valid key, by address.
type strangers struct {
	mu     sync.Mutex
	byAddr map[netip.Prefix]*rate.Limiter
	rest   *rate.Limiter // of those that can't be told apart any more
}

func newStrangers() *strangers {
	return &strangers{byAddr: map[netip.Prefix]*rate.Limiter{}, rest: rate.NewLimiter(strangerRate, strangerBurst)}
}

// tooMany counts a request and says whether it is beyond what its address may make.
func (s *strangers) tooMany(remote string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return !s.limiterLocked(remote).Allow()
}

// countStranger counts a request of somebody who is not known, once. Of those beyond what an address may make none is recorded: else whoever reaches
// the port could fill the disk.
func (s *Server) countStranger(r *http.Request, n *note) (tooMany bool) {
	if !n.counted {
		n.counted = true
		n.unrecorded = s.strangers.tooMany(r.RemoteAddr)
	}
	return n.unrecorded
}

// limiterLocked finds the limiter of an address; of IPv6 a host has a whole /64.
func (s *strangers) limiterLocked(remote string) *rate.Limiter {
	at, err := netip.ParseAddrPort(remote)
	if err != nil {
		return s.rest
	}
	addr, bits := at.Addr().Unmap(), 32
	if addr.Is6() {
		bits = 64
	}
	prefix, err := addr.WithZone("").Prefix(bits)
	if err != nil {
		return s.rest
	}
	if l := s.byAddr[prefix]; l != nil {
		return l
	}
	if len(s.byAddr) >= maxStrangers {
		for p, l := range s.byAddr { // those that were quiet since are like new ones
			if l.Tokens() >= strangerBurst {
				delete(s.byAddr, p)
			}
		}
	}
	if len(s.byAddr) >= maxStrangers {
		return s.rest
	}
	l := rate.NewLimiter(strangerRate, strangerBurst)
	s.byAddr[prefix] = l
	return l
}
