package hostnet

import (
	"encoding/binary"
	"fmt"
	"net/netip"
	"time"

	"github.com/vishvananda/netlink"
	nlns "github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"github.com/forkd/forkd/internal/netns"
	"github.com/forkd/forkd/internal/vmm"
)

// maxProdded bounds the connections that are told of a new policy. The others learn it when the guest speaks.
const maxProdded = 4096

// prodAgain is when they are told once more: a guest's kernel may not answer two such segments of a connection within half a second.
const prodAgain = 600 * time.Millisecond

// endForbidden has connections that an earlier policy let through meet the new one now, and not when somebody speaks next: the guest gets a
// segment that belongs to nothing, which a TCP must answer by saying where it is. That answer is let through, or refused with a reset that the
// guest believes. No byte passes that the policy forbids, whether this succeeds or not; what can't be told is only logged. Preconditions: s.mu is
// held, and the policy is in force.
func (s *Slot) endForbidden() {
	mark := s.applied.mark
	if !s.prod(mark) {
		return
	}
	s.net.work.Go(func() {
		select {
		case <-time.After(prodAgain):
		case <-s.net.life.Done():
			return
		}
		s.mu.Lock()
		defer s.mu.Unlock()
		if !s.released && s.applied.mark == mark {
			s.prod(mark)
		}
	})
}

// prod tells connections of an earlier policy of the one with a mark, and says whether there were any.
func (s *Slot) prod(mark uint32) bool {
	flows, err := s.flows()
	var first, second [][]byte
	if err == nil {
		for _, f := range flows {
			if seg, ok := prodding(f, mark); ok && len(first) < maxProdded {
				// Of two numbers this far apart one at least is not what the guest waits for.
				first, second = append(first, seg), append(second, otherNumber(seg))
			}
		}
		err = s.inject(append(first, second...))
	}
	if err != nil {
		s.net.log.Debug("connections end when they are used, not at once", "slot", s.number, "error", err)
	}
	return len(first) > 0
}

// flows are the connections that the namespace knows.
func (s *Slot) flows() ([]*netlink.ConntrackFlow, error) {
	h, err := netlink.NewHandleAt(nlns.NsHandle(s.ns.Fd()), unix.NETLINK_NETFILTER)
	if err != nil {
		return nil, fmt.Errorf("conntrack of a namespace: %w", err)
	}
	defer h.Close()
	flows, err := h.ConntrackTableList(netlink.ConntrackTable, unix.AF_INET)
	if err != nil {
		return nil, fmt.Errorf("conntrack: %w", err)
	}
	return flows, nil
}

// prodding is a segment for the guest's end of a connection that passed an earlier policy, as if it came from the other end.
func prodding(f *netlink.ConntrackFlow, mark uint32) ([]byte, bool) {
	from, ok1 := netip.AddrFromSlice(f.Forward.DstIP.To4())
	to, ok2 := netip.AddrFromSlice(f.Forward.SrcIP.To4())
	if f.Forward.Protocol != unix.IPPROTO_TCP || !ok1 || !ok2 || to != guestAddr || f.Mark == 0 || f.Mark == mark {
		return nil, false
	}
	return bareSegment(netip.AddrPortFrom(from, f.Forward.DstPort), netip.AddrPortFrom(to, f.Forward.SrcPort)), true
}

// Lengths of headers without options, and where TCP has its sequence number.
const (
	etherLen = 14
	ipLen    = 20
	tcpLen   = 20
	seqAt    = etherLen + ipLen + 4
	sumAt    = etherLen + ipLen + 16
)

// bareSegment is an Ethernet frame with a TCP segment that has nothing in it but its acknowledgement of nothing.
func bareSegment(from, to netip.AddrPort) []byte {
	b := make([]byte, etherLen+ipLen+tcpLen)
	copy(b, mustMAC(vmm.GuestMAC))
	copy(b[6:], gatewayMAC)
	binary.BigEndian.PutUint16(b[12:], unix.ETH_P_IP)
	ip := b[etherLen:]
	ip[0], ip[8], ip[9] = 0x45, 64, unix.IPPROTO_TCP
	binary.BigEndian.PutUint16(ip[2:], ipLen+tcpLen)
	copy(ip[saddrOffset:], from.Addr().AsSlice())
	copy(ip[daddrOffset:], to.Addr().AsSlice())
	binary.BigEndian.PutUint16(ip[10:], checksum(ip[:ipLen], 0))
	tcp := ip[ipLen:]
	binary.BigEndian.PutUint16(tcp[sportOffset:], from.Port())
	binary.BigEndian.PutUint16(tcp[dportOffset:], to.Port())
	tcp[12], tcp[13] = tcpLen/4<<4, 0x10 // ACK
	binary.BigEndian.PutUint16(tcp[16:], checksum(tcp, sum(ip[saddrOffset:ipLen])+unix.IPPROTO_TCP+tcpLen))
	return b
}

// otherNumber is the segment with a sequence number as far from its own as there can be.
func otherNumber(segment []byte) []byte {
	b := append([]byte{}, segment...)
	b[seqAt] ^= 0x80
	ip := b[etherLen:]
	binary.BigEndian.PutUint16(b[sumAt:], 0)
	binary.BigEndian.PutUint16(b[sumAt:], checksum(ip[ipLen:], sum(ip[saddrOffset:ipLen])+unix.IPPROTO_TCP+tcpLen))
	return b
}

// checksum is the one of IP and TCP; more is what is summed up besides.
func checksum(b []byte, more uint32) uint16 {
	total := sum(b) + more
	for total > 0xffff {
		total = total>>16 + total&0xffff
	}
	return ^uint16(total)
}

// sum adds up words of 16 bits. Preconditions: b is short, and its length even.
func sum(b []byte) (total uint32) {
	for i := 0; i < len(b); i += 2 {
		total += uint32(binary.BigEndian.Uint16(b[i:]))
	}
	return total
}

// inject sends frames to the guest, past all rules.
func (s *Slot) inject(frames [][]byte) error {
	if len(frames) == 0 {
		return nil
	}
	h, err := inside(s.ns)
	if err != nil {
		return err
	}
	defer h.Close()
	tap, err := h.LinkByName(tapName)
	if err != nil {
		return fmt.Errorf("tap: %w", err)
	}
	return netns.Do(s.ns, func() error {
		fd, err := unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			return fmt.Errorf("packet socket: %w", err)
		}
		defer unix.Close(fd)
		to := &unix.SockaddrLinklayer{Ifindex: tap.Attrs().Index, Protocol: htons(unix.ETH_P_IP), Halen: 6}
		copy(to.Addr[:], mustMAC(vmm.GuestMAC))
		for _, f := range frames {
			if err := unix.Sendto(fd, f, unix.MSG_DONTWAIT, to); err != nil {
				return fmt.Errorf("send to the tap: %w", err)
			}
		}
		return nil
	})
}

func htons(v uint16) uint16 { return v<<8 | v>>8 }
