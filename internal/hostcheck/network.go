package hostcheck

import (
	"strings"
)

const forwardFile = "proc/sys/net/ipv4/ip_forward"

// network says whether machines can have networks.
func (r *run) network() verdict {
	if r.opt.Network == nil {
		return ok("not looked at")
	}
	if err := r.opt.Network(); err != nil {
		return warn("", "machines have no networks, only the policy none: %v", err)
	}
	forwards, _ := r.read(forwardFile)
	if forwards == "1" {
		return ok("namespaces, taps and nftables can be made; this host passes packets on (net.ipv4.ip_forward is 1)")
	}
	if f, readOnly := r.mount("proc/sys"); readOnly {
		return warn("sysctl -w net.ipv4.ip_forward=1", "net.ipv4.ip_forward is %s and %s can't be written: machines have no networks", forwards, f)
	}
	return ok("namespaces, taps and nftables can be made; `forkd serve` switches net.ipv4.ip_forward on, and leaves it on")
}

// mount says whether a file system that is mounted at a path, or above it, is read-only.
func (r *run) mount(path string) (at string, readOnly bool) {
	text, _ := r.read("proc/self/mounts")
	for line := range strings.Lines(text) {
		f := strings.Fields(line)
		if len(f) < 4 || f[1] != "/" && f[1] != "/"+path && !strings.HasPrefix("/"+path, f[1]+"/") || len(f[1]) < len(at) {
			continue
		}
		options := "," + f[3] + ","
		at, readOnly = f[1], strings.Contains(options, ",ro,")
	}
	return at, readOnly
}

// What opens a firewall for the machines, whose devices on the host have names that begin with fk.
const (
	openNft    = `nft insert rule %s iifname "fk*" accept; nft insert rule %s oifname "fk*" ct state established,related accept`
	openLegacy = "iptables-legacy -I FORWARD -i fk+ -j ACCEPT; iptables-legacy -I FORWARD -o fk+ -m conntrack --ctstate ESTABLISHED,RELATED -j ACCEPT"
)

// firewall looks for rules of others that drop what machines send: a rule of ours can't open what another table drops.
func (r *run) firewall() verdict {
	if r.opt.Closed == nil {
		return ok("not looked at")
	}
	if r.h.UID != 0 {
		return ok("not looked at: only root sees the rules, and only a daemon that is root makes networks")
	}
	closed, err := r.opt.Closed()
	if err != nil {
		return warn("", "whether a firewall of this host drops what machines send is not known: %v", err)
	}
	if len(closed) > 0 {
		return warn(strings.ReplaceAll(openNft, "%s", closed[0]),
			"what this host passes on is dropped by %s, which has no rule for the machines' devices (fk*): their networks reach nothing", strings.Join(closed, " and by "))
	}
	if r.legacyDrops() {
		return warn(openLegacy, "what this host passes on is dropped by iptables (legacy, FORWARD), which has no rule for the machines' devices (fk*): their networks reach nothing")
	}
	return ok("no firewall of this host drops what machines send, or it has a rule for their devices (fk*)")
}

// legacyDrops says whether the older iptables, which nftables doesn't show, drop what is passed on.
func (r *run) legacyDrops() bool {
	if tables, _ := r.read("proc/net/ip_tables_names"); !strings.Contains(tables, "filter") {
		return false
	}
	program, err := r.h.LookPath("iptables-legacy")
	if err != nil {
		return false
	}
	rules, err := r.h.Output(r.ctx, program, "-S", "FORWARD")
	return err == nil && strings.Contains(rules, "-P FORWARD DROP") && !strings.Contains(rules, "-i fk")
}
