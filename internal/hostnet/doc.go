// Package hostnet gives each machine a network of its own, in which it may reach what its policy says and nothing else.
//
// A slot is a network namespace with a tap for the machine and a veth pair to the host:
//
//	guest 10.117.0.2 ── tap0 10.117.0.1 ┆ namespace ┆ up0 10.118.x.y ── fkNNNN ┆ host ── uplink
//
// What a guest sees is the same in all of them, so that a snapshot's network is right in every child. The address of up0 is the slot's own; the
// namespace hides the guest behind it, and the host hides it behind its own.
//
// Slots are made ahead, a few at a time, and thrown away after use: what a machine did to its namespace never meets another one. A namespace has
// no name: it lives as long as the daemon or the monitor in it, and with it everything that is in it, so that a daemon that is killed leaves
// nothing. The next one finds the namespaces of machines that it takes over by their processes.
//
// # Where the policy is kept
//
// In the namespace, by nftables: what comes from the guest is looked at when it comes in from the tap (nothing but IPv4 from the guest's own
// address), when it is forwarded (the policy) and when it is for the namespace itself (nothing but names). The monitor lives there as well and
// reaches nothing but its own guest. On the host a second table keeps slots from the host's own addresses and from each other, whatever
// happens in the namespaces.
//
// Rules with domains are sets of addresses that the resolver fills: it answers a guest for the names that its policy has, and what it answers may
// be reached for as long as the answer holds.
//
// It knows no machines, no sandboxes and no HTTP. What a policy means is internal/netpolicy's.
package hostnet

import (
	"net"
	"net/netip"

	"github.com/forkd/forkd/internal/vmm"
)

// The network that every guest is in.
var (
	guestAddr   = netip.MustParseAddr("10.117.0.2")
	gatewayAddr = netip.MustParseAddr("10.117.0.1")
	guestNet    = netip.MustParsePrefix("10.117.0.0/30")
	gatewayMAC  = net.HardwareAddr{0x02, 0xf0, 0x4b, 0xd0, 0x00, 0x01}

	// What a namespace sends to the host goes to this address, which nobody has: both ends know each other.
	nextHop = netip.MustParseAddr("169.254.117.1")
	hostMAC = net.HardwareAddr{0x02, 0xf0, 0x4b, 0xd1, 0x00, 0x01}
	slotMAC = net.HardwareAddr{0x02, 0xf0, 0x4b, 0xd1, 0x00, 0x02}
)

// Names of devices.
const (
	tapName    = vmm.TapName
	uplinkName = "up0"
	hostPrefix = "fk" // of a slot's device on the host; its number follows
)

// KernelWord tells a guest's agent its network.
func KernelWord() string {
	return "forkd.net=" + netip.PrefixFrom(guestAddr, guestNet.Bits()).String() + "," + gatewayAddr.String()
}
