package agent

import (
	"errors"
	"net/netip"
	"os"
	"strings"
	"unsafe"

	"golang.org/x/sys/unix"
)

// netDevice is the machine's only network device, as a kernel without udev names it.
const netDevice = "eth0"

// setupNetwork gives the network device what the word forkd.net says: "ADDRESS/BITS,GATEWAY". The gateway is the resolver of names as well. All of
// it is in the snapshot, and right in every fork: each is in a network of its own, with the same addresses. IPv6 is not spoken there.
func setupNetwork(word string) error {
	if word == "" {
		return nil
	}
	own, gateway, ok := strings.Cut(word, ",")
	prefix, err := netip.ParsePrefix(own)
	if !ok || err != nil || !prefix.Addr().Is4() {
		return errors.New("forkd.net=" + word + " is not ADDRESS/BITS,GATEWAY")
	}
	router, err := netip.ParseAddr(gateway)
	if err != nil || !router.Is4() {
		return errors.New("forkd.net=" + word + ": the gateway is not an address")
	}
	writeValue("/proc/sys/net/ipv6/conf/"+netDevice+"/disable_ipv6", "1") // a kernel without IPv6 has no such file
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return os.NewSyscallError("socket", err)
	}
	defer unix.Close(fd)
	if err := setAddress(fd, prefix); err != nil {
		return err
	}
	if err := addDefaultRoute(fd, router); err != nil {
		return os.NewSyscallError("SIOCADDRT", err)
	}
	_ = unix.Unlink("/etc/resolv.conf") // it may be a link to a file of a service that does not run
	var resolv keptFile
	err = resolv.replace("", "/etc/resolv.conf", []byte("nameserver "+router.String()+"\n"))
	resolv.close()
	return err
}

// setAddress sets address and mask, and brings the device up.
func setAddress(fd int, prefix netip.Prefix) error {
	address := prefix.Addr().As4()
	mask := [4]byte{}
	for i := range prefix.Bits() {
		mask[i/8] |= 0x80 >> (i % 8)
	}
	for _, set := range []struct {
		name  string
		req   uint
		value [4]byte
	}{{"SIOCSIFADDR", unix.SIOCSIFADDR, address}, {"SIOCSIFNETMASK", unix.SIOCSIFNETMASK, mask}} {
		req, err := unix.NewIfreq(netDevice)
		if err == nil {
			err = req.SetInet4Addr(set.value[:])
		}
		if err == nil {
			err = unix.IoctlIfreq(fd, set.req, req)
		}
		if err != nil {
			return os.NewSyscallError(set.name, err)
		}
	}
	return linkUp(fd, netDevice)
}

// linkUp sets a device's flag.
func linkUp(fd int, name string) error {
	req, err := unix.NewIfreq(name)
	if err != nil {
		return err
	}
	if err := unix.IoctlIfreq(fd, unix.SIOCGIFFLAGS, req); err != nil {
		return os.NewSyscallError("SIOCGIFFLAGS", err)
	}
	req.SetUint16(req.Uint16() | unix.IFF_UP)
	return os.NewSyscallError("SIOCSIFFLAGS", unix.IoctlIfreq(fd, unix.SIOCSIFFLAGS, req))
}

// rtentry is struct rtentry of linux/route.h on 64-bit machines.
type rtentry struct {
	_                 uint64
	dst, gateway, net unix.RawSockaddrInet4
	flags             uint16
	_                 [6]byte
	_                 uint64
	_                 [8]byte
	metric            int16
	_                 [6]byte
	device            uintptr
	_                 [3]uint64
}

func addDefaultRoute(fd int, gateway netip.Addr) error {
	const up, viaGateway = 1, 2
	route := rtentry{flags: up | viaGateway}
	route.dst.Family, route.gateway.Family, route.net.Family = unix.AF_INET, unix.AF_INET, unix.AF_INET
	route.gateway.Addr = gateway.As4()
	_, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), unix.SIOCADDRT, uintptr(unsafe.Pointer(&route)))
	if errno != 0 && errno != unix.EEXIST {
		return errno
	}
	return nil
}

// writeValue writes a setting of the kernel.
func writeValue(path, value string) {
	fd, err := open(path, unix.O_WRONLY)
	if err != nil {
		return
	}
	_, _ = unix.Write(fd, []byte(value))
	unix.Close(fd)
}
