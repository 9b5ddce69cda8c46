package hostnet

import (
	"encoding/binary"
	"net/netip"

	"github.com/google/nftables"
	"github.com/google/nftables/binaryutil"
	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"

	"github.com/forkd/forkd/internal/netpolicy"
)

// Parts of nftables rules. Each looks at a packet; a rule's verdict is reached when all agree.

type exprs = []expr.Any

// rule joins parts.
func rule(parts ...exprs) exprs {
	var out exprs
	for _, p := range parts {
		out = append(out, p...)
	}
	return out
}

func compare(op expr.CmpOp, data []byte) expr.Any { return &expr.Cmp{Op: op, Register: 1, Data: data} }

// nameBytes is a device's name as the kernel compares it: all 16 bytes, or only a beginning.
func nameBytes(name string) []byte {
	b := make([]byte, unix.IFNAMSIZ)
	copy(b, name)
	return b
}

func iif(name string) exprs {
	return exprs{&expr.Meta{Key: expr.MetaKeyIIFNAME, Register: 1}, compare(expr.CmpOpEq, nameBytes(name))}
}

func notIif(name string) exprs {
	return exprs{&expr.Meta{Key: expr.MetaKeyIIFNAME, Register: 1}, compare(expr.CmpOpNeq, nameBytes(name))}
}

func oif(name string) exprs {
	return exprs{&expr.Meta{Key: expr.MetaKeyOIFNAME, Register: 1}, compare(expr.CmpOpEq, nameBytes(name))}
}

// oifLike and notOifLike are about devices whose names begin so.
func oifLike(prefix string) exprs {
	return exprs{&expr.Meta{Key: expr.MetaKeyOIFNAME, Register: 1}, compare(expr.CmpOpEq, []byte(prefix))}
}

func notOifLike(prefix string) exprs {
	return exprs{&expr.Meta{Key: expr.MetaKeyOIFNAME, Register: 1}, compare(expr.CmpOpNeq, []byte(prefix))}
}

func iifIn(s *nftables.Set) exprs {
	return exprs{&expr.Meta{Key: expr.MetaKeyIIFNAME, Register: 1}, &expr.Lookup{SourceRegister: 1, SetName: s.Name, SetID: s.ID}}
}

func oifIn(s *nftables.Set) exprs {
	return exprs{&expr.Meta{Key: expr.MetaKeyOIFNAME, Register: 1}, &expr.Lookup{SourceRegister: 1, SetName: s.Name, SetID: s.ID}}
}

func l4proto(p uint8) exprs {
	return exprs{&expr.Meta{Key: expr.MetaKeyL4PROTO, Register: 1}, compare(expr.CmpOpEq, []byte{p})}
}

func ipv6() exprs {
	return exprs{&expr.Meta{Key: expr.MetaKeyNFPROTO, Register: 1}, compare(expr.CmpOpEq, []byte{unix.NFPROTO_IPV6})}
}

func ipv4() exprs {
	return exprs{&expr.Meta{Key: expr.MetaKeyNFPROTO, Register: 1}, compare(expr.CmpOpEq, []byte{unix.NFPROTO_IPV4})}
}

// field loads bytes of the network header. They are IPv4's: callers know that, or ask first.
func field(offset, length uint32) expr.Any {
	return &expr.Payload{DestRegister: 1, Base: expr.PayloadBaseNetworkHeader, Offset: offset, Len: length}
}

// Where addresses stand in the header of IPv4, and ports in those of TCP and UDP.
const (
	saddrOffset = 12
	daddrOffset = 16
	sportOffset = 0
	dportOffset = 2
)

func daddr(p netip.Prefix) exprs { return address(daddrOffset, p) }
func saddr(p netip.Prefix) exprs { return address(saddrOffset, p) }

func address(offset uint32, p netip.Prefix) exprs {
	net, mask := p.Masked().Addr().As4(), [4]byte{}
	binary.BigEndian.PutUint32(mask[:], ^uint32(0)<<(32-p.Bits()))
	out := exprs{field(offset, 4)}
	if p.Bits() < 32 {
		out = append(out, &expr.Bitwise{SourceRegister: 1, DestRegister: 1, Len: 4, Mask: mask[:], Xor: make([]byte, 4)})
	}
	return append(out, compare(expr.CmpOpEq, net[:]))
}

