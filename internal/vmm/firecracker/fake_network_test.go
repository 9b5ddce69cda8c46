package firecracker

import (
	"errors"
	"fmt"
	"hash/crc32"
	"net"
	"strings"

	"golang.org/x/sys/unix"
)

// encodeState is the device state of a fake Firecracker, which names its tap.
func encodeState(tap string) []byte {
	text := "a device state of a fake Firecracker, tap=" + tap
	return fmt.Appendf(nil, "%s %08x", text, crc32.ChecksumIEEE([]byte(text)))
}

func decodeState(state []byte) (tap string, ok bool) {
	_, tap, _ = strings.Cut(string(state), "tap=")
	tap, _, _ = strings.Cut(tap, " ")
	return tap, string(encodeState(tap)) == string(state)
}

// network attaches the device. As the API has it, the name in the path is the one in the body.
func (f *fake) network(b map[string]any) error {
	if b["iface_id"] != "net" {
		return errors.New("the id from the path does not match the id from the body")
	}
	if mac, ok := b["guest_mac"].(string); ok {
		if _, err := net.ParseMAC(mac); err != nil {
			return err
		}
	}
	name, _ := b["host_dev_name"].(string)
	return f.openTap(name)
}

// openTap opens a tap as Firecracker does: by its name, with offloads.
func (f *fake) openTap(name string) error {
	if name == "" {
		return nil
	}
	fd, err := unix.Open("/dev/net/tun", unix.O_RDWR|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("Open tap device failed: Couldn't open /dev/net/tun: %w", err)
	}
	req, err := unix.NewIfreq(name)
	if err != nil {
		return err
	}
	req.SetUint16(unix.IFF_TAP | unix.IFF_NO_PI | unix.IFF_VNET_HDR)
	if err := unix.IoctlIfreq(fd, unix.TUNSETIFF, req); err != nil {
		return fmt.Errorf("Open tap device failed: Error while creating ifreq structure: %w. Invalid TUN/TAP Backend provided by %s", err, name)
	}
	f.tap, f.tapName = fd, name
	return nil
}
