package hostnet

import (
	"cmp"
	"encoding/binary"
	"fmt"
	"net/netip"
	"slices"
	"sync"
	"time"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"

	"github.com/forkd/forkd/internal/netpolicy"
)

// Status reads the counters.
func (s *Slot) Status() (netpolicy.Status, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	var out netpolicy.Status
	if s.released {
		return out, fmt.Errorf("network is gone")
	}
	if s.applied != nil {
		out.Policy = s.applied.policy
	}
	counters, err := s.counters()
	if err != nil {
		return out, err
	}
	out.DeniedAttempts, out.IPv6Packets = counters[deniedCount], counters[ipv6Count]
	out.ForgedPackets, out.MonitorPackets = counters[forgedCount], counters[monitorCount]
	elements, err := s.conn.GetSetElements(deniedElements())
	if err != nil {
		return out, fmt.Errorf("what was denied: %w", err)
	}
	for _, e := range elements {
		if d, ok := readDenied(e); ok {
			out.Denied = append(out.Denied, d)
		}
	}
	slices.SortFunc(out.Denied, func(a, b netpolicy.Denied) int {
		return cmp.Or(cmp.Compare(b.Attempts, a.Attempts), a.Addr.Compare(b.Addr), cmp.Compare(a.Port, b.Port))
	})
	out.DeniedNames = s.denials.list()
	out.SentBytes, out.ReceivedBytes, err = s.traffic()
	return out, err
}

// counters are the packets of all counters, by their names.
func (s *Slot) counters() (map[string]uint64, error) {
	out := map[string]uint64{}
	for _, t := range []*nftables.Table{table(), {Name: tableName, Family: nftables.TableFamilyNetdev}} {
		objs, err := s.conn.GetNamedObjects(t)
		if err != nil {
			return nil, fmt.Errorf("counters: %w", err)
		}
		for _, o := range objs {
			named, ok := o.(*nftables.NamedObj)
			if !ok {
				continue
			}
			if c, ok := named.Obj.(*expr.Counter); ok {
				out[named.Name] += c.Packets
			}
		}
	}
	return out, nil
}

func readDenied(e nftables.SetElement) (netpolicy.Denied, bool) {
	if len(e.Key) != 12 {
		return netpolicy.Denied{}, false
	}
	d := netpolicy.Denied{Addr: netip.AddrFrom4([4]byte(e.Key[:4])), Port: binary.BigEndian.Uint16(e.Key[8:10])}
	switch proto := e.Key[4]; proto {
	case unix.IPPROTO_TCP:
		d.Proto = "tcp"
	case unix.IPPROTO_UDP:
		d.Proto = "udp"
	case unix.IPPROTO_ICMP:
		d.Proto = "icmp"
	default:
		d.Proto = fmt.Sprint(proto)
	}
	if e.Counter != nil {
		d.Attempts = e.Counter.Packets
	}
	return d, true
}

// traffic is what went over the tap: what the guest sent is what the tap received.
func (s *Slot) traffic() (sent, received uint64, err error) {
	h, err := inside(s.ns)
	if err != nil {
		return 0, 0, err
	}
	defer h.Close()
	tap, err := h.LinkByName(tapName)
	if err != nil {
		return 0, 0, fmt.Errorf("tap: %w", err)
	}
	if stats := tap.Attrs().Statistics; stats != nil {
		return stats.RxBytes, stats.TxBytes, nil
	}
	return 0, 0, nil
}

// namesKept is how many names that were asked for in vain are remembered.
const namesKept = 256

// denials remembers names that were asked for in vain: those that were asked for last.
type denials struct {
	mu    sync.Mutex
	names map[string]netpolicy.DeniedName
}

func (d *denials) note(name string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.names == nil {
		d.names = map[string]netpolicy.DeniedName{}
	}
	n, known := d.names[name]
	if !known && len(d.names) >= namesKept {
		oldest := netpolicy.DeniedName{Last: time.Now()}
		for _, other := range d.names {
			if other.Last.Before(oldest.Last) {
				oldest = other
			}
		}
		delete(d.names, oldest.Name)
	}
	d.names[name] = netpolicy.DeniedName{Name: name, Count: n.Count + 1, Last: time.Now()}
}

func (d *denials) list() []netpolicy.DeniedName {
	d.mu.Lock()
	defer d.mu.Unlock()
	var all []netpolicy.DeniedName
	for _, n := range d.names {
		all = append(all, n)
	}
	slices.SortFunc(all, func(a, b netpolicy.DeniedName) int {
		return cmp.Or(cmp.Compare(b.Count, a.Count), cmp.Compare(a.Name, b.Name))
	})
	return all
}
