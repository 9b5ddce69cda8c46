package hostnet

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/forkd/forkd/internal/netpolicy"
)

// Sets of the host's table.
const (
	ownSet   = "own"    // this daemon's devices
	openSet  = "open"   // device and address of the host that a policy names
	openPort = "openat" // the same, with protocol and port
	straySet = "strays" // addresses of slots that an earlier daemon made in another range
)

// maxOpenPorts bounds how many ports of the host a range in a rule may open: each is an element of its own.
const maxOpenPorts = 256

func (n *Network) hostTable() *nftables.Table {
	return &nftables.Table{Name: n.cfg.Name, Family: nftables.TableFamilyIPv4}
}

func (n *Network) ownDevices() *nftables.Set {
	return &nftables.Set{Table: n.hostTable(), Name: ownSet, KeyType: nftables.TypeIFName}
}

func (n *Network) openAddrs() *nftables.Set {
	return &nftables.Set{Table: n.hostTable(), Name: openSet, KeyType: nftables.MustConcatSetType(nftables.TypeIFName, nftables.TypeIPAddr)}
}

func (n *Network) openPorts() *nftables.Set {
	return &nftables.Set{Table: n.hostTable(), Name: openPort,
		KeyType: nftables.MustConcatSetType(nftables.TypeIFName, nftables.TypeIPAddr, nftables.TypeInetProto, nftables.TypeInetService)}
}

func (n *Network) strays() *nftables.Set {
	return &nftables.Set{Table: n.hostTable(), Name: straySet, KeyType: nftables.TypeIPAddr}
}

// hideStray hides a slot of another range behind the host, as those of the daemon's own are.
func (n *Network) hideStray(addr netip.Addr) error {
	n.hostMu.Lock()
	defer n.hostMu.Unlock()
	return errors.Join(n.conn.SetAddElements(n.strays(), addrElements([]netip.Addr{addr})), n.conn.Flush())
}

func (n *Network) dropStray(addr netip.Addr) {
	n.hostMu.Lock()
	defer n.hostMu.Unlock()
	if err := errors.Join(n.conn.SetDeleteElements(n.strays(), addrElements([]netip.Addr{addr})), n.conn.Flush()); err != nil {
		n.log.Warn("an address of another range stays in the host's rules", "address", addr, "error", err)
	}
}

// makeHostTable makes the host's rules anew: slots reach what is beyond the host, not the host itself and not each other, and nobody reaches them.
func (n *Network) makeHostTable() error {
	// Machines of an earlier daemon may live: they stay under the rules until it is known who they are.
	tables, err := n.conn.ListTablesOfFamily(nftables.TableFamilyIPv4)
	if err != nil {
		return err
	}
	var kept []nftables.SetElement
	if slices.ContainsFunc(tables, func(t *nftables.Table) bool { return t.Name == n.cfg.Name }) {
		if kept, err = n.conn.GetSetElements(n.ownDevices()); err != nil {
			return err
		}
	}
	r := &ruleset{conn: n.conn}
	t := n.conn.AddTable(n.hostTable()) // so that there is one to delete
	n.conn.DelTable(t)
	n.conn.AddTable(t)
	own := n.ownDevices()
	for _, e := range kept {
		n.stale = append(n.stale, nftables.SetElement{Key: e.Key})
	}
	r.note(n.conn.AddSet(own, n.stale))
	for _, s := range []*nftables.Set{n.openAddrs(), n.openPorts(), n.strays()} {
		r.note(n.conn.AddSet(s, nil))
	}
	accepting := nftables.ChainPolicyAccept
	hook := func(name string, hook *nftables.ChainHook, kind nftables.ChainType, priority *nftables.ChainPriority) {
		n.conn.AddChain(&nftables.Chain{Name: name, Table: t, Type: kind, Hooknum: hook, Priority: priority, Policy: &accepting})
	}
	hook("forward", nftables.ChainHookForward, nftables.ChainTypeFilter, nftables.ChainPriorityFilter)
	r.rule(t, "forward", iifIn(own), oifLike(hostPrefix), drop())
	r.rule(t, "forward", oifIn(own), established(), accept())
	r.rule(t, "forward", oifIn(own), drop())

	hook("input", nftables.ChainHookInput, nftables.ChainTypeFilter, nftables.ChainPriorityFilter)
	r.rule(t, "input", iifIn(own), deviceKey(0), exprs{&expr.Lookup{SourceRegister: 1, SetName: openSet}}, accept())
	r.rule(t, "input", iifIn(own), deviceKey(unix.IPPROTO_TCP), exprs{&expr.Lookup{SourceRegister: 1, SetName: openPort}}, accept())
	r.rule(t, "input", iifIn(own), drop())

	hook("nat", nftables.ChainHookPostrouting, nftables.ChainTypeNAT, nftables.ChainPriorityNATSource)
	r.rule(t, "nat", saddr(n.cfg.Range), notOifLike(hostPrefix), exprs{&expr.Masq{}})
	r.rule(t, "nat", side{addr: saddrOffset}.in(n.strays()), notOifLike(hostPrefix), exprs{&expr.Masq{}})
	return r.flush()
}

