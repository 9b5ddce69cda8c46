package hostnet

import (
	"encoding/binary"
	"net/netip"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/forkd/forkd/internal/netpolicy"
	"github.com/forkd/forkd/internal/vmm"
)

// datagram is one of the guest's, from a port of it to another place, with what a monitor's tap has before it.
func datagram(from uint16) []byte {
	const ipLen, udpLen = 20, 8
	b := append(append(append(make([]byte, vnetHeader), gatewayMAC...), mustMAC(vmm.GuestMAC)...), 8, 0)
	ip := []byte{0x45, 0, 0, ipLen + udpLen, 0, 1, 0x40, 0, 64, unix.IPPROTO_UDP, 0, 0}
	ip = append(append(ip, guestAddr.AsSlice()...), netip.MustParseAddr("203.0.113.9").AsSlice()...)
	binary.BigEndian.PutUint16(ip[10:], internetSum(0, ip))
	b = binary.BigEndian.AppendUint16(append(b, ip...), from)
	return append(b, 0, 80, 0, udpLen, 0, 0)
}

// TestConnectionsAreBounded: a guest that may go everywhere has so many connections at a time and no more, whatever its policy was before.
func TestConnectionsAreBounded(t *testing.T) {
	if outside(t) {
		return
	}
	s := acquire(t, open(t, Config{}))
	guest := takeTap(t, s)
	const more = 100
	for i, p := range []netpolicy.Policy{{Mode: netpolicy.Open}, {Mode: netpolicy.Allow, Rules: []string{"203.0.113.0/24"}}} {
		if err := s.SetPolicy(t.Context(), p); err != nil {
			t.Fatal(err)
		}
		first, n := 1000, maxConnections+more
		if i > 0 {
			first, n = first+n, more // those of the policy before are there
		}
		for port := range n {
			if _, err := guest.Write(datagram(uint16(first + port))); err != nil {
				t.Fatal(err)
			}
		}
		st, err := s.Status()
		if err != nil || st.DeniedAttempts != uint64((i+1)*more) {
			t.Errorf("with %v, %d connections are refused (%v), want %d", p, st.DeniedAttempts, err, (i+1)*more)
		}
	}
}
