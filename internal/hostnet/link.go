package hostnet

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"net/netip"
	"os"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	nlns "github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"github.com/forkd/forkd/internal/vmm"
)

func mustMAC(s string) net.HardwareAddr {
	mac, err := net.ParseMAC(s)
	if err != nil {
		panic(err) // a constant
	}
	return mac
}

func ipNet(p netip.Prefix) *net.IPNet {
	return &net.IPNet{IP: p.Addr().AsSlice(), Mask: net.CIDRMask(p.Bits(), 32)}
}

func host32(a netip.Addr) *net.IPNet { return ipNet(netip.PrefixFrom(a, 32)) }

// inside is a connection to the kernel's side of links in a namespace.
func inside(ns *os.File) (*netlink.Handle, error) {
	h, err := netlink.NewHandleAt(nlns.NsHandle(ns.Fd()), unix.NETLINK_ROUTE)
	if err != nil {
		return nil, fmt.Errorf("netlink of a namespace: %w", err)
	}
	return h, nil
}

// setUpTap gives the tap its addresses, and brings it and the loopback device up.
func setUpTap(ns *os.File) error {
	h, err := inside(ns)
	if err != nil {
		return err
	}
	defer h.Close()
	lo, err := h.LinkByName("lo")
	if err == nil {
		err = h.LinkSetUp(lo)
	}
	if err != nil {
		return fmt.Errorf("loopback of a namespace: %w", err)
	}
	tap, err := h.LinkByName(tapName)
	if err != nil {
		return fmt.Errorf("tap: %w", err)
	}
	steps := []func() error{
		func() error { return h.LinkSetHardwareAddr(tap, gatewayMAC) },
		func() error { return h.LinkSetUp(tap) },
		func() error {
			return h.AddrAdd(tap, &netlink.Addr{IPNet: ipNet(netip.PrefixFrom(gatewayAddr, guestNet.Bits()))})
		},
		func() error { return h.NeighSet(neighbour(tap, guestAddr, mustMAC(vmm.GuestMAC))) },
	}
	for _, step := range steps {
		if err := step(); err != nil {
			return fmt.Errorf("set up a tap: %w", err)
		}
	}
	return nil
}

func neighbour(link netlink.Link, addr netip.Addr, mac net.HardwareAddr) *netlink.Neigh {
	return &netlink.Neigh{LinkIndex: link.Attrs().Index, State: netlink.NUD_PERMANENT, IP: addr.AsSlice(), HardwareAddr: mac, Family: unix.AF_INET}
}

// maxSlots is how many numbers there are for slots of all daemons in a host's network namespace, beginning with 1.
const maxSlots = 1<<16 - 2

// slotAddr is a slot's own address on the host.
func (n *Network) slotAddr(number int) netip.Addr {
	base := n.cfg.Range.Masked().Addr().As4()
	base[2], base[3] = byte(number>>8), byte(number)
	return netip.AddrFrom4(base)
}

func hostLink(number int) string { return fmt.Sprintf("%s%04x", hostPrefix, number) }

// plug connects a namespace with the host and returns the slot's number. The name of the device on the host, of which there can be only one,
// is what keeps two daemons from giving a number to two slots.
func (n *Network) plug(ns *os.File) (int, error) {
	for range maxSlots {
		number := n.nextNumber()
		veth := &netlink.Veth{
			LinkAttrs:        netlink.LinkAttrs{Name: hostLink(number), HardwareAddr: hostMAC},
			PeerName:         uplinkName,
			PeerHardwareAddr: slotMAC,
			PeerNamespace:    netlink.NsFd(ns.Fd()),
		}
		err := netlink.LinkAdd(veth)
		if errors.Is(err, unix.EEXIST) {
			continue
		}
		if err != nil {
			return 0, fmt.Errorf("make a veth pair: %w", err)
		}
		err = n.setUpHostSide(number)
		if err == nil {
			err = n.setUpUplink(ns, n.slotAddr(number))
		}
		if err != nil {
			n.unplug(number)
			return 0, err
		}
		return number, nil
	}
	return 0, errors.New("all numbers of network slots are taken: end sandboxes, or make pools smaller")
}

