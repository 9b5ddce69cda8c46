package hostnet

import (
	"net/netip"
	"slices"
	"time"

	"github.com/google/nftables"
	"github.com/google/nftables/binaryutil"
	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"

	"github.com/forkd/forkd/internal/netpolicy"
	"github.com/forkd/forkd/internal/vmm"
)

// Names in a slot's tables.
const (
	tableName = "forkd"

	hostSet      = "host"      // addresses of the host and of metadata services
	protectedSet = "protected" // ranges
	deniedSet    = "denied"    // what was tried in vain: destination, protocol, port
	seenSet      = "seen"      // connections of which that is known, with the guest's port

	chainForward = "forward"
	chainPolicy  = "policy"  // what replaces the policy fills it: who may pass
	chainCheck   = "check"   // of those who may: where to
	chainReplies = "replies" // of connections from before the policy: where from
	chainPass    = "pass"
	chainCrowd   = "crowd" // of those that pass: whether they are too many
	chainNames   = "names" // who may ask the resolver
	chainDeny    = "deny"
	chainReject  = "reject"

	deniedCount  = "denied"  // connections that were tried and the policy did not let through
	ipv6Count    = "ipv6"    // packets of IPv6, without those by which it looks around
	forgedCount  = "forged"  // packets that are not from the guest's own address
	monitorCount = "monitor" // packets that the monitor itself sent elsewhere than to its guest
)

// maxConnections is how many connections a guest may have at a time: each takes a place in the host's table of connections as well, which all that
// the host passes on share.
const maxConnections = 4096

// How much of what was tried in vain is remembered, and for how long.
const (
	deniedKept    = 256
	deniedKeptFor = time.Hour
)

// How many connections are told apart, and for how long: what a program says again and again is one attempt in that time. Of more than can be
// told apart each packet is one.
const (
	seenKept    = 4096
	seenKeptFor = 30 * time.Second
)

func table() *nftables.Table {
	return &nftables.Table{Name: tableName, Family: nftables.TableFamilyINet}
}

func deniedElements() *nftables.Set {
	return &nftables.Set{Table: table(), Name: deniedSet, Dynamic: true, HasTimeout: true, Timeout: deniedKeptFor, Size: deniedKept, Counter: true,
		KeyType: nftables.MustConcatSetType(nftables.TypeIPAddr, nftables.TypeInetProto, nftables.TypeInetService)}
}

func seenElements() *nftables.Set {
	return &nftables.Set{Table: table(), Name: seenSet, Dynamic: true, HasTimeout: true, Timeout: seenKeptFor, Size: seenKept,
		KeyType: nftables.MustConcatSetType(nftables.TypeIPAddr, nftables.TypeInetProto, nftables.TypeInetService, nftables.TypeInetService)}
}

func hostElements() *nftables.Set {
	return &nftables.Set{Table: table(), Name: hostSet, KeyType: nftables.TypeIPAddr}
}

// ruleset collects what one batch changes.
type ruleset struct {
	conn *nftables.Conn
	err  error // of what could not even be said
}

func (r *ruleset) note(err error) {
	if r.err == nil {
		r.err = err
	}
}

// elementsAtOnce is how many elements of a set go into one message: its length has 16 bits.
const elementsAtOnce = 256

// set makes a set with elements.
func (r *ruleset) set(s *nftables.Set, elements []nftables.SetElement) {
	r.note(r.conn.AddSet(s, nil))
	for some := range slices.Chunk(elements, elementsAtOnce) {
		r.note(r.conn.SetAddElements(s, some))
	}
}

func (r *ruleset) rule(t *nftables.Table, chain string, parts ...exprs) {
	r.conn.AddRule(&nftables.Rule{Table: t, Chain: &nftables.Chain{Name: chain, Table: t}, Exprs: rule(parts...)})
}

func (r *ruleset) flush() error {
	if r.err != nil {
		return r.err
	}
	return r.conn.Flush()
}