// deviceKey loads device and destination, and protocol and port as well unless proto is 0.
func deviceKey(proto int) exprs {
	const reg = 8 // the first of the registers of 4 bytes: a name takes four of them
	out := exprs{&expr.Meta{Key: expr.MetaKeyIIFNAME, Register: reg}, &expr.Payload{DestRegister: reg + 4, Base: expr.PayloadBaseNetworkHeader, Offset: daddrOffset, Len: 4}}
	if proto != 0 {
		out = append(out, &expr.Meta{Key: expr.MetaKeyL4PROTO, Register: reg + 5},
			&expr.Payload{DestRegister: reg + 6, Base: expr.PayloadBaseTransportHeader, Offset: 2, Len: 2})
	}
	return out
}

// own puts a slot's device under the host's rules, or takes it out.
func (n *Network) own(number int, is bool) error {
	n.hostMu.Lock()
	defer n.hostMu.Unlock()
	elements := []nftables.SetElement{{Key: nameBytes(hostLink(number))}}
	var err error
	if is {
		err = n.conn.SetAddElements(n.ownDevices(), elements)
	} else {
		n.closeHost(number)
		err = n.conn.SetDeleteElements(n.ownDevices(), elements)
	}
	return errors.Join(err, n.conn.Flush())
}

// disown takes the devices of slots that were never used out of the host's rules.
func (n *Network) disown(slots []*Slot) {
	n.hostMu.Lock()
	defer n.hostMu.Unlock()
	var elements []nftables.SetElement
	for _, s := range slots {
		elements = append(elements, nftables.SetElement{Key: nameBytes(hostLink(s.number))})
	}
	if err := errors.Join(n.conn.SetDeleteElements(n.ownDevices(), elements), n.conn.Flush()); err != nil {
		n.log.Warn("devices that are gone stay in the host's rules", "error", err)
	}
}

// dropStale takes devices out of the host's rules that are no slot's of ours any more: another daemon may get their names.
func (n *Network) dropStale() error {
	n.mu.Lock()
	ours := map[string]bool{}
	for _, s := range n.ready {
		ours[hostLink(s.number)] = true
	}
	for s := range n.live {
		ours[hostLink(s.number)] = true
	}
	n.mu.Unlock()
	n.hostMu.Lock()
	defer n.hostMu.Unlock()
	gone := slices.DeleteFunc(n.stale, func(e nftables.SetElement) bool { return ours[strings.TrimRight(string(e.Key), "\x00")] })
	n.stale = nil
	if len(gone) == 0 {
		return nil
	}
	return errors.Join(n.conn.SetDeleteElements(n.ownDevices(), gone), n.conn.Flush())
}

// opened are elements of the host's sets that belong to one slot.
type opened struct{ addrs, ports []nftables.SetElement }

// openHost lets a slot reach those addresses of the host that its rules name, and no others.
func (n *Network) openHost(number int, rules []netpolicy.Rule, host []netip.Addr) error {
	var want opened
	for _, r := range rules {
		if !namesHost(r, host) {
			continue
		}
		key := append(nameBytes(hostLink(number)), r.Prefix.Addr().AsSlice()...)
		if r.Low == 0 {
			want.addrs = append(want.addrs, nftables.SetElement{Key: key})
			continue
		}
		if int(r.High)-int(r.Low) >= maxOpenPorts {
			return fmt.Errorf("%w: a rule for the host's own address may have up to %d ports", netpolicy.ErrInvalid, maxOpenPorts)
		}
		want.ports = append(want.ports, portElements(key, r)...)
	}
	n.hostMu.Lock()
	defer n.hostMu.Unlock()
	_, had := n.opened[number]
	if !had && len(want.addrs)+len(want.ports) == 0 {
		return nil // as nearly always
	}
	n.closeHost(number)
	err := errors.Join(n.conn.SetAddElements(n.openAddrs(), want.addrs), n.conn.SetAddElements(n.openPorts(), want.ports))
	if err = errors.Join(err, n.conn.Flush()); err == nil {
		n.opened[number] = want
	}
	return err
}

func portElements(key []byte, r netpolicy.Rule) (all []nftables.SetElement) {
	protos := []byte{byte(r.Proto)}
	if r.Proto == netpolicy.Any {
		protos = []byte{unix.IPPROTO_TCP, unix.IPPROTO_UDP}
	}
	for _, proto := range protos {
		for port := int(r.Low); port <= int(r.High); port++ {
			k := append(slices.Clone(key), proto, 0, 0, 0, byte(port>>8), byte(port), 0, 0)
			all = append(all, nftables.SetElement{Key: k})
		}
	}
	return all
}

// closeHost adds to the next batch what takes back openHost. Preconditions: n.hostMu is held.
func (n *Network) closeHost(number int) {
	if o, ok := n.opened[number]; ok {
		_ = n.conn.SetDeleteElements(n.openAddrs(), o.addrs) // they were encoded before
		_ = n.conn.SetDeleteElements(n.openPorts(), o.ports)
		delete(n.opened, number)
	}
}

// readHostAddrs lists the host's own IPv4 addresses but the loopback's, and those of metadata services.
func readHostAddrs() ([]netip.Addr, error) {
	list, err := netlink.AddrList(nil, unix.AF_INET)
	if err != nil {
		return nil, fmt.Errorf("addresses of the host: %w", err)
	}
	all := netpolicy.Metadata()
	for _, a := range list {
		if addr, ok := netip.AddrFromSlice(a.IP.To4()); ok && !addr.IsLoopback() {
			all = append(all, addr)
		}
	}
	slices.SortFunc(all, netip.Addr.Compare)
	return slices.Compact(all), nil
}
