package netpolicy

import "net/netip"

// Protected are the ranges that only rules within them open: private, shared, link-local, loopback, benchmarks' and reserved ones, and multicast.
// Addresses of the host and of metadata services come before them, see Metadata.
func Protected() []netip.Prefix {
	var all []netip.Prefix
	for _, s := range []string{
		"0.0.0.0/8", "10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "169.254.0.0/16", "172.16.0.0/12", "192.0.0.0/24", "192.168.0.0/16",
		"198.18.0.0/15", "224.0.0.0/3",
	} {
		all = append(all, netip.MustParsePrefix(s))
	}
	return all
}

// Metadata are addresses at which clouds give machines their credentials. Each is opened by its own address alone.
func Metadata() []netip.Addr {
	var all []netip.Addr
	for _, s := range []string{
		"169.254.169.254", // AWS, Google, Azure, Oracle, OpenStack, DigitalOcean
		"169.254.170.2",   // AWS: credentials of tasks
		"169.254.170.23",  // AWS: credentials of pods
		"100.100.100.200", // Alibaba
		"168.63.129.16",   // Azure: a public address
		"192.0.0.192",     // Oracle, at first
	} {
		all = append(all, netip.MustParseAddr(s))
	}
	return all
}

// IsProtected says whether an address lies in a protected range.
func IsProtected(a netip.Addr) bool {
	for _, p := range Protected() {
		if p.Contains(a) {
			return true
		}
	}
	for _, m := range Metadata() {
		if m == a {
			return true
		}
	}
	return false
}

// NamesProtected says whether a CIDR lies within one protected range, so that a rule with it opens what it names.
func NamesProtected(c netip.Prefix) bool {
	for _, p := range Protected() {
		if p.Bits() <= c.Bits() && p.Contains(c.Addr()) {
			return true
		}
	}
	return false
}