// makeTables fills a new namespace: nothing passes but what is between the namespace and its guest, until a policy says otherwise.
func makeTables(conn *nftables.Conn, host []netip.Addr) error {
	r := &ruleset{conn: conn}
	r.ingress()
	t := conn.AddTable(table())
	for _, name := range []string{deniedCount, ipv6Count, monitorCount} {
		conn.AddObj(&nftables.NamedObj{Table: t, Name: name, Type: nftables.ObjTypeCounter, Obj: &expr.Counter{}})
	}
	r.note(conn.AddSet(deniedElements(), nil))
	r.note(conn.AddSet(seenElements(), nil))
	r.note(conn.AddSet(hostElements(), addrElements(host)))
	protected := &nftables.Set{Table: t, Name: protectedSet, Interval: true, KeyType: nftables.TypeIPAddr}
	r.note(conn.AddSet(protected, prefixElements(netpolicy.Protected())))

	for _, name := range append([]string{chainDeny, chainReject, chainCrowd}, policyChains...) {
		conn.AddChain(&nftables.Chain{Name: name, Table: t})
	}
	r.deny(t)
	// All are counted, those of an earlier policy too, and new ones are refused.
	r.rule(t, chainCrowd, exprs{&expr.Connlimit{Count: maxConnections, Flags: expr.NFT_CONNLIMIT_F_INV}}, ctState(expr.CtStateBitNEW), goTo(chainDeny))
	r.base(t, chainForward, nftables.ChainHookForward)
	r.rule(t, chainForward, ipv6(), counted(ipv6Count), drop())
	r.rule(t, chainForward, ctState(expr.CtStateBitINVALID), drop())
	r.rule(t, chainForward, jump(chainPolicy))
	r.rule(t, chainForward, iif(tapName), goTo(chainDeny))

	r.base(t, "input", nftables.ChainHookInput)
	r.rule(t, "input", ipv6(), counted(ipv6Count), drop())
	r.rule(t, "input", iif(tapName), ctState(expr.CtStateBitESTABLISHED), accept())
	gateway := netip.PrefixFrom(gatewayAddr, 32)
	for _, p := range []uint8{unix.IPPROTO_UDP, unix.IPPROTO_TCP} {
		r.rule(t, "input", iif(tapName), daddr(gateway), l4proto(p), dport(53, 53), jump(chainNames))
	}
	r.rule(t, "input", iif(tapName), goTo(chainDeny))

	r.base(t, "output", nftables.ChainHookOutput)
	r.rule(t, "output", ipv4(), oif(tapName), daddr(netip.PrefixFrom(guestAddr, 32)), accept())
	r.rule(t, "output", counted(monitorCount))

	nat := nftables.ChainPolicyAccept
	conn.AddChain(&nftables.Chain{Name: "nat", Table: t, Type: nftables.ChainTypeNAT, Hooknum: nftables.ChainHookPostrouting,
		Priority: nftables.ChainPriorityNATSource, Policy: &nat})
	r.rule(t, "nat", oif(uplinkName), exprs{&expr.Masq{}})
	return r.flush()
}

// base adds a chain in which nothing passes that no rule accepts.
func (r *ruleset) base(t *nftables.Table, name string, hook *nftables.ChainHook) {
	policy := nftables.ChainPolicyDrop
	r.conn.AddChain(&nftables.Chain{Name: name, Table: t, Type: nftables.ChainTypeFilter, Hooknum: hook, Priority: nftables.ChainPriorityFilter, Policy: &policy})
}

// ingress looks at what the guest sends before anything else does: IPv4 from its own address, and ARP.
func (r *ruleset) ingress() {
	t := r.conn.AddTable(&nftables.Table{Name: tableName, Family: nftables.TableFamilyNetdev})
	for _, name := range []string{ipv6Count, forgedCount} {
		r.conn.AddObj(&nftables.NamedObj{Table: t, Name: name, Type: nftables.ObjTypeCounter, Obj: &expr.Counter{}})
	}
	r.conn.AddChain(&nftables.Chain{Name: "ingress", Table: t, Type: nftables.ChainTypeFilter, Hooknum: nftables.ChainHookIngress,
		Priority: nftables.ChainPriorityFilter, Device: tapName})
	proto := func(p uint16) exprs {
		return exprs{&expr.Meta{Key: expr.MetaKeyPROTOCOL, Register: 1}, compare(expr.CmpOpEq, binaryutil.BigEndian.PutUint16(p))}
	}
	mac := exprs{&expr.Payload{DestRegister: 1, Base: expr.PayloadBaseLLHeader, Offset: 6, Len: 6}, compare(expr.CmpOpNeq, mustMAC(vmm.GuestMAC))}
	r.rule(t, "ingress", mac, counted(forgedCount), drop())
	r.rule(t, "ingress", proto(unix.ETH_P_IP), notSaddr(guestAddr), counted(forgedCount), drop())
	r.rule(t, "ingress", proto(unix.ETH_P_IP), accept())
	r.rule(t, "ingress", proto(unix.ETH_P_ARP), accept())
	// TCP, UDP: somebody wants to go somewhere. What else a kernel says by itself is nothing to count.
	for _, next := range []byte{unix.IPPROTO_TCP, unix.IPPROTO_UDP} {
		r.rule(t, "ingress", proto(unix.ETH_P_IPV6), exprs{field(6, 1), compare(expr.CmpOpEq, []byte{next})}, counted(ipv6Count), drop())
	}
	r.rule(t, "ingress", drop())
}

