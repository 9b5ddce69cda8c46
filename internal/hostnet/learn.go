package hostnet

import (
	"errors"
	"net"
	"net/netip"
	"time"

	"github.com/google/nftables"
	"golang.org/x/sys/unix"

	"github.com/forkd/forkd/internal/netpolicy"
)

// How long an address may be reached that a name led to: as long as its answer holds, and a little for who has just got it.
const (
	maxTTL     = time.Hour
	learnGrace = 5 * time.Second
	maxLearned = 4096 // addresses of one domain
)

// mayAsk says whether the guest may know a name.
func (s *Slot) mayAsk(name string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.applied == nil || s.released {
		return false
	}
	switch s.applied.policy.Mode {
	case netpolicy.Open:
		return true
	case netpolicy.Allow:
		for _, d := range s.applied.domains {
			if (netpolicy.Rule{Domain: d}).MatchName(name) {
				return true
			}
		}
	}
	return false
}

// learn lets the guest reach addresses that a name led to, by the rules that have the name. What is protected stays so: those rules come first,
// and it is not even noted here. What a policy without that name has led to is remembered for the one that comes after it.
func (s *Slot) learn(name string, addrs []netip.Addr, ttl time.Duration) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.released || s.applied == nil {
		return net.ErrClosed
	}
	until := time.Now().Add(ttl + learnGrace)
	for _, a := range addrs {
		if netpolicy.IsProtected(a) {
			continue
		}
		for _, d := range s.applied.domains {
			if !(netpolicy.Rule{Domain: d}).MatchName(name) || !s.learned.until(d, a).Before(until) {
				continue
			}
			if err := s.learnOne(s.applied.domainSet(d), a, until); err != nil {
				return err
			}
			if err := s.hold(s.applied.heldSet(d), a); err != nil {
				return err
			}
		}
		s.learned.note(name, a, until)
	}
	return nil
}

// learnOne puts an address into a set, or makes it stay longer there. An element's time can't be changed everywhere: it is replaced, in one step.
func (s *Slot) learnOne(set *nftables.Set, addr netip.Addr, until time.Time) error {
	element := []nftables.SetElement{{Key: addr.AsSlice(), Timeout: time.Until(until).Round(time.Millisecond)}}
	err := errors.Join(s.conn.SetDeleteElements(set, element), s.conn.SetAddElements(set, element), s.conn.Flush())
	if errors.Is(err, unix.ENOENT) { // it is not there
		err = errors.Join(s.conn.SetAddElements(set, element), s.conn.Flush())
	}
	return err
}

// hold has the kernel remember, for a daemon that takes over, what a domain has led to, as long as there is room.
func (s *Slot) hold(set *nftables.Set, addr netip.Addr) error {
	if s.learned.count >= answersKept {
		return nil
	}
	return errors.Join(s.conn.SetAddElements(set, []nftables.SetElement{{Key: addr.AsSlice()}}), s.conn.Flush())
}
