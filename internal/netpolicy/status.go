package netpolicy

import (
	"net/netip"
	"time"
)

// Status is what a sandbox's network does at the moment.
type Status struct {
	Policy Policy

	DeniedAttempts uint64       // connections that the policy did not let through; what is tried again at once is one
	Denied         []Denied     // the most tried first; of the last hour, a bounded number
	DeniedNames    []DeniedName // likewise; those since the daemon started
	ForgedPackets  uint64       // with an address that is not the guest's
	IPv6Packets    uint64
	MonitorPackets uint64 // of the monitor itself: it has nobody to speak to

	SentBytes, ReceivedBytes uint64 // by the guest
}

// Denied is what was tried in vain.
type Denied struct {
	Addr     netip.Addr
	Proto    string // "tcp", "udp", "icmp", or a number
	Port     uint16 // 0 for others than TCP and UDP
	Attempts uint64
}

// DeniedName is a name that was asked for in vain.
type DeniedName struct {
	Name  string
	Count uint64
	Last  time.Time
}