// deny notes what was tried and says no, so that programs need not wait.
func (r *ruleset) deny(t *nftables.Table) {
	const key = 8 // the first of the registers of 4 bytes
	where := exprs{
		&expr.Payload{DestRegister: key, Base: expr.PayloadBaseNetworkHeader, Offset: daddrOffset, Len: 4},
		&expr.Meta{Key: expr.MetaKeyL4PROTO, Register: key + 1},
	}
	port := func(register, offset uint32) expr.Any {
		return &expr.Payload{DestRegister: register, Base: expr.PayloadBaseTransportHeader, Offset: offset, Len: 2}
	}
	none := func(register uint32) expr.Any { return &expr.Immediate{Register: register, Data: make([]byte, 4)} }
	kinds := []struct{ which, to, from exprs }{
		{l4proto(unix.IPPROTO_TCP), exprs{port(key+2, 2)}, exprs{port(key+3, 0)}},
		{l4proto(unix.IPPROTO_UDP), exprs{port(key+2, 2)}, exprs{port(key+3, 0)}},
		{exprs{&expr.Meta{Key: expr.MetaKeyL4PROTO, Register: 1}, compare(expr.CmpOpNeq, []byte{unix.IPPROTO_TCP}), compare(expr.CmpOpNeq, []byte{unix.IPPROTO_UDP})},
			exprs{none(key + 2)}, exprs{none(key + 3)}},
	}
	note := func(set string, op uint32) exprs {
		return exprs{&expr.Dynset{SrcRegKey: key, SetName: set, Operation: op}}
	}
	for _, k := range kinds {
		r.rule(t, chainDeny, k.which, where, k.to, k.from, exprs{&expr.Lookup{SourceRegister: key, SetName: seenSet}}, goTo(chainReject))
	}
	r.rule(t, chainDeny, counted(deniedCount))
	for _, k := range kinds {
		r.rule(t, chainDeny, k.which, where, k.to, note(deniedSet, unix.NFT_DYNSET_OP_UPDATE))
		r.rule(t, chainDeny, k.which, where, k.to, k.from, note(seenSet, unix.NFT_DYNSET_OP_ADD))
	}
	r.rule(t, chainDeny, goTo(chainReject))
	r.rule(t, chainReject, l4proto(unix.IPPROTO_TCP), exprs{&expr.Reject{Type: unix.NFT_REJECT_TCP_RST}})
	const prohibited = 3 // NFT_REJECT_ICMPX_ADMIN_PROHIBITED
	r.rule(t, chainReject, exprs{&expr.Reject{Type: unix.NFT_REJECT_ICMPX_UNREACH, Code: prohibited}})
}

func addrElements(addrs []netip.Addr) []nftables.SetElement {
	var all []nftables.SetElement
	for _, a := range addrs {
		all = append(all, nftables.SetElement{Key: a.AsSlice()})
	}
	return all
}

// prefixElements are intervals. Preconditions: the prefixes don't overlap or touch, and are sorted.
func prefixElements(prefixes []netip.Prefix) []nftables.SetElement {
	var all []nftables.SetElement
	for _, p := range prefixes {
		all = append(all, nftables.SetElement{Key: p.Addr().AsSlice()})
		if end := lastAddr(p).Next(); end.IsValid() && end.Is4() {
			all = append(all, nftables.SetElement{Key: end.AsSlice(), IntervalEnd: true})
		}
	}
	return all
}

func lastAddr(p netip.Prefix) netip.Addr {
	a := p.Masked().Addr().As4()
	for i := p.Bits(); i < 32; i++ {
		a[i/8] |= 0x80 >> (i % 8)
	}
	return netip.AddrFrom4(a)
}