// setUpHostSide puts the host's end under the host's rules before it comes up.
func (n *Network) setUpHostSide(number int) error {
	link, err := netlink.LinkByName(hostLink(number))
	if err != nil {
		return fmt.Errorf("veth pair: %w", err)
	}
	if err := n.own(number, true); err != nil {
		return fmt.Errorf("host's rules: %w", err)
	}
	addr := n.slotAddr(number)
	steps := []func() error{
		func() error {
			return setSysctls(map[string]string{
				"ipv6/conf/" + hostLink(number) + "/disable_ipv6":     "1",
				"ipv4/conf/" + hostLink(number) + "/rp_filter":        "1",
				"ipv4/conf/" + hostLink(number) + "/accept_redirects": "0",
			})
		},
		func() error { return netlink.LinkSetUp(link) },
		func() error { return netlink.NeighSet(neighbour(link, addr, slotMAC)) },
		func() error {
			return netlink.RouteAdd(&netlink.Route{LinkIndex: link.Attrs().Index, Dst: host32(addr), Scope: netlink.SCOPE_LINK})
		},
	}
	for _, step := range steps {
		if err := step(); err != nil {
			return fmt.Errorf("set up %s: %w", hostLink(number), err)
		}
	}
	return nil
}

// setUpUplink gives a namespace its own address and the way out.
func (n *Network) setUpUplink(ns *os.File, addr netip.Addr) error {
	h, err := inside(ns)
	if err != nil {
		return err
	}
	defer h.Close()
	up, err := h.LinkByName(uplinkName)
	if err != nil {
		return fmt.Errorf("uplink: %w", err)
	}
	steps := []func() error{
		func() error { return endOffloads(ns) },
		func() error { return h.LinkSetUp(up) },
		func() error { return h.AddrAdd(up, &netlink.Addr{IPNet: host32(addr)}) },
		func() error { return h.NeighSet(neighbour(up, nextHop, hostMAC)) },
		func() error {
			return h.RouteAdd(&netlink.Route{LinkIndex: up.Attrs().Index, Gw: nextHop.AsSlice(), Flags: int(netlink.FLAG_ONLINK)})
		},
	}
	for _, step := range steps {
		if err := step(); err != nil {
			return fmt.Errorf("set up the uplink of a namespace: %w", err)
		}
	}
	return nil
}

// unplug removes a pair. It is no error when it is gone.
func (n *Network) unplug(number int) {
	if link, err := netlink.LinkByName(hostLink(number)); err == nil {
		_ = netlink.LinkDel(link) // else it goes with its namespace
	}
	_ = n.own(number, false)
}

// unplugAll removes the pairs of slots that were never used, in one step: the kernel waits for all of its readers once for a step, however much
// is in it. A slot whose pair stays keeps its number.
func (n *Network) unplugAll(slots []*Slot) {
	group := rand.Uint32() | 1<<31 // nobody else's: people number groups from 0
	var in []*Slot
	for _, s := range slots {
		link, err := netlink.LinkByName(hostLink(s.number))
		if err == nil && netlink.LinkSetGroup(link, int(group)) == nil {
			in = append(in, s)
		}
	}
	if len(in) == 0 {
		return
	}
	req := nl.NewNetlinkRequest(unix.RTM_DELLINK, unix.NLM_F_ACK)
	req.AddData(nl.NewIfInfomsg(unix.AF_UNSPEC))
	req.AddData(nl.NewRtAttr(unix.IFLA_GROUP, nl.Uint32Attr(group)))
	if _, err := req.Execute(unix.NETLINK_ROUTE, 0); err != nil {
		n.log.Debug("devices are removed one by one", "error", err)
		return
	}
	n.disown(in)
	for _, s := range in {
		s.number = 0
	}
}

// numberOf finds a slot's number by the address of its uplink, which may be of another range: that of an earlier daemon.
func (n *Network) numberOf(ns *os.File) (int, netip.Addr, error) {
	h, err := inside(ns)
	if err != nil {
		return 0, netip.Addr{}, err
	}
	defer h.Close()
	up, err := h.LinkByName(uplinkName)
	if err != nil {
		return 0, netip.Addr{}, fmt.Errorf("uplink: %w", err)
	}
	addrs, err := h.AddrList(up, unix.AF_INET)
	if err != nil {
		return 0, netip.Addr{}, fmt.Errorf("address of the uplink: %w", err)
	}
	for _, a := range addrs {
		if addr, ok := netip.AddrFromSlice(a.IP.To4()); ok {
			b := addr.As4()
			return int(b[2])<<8 | int(b[3]), addr, nil
		}
	}
	return 0, netip.Addr{}, errors.New("the uplink has no address")
}
