package hostnet

import (
	"encoding/binary"
	"net"
	"net/netip"
	"os"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/forkd/forkd/internal/netns"
	"github.com/forkd/forkd/internal/netpolicy"
	"github.com/forkd/forkd/internal/vmm"
)

// vnetHeader is the length of what a guest says of a packet before it (struct virtio_net_hdr).
const vnetHeader = 10

// TestSegmentsEndInTheNamespace sends, as a guest can whose monitor opened the tap with offloads, a TCP packet that is to be cut to pieces and has no
// checksum. On the host's side its pieces come out, whole and with checksums.
func TestSegmentsEndInTheNamespace(t *testing.T) {
	if outside(t) {
		return
	}
	s := acquire(t, open(t, Config{}))
	if err := s.SetPolicy(t.Context(), netpolicy.Policy{Mode: netpolicy.Open}); err != nil {
		t.Fatal(err)
	}
	guest := takeTap(t, s)
	host := listenOn(t, hostLink(s.number))
	const size, pieces = 1000, 4
	if _, err := guest.Write(bigPacket(size, pieces)); err != nil {
		t.Fatal(err)
	}
	buf := make([]byte, 64<<10)
	for got := 0; got < size*pieces; {
		n, _, err := unix.Recvfrom(host, buf, 0)
		if err != nil {
			t.Fatalf("after %d bytes of %d: %v", got, size*pieces, err)
		}
		about, frame := buf[:vnetHeader], buf[vnetHeader:n]
		if about[0]&unix.VIRTIO_NET_HDR_F_NEEDS_CSUM != 0 || about[1] != unix.VIRTIO_NET_HDR_GSO_NONE {
			t.Errorf("a packet of %d bytes leaves its checksum (%d) or its cutting (%d) to the host", len(frame), about[0], about[1])
		}
		if frame[14+9] != unix.IPPROTO_TCP {
			continue
		}
		if sum := internetSum(pseudo(frame[14:], len(frame)-34), frame[34:]); sum != 0 {
			t.Errorf("a packet of %d bytes has a wrong checksum", len(frame))
		}
		if len(frame) > 54+size {
			t.Errorf("a packet of %d bytes, want at most %d", len(frame), 54+size)
		}
		got += len(frame) - 54
	}
}

// TestTapKeepsItsNetwork: what was set up at a tap is there when a monitor has opened it by its name, and the policy can be changed.
func TestTapKeepsItsNetwork(t *testing.T) {
	if outside(t) {
		return
	}
	s := acquire(t, open(t, Config{}))
	if err := s.SetPolicy(t.Context(), netpolicy.Policy{Mode: netpolicy.Open, BandwidthMbit: 10}); err != nil {
		t.Fatal(err)
	}
	look := func() string {
		return in(t, s, "ip", "neigh", "show", "dev", vmm.TapName) + in(t, s, "ip", "-4", "-o", "addr", "show", "dev", vmm.TapName) +
			in(t, s, "nft", "list", "table", "netdev", tableName)
	}
	before := look()
	takeTap(t, s)
	if after := look(); after != before {
		t.Errorf("at the tap there was:\n%s\nnow there is:\n%s", before, after)
	}
	if shape := in(t, s, "tc", "qdisc", "show", "dev", vmm.TapName); !strings.Contains(shape, "tbf") {
		t.Errorf("the bandwidth is not limited any more: %s", shape)
	}
	if err := s.SetPolicy(t.Context(), netpolicy.Policy{}); err != nil {
		t.Error(err)
	}
}

// takeTap opens a slot's tap as a monitor does that opens it by its name.
func takeTap(t *testing.T, s *Slot) *os.File {
	t.Helper()
	if err := netns.HandOver(s.NIC().Tap, uint32(os.Getuid())); err != nil {
		t.Fatal(err)
	}
	s.Started()
	var fd int
	err := netns.Do(s.ns, func() (err error) {
		if fd, err = unix.Open(netns.TunDevice, unix.O_RDWR|unix.O_CLOEXEC, 0); err != nil {
			return err
		}
		req, err := unix.NewIfreq(vmm.TapName)
		if err != nil {
			return err
		}
		req.SetUint16(unix.IFF_TAP | unix.IFF_NO_PI | unix.IFF_VNET_HDR)
		return unix.IoctlIfreq(fd, unix.TUNSETIFF, req)
	})
	if err != nil {
		t.Fatal(err)
	}
	f := os.NewFile(uintptr(fd), "tap")
	t.Cleanup(func() { f.Close() })
	return f
}

// listenOn returns a socket that gets what comes in over a device, with what the kernel has yet to do to it.
func listenOn(t *testing.T, device string) int {
	t.Helper()
	link, err := net.InterfaceByName(device)
	if err != nil {
		t.Fatal(err)
	}
	ip := binary.BigEndian.Uint16(binary.NativeEndian.AppendUint16(nil, unix.ETH_P_IP))
	fd, err := unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { unix.Close(fd) })
	limit := unix.NsecToTimeval(int64(10 * time.Second))
	for _, err := range []error{unix.SetsockoptInt(fd, unix.SOL_PACKET, unix.PACKET_VNET_HDR, 1), unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &limit),
		unix.Bind(fd, &unix.SockaddrLinklayer{Protocol: ip, Ifindex: link.Index})} {
		if err != nil {
			t.Fatal(err)
		}
	}
	return fd
}

// bigPacket is a TCP packet of the guest's, in pieces of size bytes, and before it what is to be done to it.
func bigPacket(size, pieces int) []byte {
	payload := size * pieces
	about := []byte{unix.VIRTIO_NET_HDR_F_NEEDS_CSUM, unix.VIRTIO_NET_HDR_GSO_TCPV4}
	for _, field := range []int{54, size, 34, 16} { // headers, piece; where the checksum begins, and where it goes
		about = binary.NativeEndian.AppendUint16(about, uint16(field))
	}
	eth := append(append(append([]byte{}, gatewayMAC...), mustMAC(vmm.GuestMAC)...), 8, 0)
	ip := []byte{0x45, 0, 0, 0, 0, 1, 0x40, 0, 64, unix.IPPROTO_TCP, 0, 0}
	binary.BigEndian.PutUint16(ip[2:], uint16(40+payload))
	ip = append(append(ip, guestAddr.AsSlice()...), netip.MustParseAddr("203.0.113.9").AsSlice()...)
	binary.BigEndian.PutUint16(ip[10:], internetSum(0, ip))
	tcp := []byte{0x9c, 0x40, 0, 80, 0, 0, 0, 1, 0, 0, 0, 1, 0x50, 0x10, 0xff, 0xff, 0, 0, 0, 0} // ACK
	binary.BigEndian.PutUint16(tcp[16:], ^internetSum(pseudo(ip, 20+payload), nil))
	frame := append(append(append(about, eth...), ip...), tcp...)
	return append(frame, make([]byte, payload)...)
}

// pseudo is the sum of what TCP's checksum is about beside TCP.
func pseudo(ip []byte, length int) uint32 {
	sum := uint32(unix.IPPROTO_TCP) + uint32(length)
	for i := 12; i < 20; i += 2 {
		sum += uint32(binary.BigEndian.Uint16(ip[i:]))
	}
	return sum
}

// internetSum is the internet's.
func internetSum(sum uint32, b []byte) uint16 {
	for i := 0; i < len(b); i += 2 {
		sum += uint32(b[i]) << 8
		if i+1 < len(b) {
			sum += uint32(b[i+1])
		}
	}
	for sum > 0xffff {
		sum = sum>>16 + sum&0xffff
	}
	return ^uint16(sum)
}
