package hostnet

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"sync"

	"github.com/google/nftables"

	"github.com/forkd/forkd/internal/netns"
	"github.com/forkd/forkd/internal/netpolicy"
	"github.com/forkd/forkd/internal/vmm"
)

// Slot is the network of one machine.
type Slot struct {
	net    *Network
	number int
	stray  netip.Addr // its own address, if that is of another daemon's range
	ns     *os.File
	tap    *os.File // nil once the monitor has it, or when an earlier daemon gave it away; engines may close it

	mu       sync.Mutex
	conn     *nftables.Conn
	applied  *applied // nil: nothing yet, which is none
	names    *resolver
	denials  *denials // of names
	learned  *answers
	limited  int // bandwidth that is set, in Mbit/s; unknown: what an earlier daemon set
	released bool
}

// makeSlot makes a network that nothing passes.
func (n *Network) makeSlot() (_ *Slot, err error) {
	s := &Slot{net: n, denials: &denials{}, learned: newAnswers()}
	if s.ns, s.tap, err = newNamespace(); err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			s.destroy()
		}
	}()
	// Before there is a way out, the rules.
	if s.conn, err = nftables.New(nftables.WithNetNSFd(int(s.ns.Fd())), nftables.AsLasting()); err != nil {
		return nil, fmt.Errorf("nftables of a namespace: %w", err)
	}
	if err := setUpTap(s.ns); err != nil {
		return nil, err
	}
	if err := makeTables(s.conn, n.hostAddrs()); err != nil {
		return nil, fmt.Errorf("rules of a namespace: %w", err)
	}
	if s.number, err = n.plug(s.ns); err != nil {
		return nil, err
	}
	return s, nil
}

// newNamespace makes a namespace that only its file keeps alive, with a tap in it.
func newNamespace() (ns, tap *os.File, err error) {
	ns, err = netns.New(func() (err error) {
		if tap, err = netns.OpenTap(vmm.TapName); err != nil {
			return err
		}
		return setSysctls(namespaceSysctls)
	})
	if err != nil {
		closeFile(tap)
		return nil, nil, err
	}
	return ns, tap, nil
}

func closeFile(f *os.File) {
	if f != nil {
		_ = f.Close()
	}
}

// namespaceSysctls are settings of a slot's namespace.
var namespaceSysctls = map[string]string{
	"ipv6/conf/all/disable_ipv6":          "1",
	"ipv6/conf/default/disable_ipv6":      "1",
	"ipv4/ip_forward":                     "1",
	"ipv4/conf/all/send_redirects":        "0",
	"ipv4/conf/all/accept_redirects":      "0",
	"ipv4/conf/" + tapName + "/rp_filter": "1",
}

// setSysctls sets what there is to set in the namespace of this thread.
func setSysctls(values map[string]string) error {
	for name, value := range values {
		err := os.WriteFile("/proc/sys/net/"+name, []byte(value), 0o644)
		if errors.Is(err, os.ErrNotExist) && name[:4] == "ipv6" {
			continue // a kernel without it
		}
		if err != nil {
			return fmt.Errorf("set net/%s: %w", name, err)
		}
	}
	return nil
}

// NIC is what a monitor needs. It may be asked for once, and Started must be called when the monitor runs.
func (s *Slot) NIC() *vmm.NIC { return &vmm.NIC{Tap: s.tap, NetNS: s.ns} }

// GuestAddr is the guest's address in its network.
func (s *Slot) GuestAddr() string { return guestAddr.String() }

// Started gives up our side of the tap: the monitor has it.
func (s *Slot) Started() {
	closeFile(s.tap)
	s.tap = nil
}

// SetPolicy makes p what the guest may reach, in one step. Connections that p does not allow end with it.
func (s *Slot) SetPolicy(_ context.Context, p netpolicy.Policy) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.setLocked(p)
}

func (s *Slot) setLocked(p netpolicy.Policy) error {
	if s.released {
		return net.ErrClosed
	}
	if s.applied == nil && p.IsNone() && p.BandwidthMbit == 0 {
		return nil // as it was made
	}
	mark := uint32(1)
	if s.applied != nil {
		mark = s.applied.mark%(1<<31-1) + 1
	}
	next, err := newApplied(p, mark)
	if err != nil {
		return err
	}
	was := s.applied
	if err := s.put(next, func() { was.forget(s.conn) }); err != nil {
		return err
	}
	if was != nil {
		s.endForbidden()
	}
	return nil
}

// put has the kernel hold a policy in the place of what it holds: the one way for a policy that is set, and for one that an earlier daemon did.
// forget adds to the step what removes the one before. Preconditions: s.mu is held.
func (s *Slot) put(next *applied, forget func()) error {
	// The way to the host is opened first and closed last: what is between is kept by the namespace's rules.
	host := s.net.hostAddrs()
	if err := s.net.openHost(s.number, next.named(), host); err != nil {
		return fmt.Errorf("network policy: the host's rules: %w", err)
	}
	if err := s.limit(next.policy.BandwidthMbit); err != nil {
		return err
	}
	if err := s.answer(next.policy); err != nil {
		return err
	}
	if err := next.replace(s.conn, forget, host, s.learned); err != nil {
		return fmt.Errorf("network policy: %w", err)
	}
	s.applied = next
	return nil
}

// answer has the guest's questions for names answered if the policy p needs that.
func (s *Slot) answer(p netpolicy.Policy) (err error) {
	if p.IsNone() || s.names != nil {
		return nil
	}
	if s.names, err = startResolver(s); err != nil {
		return fmt.Errorf("network policy: resolver: %w", err)
	}
	return nil
}

// Release gives the slot up. Preconditions: its monitor has ended, or never started. It may be called twice.
func (s *Slot) Release() {
	s.mu.Lock()
	done := s.released
	s.released = true
	s.mu.Unlock()
	if !done {
		s.net.retire(s)
	}
}

// destroy removes what there is of a slot. The namespace goes when the kernel has time.
func (s *Slot) destroy() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.released = true
	s.let()
	if s.number != 0 {
		s.net.unplug(s.number)
	}
	if s.stray.IsValid() {
		s.net.dropStray(s.stray)
	}
}

// let closes what the daemon has of a slot and leaves the network itself alone.
func (s *Slot) let() {
	if s.names != nil {
		s.names.close()
		s.names = nil
	}
	if s.conn != nil {
		_ = s.conn.CloseLasting()
	}
	closeFile(s.tap)
	closeFile(s.ns)
	s.tap, s.conn = nil, nil
}
