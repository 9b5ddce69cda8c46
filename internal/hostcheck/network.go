package hostcheck

// network says whether machines can have networks.
func (r *run) network() verdict {
	if r.opt.Network == nil {
		return ok("not looked at")
	}
	if err := r.opt.Network(); err != nil {
		return warn("", "machines have no networks, only the policy none: %v", err)
	}
	if forwards, _ := r.read("proc/sys/net/ipv4/ip_forward"); forwards != "1" {
		return ok("namespaces, taps and nftables can be made; `forkd serve` switches forwarding (net.ipv4.ip_forward) on")
	}
	return ok("namespaces, taps and nftables can be made")
}