func notSaddr(a netip.Addr) exprs {
	b := a.As4()
	return exprs{field(saddrOffset, 4), compare(expr.CmpOpNeq, b[:])}
}

// in is about an address that is in a set.
func (at side) in(s *nftables.Set) exprs {
	return exprs{field(at.addr, 4), &expr.Lookup{SourceRegister: 1, SetName: s.Name, SetID: s.ID}}
}

func dport(low, high uint16) exprs { return portRange(dportOffset, low, high) }

// portRange is about a port of TCP and UDP packets.
func portRange(offset uint32, low, high uint16) exprs {
	load := &expr.Payload{DestRegister: 1, Base: expr.PayloadBaseTransportHeader, Offset: offset, Len: 2}
	if low == high {
		return exprs{load, compare(expr.CmpOpEq, binaryutil.BigEndian.PutUint16(low))}
	}
	return exprs{load, &expr.Range{Op: expr.CmpOpEq, Register: 1, FromData: binaryutil.BigEndian.PutUint16(low), ToData: binaryutil.BigEndian.PutUint16(high)}}
}

// echoRequest is a ping.
func echoRequest() exprs {
	const icmpEcho = 8
	return append(l4proto(unix.IPPROTO_ICMP), &expr.Payload{DestRegister: 1, Base: expr.PayloadBaseTransportHeader, Offset: 0, Len: 1},
		compare(expr.CmpOpEq, []byte{icmpEcho}))
}

// ports are the rules' parts for what a rule of a policy says of ports and protocols: a packet must meet one of them. Preconditions: it is TCP,
// UDP or a ping.
func (at side) ports(r netpolicy.Rule) []exprs {
	protos := []uint8{uint8(r.Proto)}
	if r.Proto == netpolicy.Any {
		if r.Low == 0 {
			return []exprs{nil}
		}
		protos = []uint8{unix.IPPROTO_TCP, unix.IPPROTO_UDP}
	}
	var all []exprs
	for _, p := range protos {
		all = append(all, rule(l4proto(p), portRange(at.port, r.Low, r.High)))
	}
	return all
}

func ctState(states uint32) exprs {
	return exprs{&expr.Ct{Key: expr.CtKeySTATE, Register: 1},
		&expr.Bitwise{SourceRegister: 1, DestRegister: 1, Len: 4, Mask: binaryutil.NativeEndian.PutUint32(states), Xor: make([]byte, 4)},
		compare(expr.CmpOpNeq, make([]byte, 4))}
}

func established() exprs {
	return ctState(expr.CtStateBitESTABLISHED | expr.CtStateBitRELATED)
}

func ctMark(mark uint32) exprs {
	return exprs{&expr.Ct{Key: expr.CtKeyMARK, Register: 1}, compare(expr.CmpOpEq, binaryutil.NativeEndian.PutUint32(mark))}
}

// ctMarked is about connections that passed some policy.
func ctMarked() exprs {
	return exprs{&expr.Ct{Key: expr.CtKeyMARK, Register: 1}, compare(expr.CmpOpNeq, make([]byte, 4))}
}

// isReply is about packets that go to who began a connection.
func isReply() exprs {
	const reply = 1 // IP_CT_DIR_REPLY
	return exprs{&expr.Ct{Key: expr.CtKeyDIRECTION, Register: 1}, compare(expr.CmpOpEq, []byte{reply})}
}

func setCtMark(mark uint32) exprs {
	return exprs{&expr.Immediate{Register: 1, Data: binaryutil.NativeEndian.PutUint32(mark)}, &expr.Ct{Key: expr.CtKeyMARK, Register: 1, SourceRegister: true}}
}

func counted(name string) exprs {
	return exprs{&expr.Objref{Type: unix.NFT_OBJECT_COUNTER, Name: name}}
}

func accept() exprs { return verdict(expr.VerdictAccept, "") }
func drop() exprs   { return verdict(expr.VerdictDrop, "") }
func leave() exprs  { return verdict(expr.VerdictReturn, "") }

func goTo(chain string) exprs { return verdict(expr.VerdictGoto, chain) }
func jump(chain string) exprs { return verdict(expr.VerdictJump, chain) }

func verdict(kind expr.VerdictKind, chain string) exprs {
	return exprs{&expr.Verdict{Kind: kind, Chain: chain}}
}
