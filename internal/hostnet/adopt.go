package hostnet

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"time"

	"github.com/google/nftables"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/forkd/forkd/internal/netpolicy"
)

// Adopt takes over the network of a monitor that an earlier daemon started. Its kernel has held the policy meanwhile; p is put in its place if it
// is another one. It returns nil when the process is in no network of ours. Preconditions: the process lives while this is called.
func (n *Network) Adopt(pid int, p netpolicy.Policy) (*Slot, error) {
	ns, err := os.Open(fmt.Sprintf("/proc/%d/ns/net", pid))
	if err != nil {
		return nil, fmt.Errorf("network of process %d: %w", pid, err)
	}
	if has, err := hasUplink(ns); err != nil || !has {
		_ = ns.Close()
		return nil, err
	}
	s := &Slot{net: n, ns: ns, denials: &denials{}, learned: newAnswers(), limited: unknown}
	if err := s.takeOver(p); err != nil {
		s.let()
		return nil, fmt.Errorf("network of process %d: %w", pid, err)
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	n.live[s] = true
	return s, nil
}

// hasUplink says whether a namespace was made by this package.
func hasUplink(ns *os.File) (bool, error) {
	h, err := inside(ns)
	if err != nil {
		return false, err
	}
	defer h.Close()
	_, err = h.LinkByName(uplinkName)
	var none netlink.LinkNotFoundError
	if errors.As(err, &none) {
		return false, nil
	}
	return err == nil, err
}

func (s *Slot) takeOver(p netpolicy.Policy) (err error) {
	var addr netip.Addr
	if s.number, addr, err = s.net.numberOf(s.ns); err != nil {
		return err
	}
	if !s.net.cfg.Range.Contains(addr) {
		if err := s.net.hideStray(addr); err != nil {
			return fmt.Errorf("host's rules for %s, which is of another range: %w", addr, err)
		}
		s.stray = addr
	}
	if err := s.net.own(s.number, true); err != nil {
		return fmt.Errorf("host's rules: %w", err)
	}
	if s.conn, err = nftables.New(nftables.WithNetNSFd(int(s.ns.Fd())), nftables.AsLasting()); err != nil {
		return fmt.Errorf("nftables: %w", err)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	held, mark, err := s.readHeld()
	if err != nil {
		return err
	}
	if held != digest(p) {
		return s.replaceUnknown(p, mark)
	}
	if s.applied, err = newApplied(p, mark); err != nil {
		return err
	}
	if err := s.readLearned(); errors.Is(err, unix.ENOENT) { // an older daemon's table is not as ours
		return s.replaceUnknown(p, mark)
	} else if err != nil {
		return err
	}
	if err := s.net.openHost(s.number, s.applied.named(), s.net.hostAddrs()); err != nil {
		return err
	}
	return s.answer(p)
}

// readHeld finds out which policy the namespace's table holds. One that has never had any is as it was made.
func (s *Slot) readHeld() (policy string, mark uint32, err error) {
	chains, err := s.conn.ListChainsOfTableFamily(nftables.TableFamilyINet)
	if err != nil {
		return "", 0, fmt.Errorf("its rules: %w", err)
	}
	ours := false
	for _, c := range chains {
		if c.Table.Name != tableName {
			continue
		}
		ours = ours || c.Name == chainForward
		if m, p, ok := readSeal(c.Name); ok {
			policy, mark = p, m
		}
	}
	if !ours {
		return "", 0, fmt.Errorf("it has no rules of ours")
	}
	return policy, mark, nil
}

// replaceUnknown puts a policy in the place of one that is not known but by the number of its mark.
func (s *Slot) replaceUnknown(p netpolicy.Policy, mark uint32) error {
	sets, err := s.conn.GetSets(table())
	if err != nil {
		return fmt.Errorf("its sets: %w", err)
	}
	chains, err := s.conn.ListChainsOfTableFamily(nftables.TableFamilyINet)
	if err != nil {
		return fmt.Errorf("its rules: %w", err)
	}
	next, err := newApplied(p, mark%(1<<31-1)+1)
	if err != nil {
		return err
	}
	return s.put(next, func() {
		for _, c := range chains {
			if _, _, seal := readSeal(c.Name); seal && c.Table.Name == tableName {
				s.conn.DelChain(&nftables.Chain{Name: c.Name, Table: table()})
			}
		}
		for _, set := range sets {
			if isDomainSet(set.Name) {
				s.conn.DelSet(&nftables.Set{Name: set.Name, Table: table()})
			}
		}
	})
}

// readLearned reads which addresses the domains have led to. Which of the names below a wildcard it was is not known any more.
func (s *Slot) readLearned() error {
	for _, d := range s.applied.domains {
		held, err := s.conn.GetSetElements(s.applied.heldSet(d))
		if err != nil {
			return fmt.Errorf("addresses that %s has led to: %w", d, err)
		}
		live, err := s.conn.GetSetElements(s.applied.domainSet(d))
		if err != nil {
			return fmt.Errorf("addresses of %s: %w", d, err)
		}
		for _, e := range append(held, live...) {
			if a, ok := netip.AddrFromSlice(e.Key); ok {
				s.learned.note(d, a, time.Now().Add(e.Expires)) // of what is held no time is known: it is over
			}
		}
	}
	return nil
}
