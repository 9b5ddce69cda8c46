package vmmtest

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/vishvananda/netlink"
	nlns "github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"github.com/forkd/forkd/internal/netns"
	"github.com/forkd/forkd/internal/vmm"
)

// The network that the suite's machines are in.
var (
	guestPrefix = netip.MustParsePrefix("10.117.0.2/30")
	gateway     = netip.MustParseAddr("10.117.0.1")
)

// addNetwork gives all machines of the suite a network device, where the engine has them and we may make taps. Most are not plugged in.
func (s *suite) addNetwork() {
	if _, err := os.Stat(netns.TunDevice); err != nil || os.Geteuid() != 0 || !s.info.Features.Net {
		return
	}
	s.h.Shape.Net = true
	s.h.Cmdline = append(slices.Clone(s.h.Cmdline), "forkd.net="+guestPrefix.String()+","+gateway.String())
}

// testNetwork plugs siblings, which have the same address, into namespaces of their own. Each holds its own tap and no other, its guest is reached
// through it, and nothing holds it afterwards.
func (s *suite) testNetwork(t *testing.T) {
	if !s.h.Shape.Net {
		t.Skip("the engine has no network devices, or we may not make taps")
	}
	var nics []*vmm.NIC
	var all []*vm
	for i := range s.h.Children {
		nic := newNIC(t)
		nics = append(nics, nic)
		all = append(all, s.forkWith(t, fmt.Sprintf("plugged-%d", i), func(cfg *vmm.PrepareConfig) { cfg.NIC = nic }))
	}
	for i, child := range all {
		pid := child.Process().PID
		if got := tapsOf(pid); !slices.Equal(got, []string{vmm.TapName}) {
			t.Errorf("the monitor of child %d holds the taps %q, want %s", i, got, vmm.TapName)
		}
		if got := inNamespace(nics[i].NetNS); !slices.Equal(got, []int{pid}) {
			t.Errorf("processes in the namespace of child %d: %v, want its monitor, %d", i, got, pid)
		}
		s.checkReached(t, i, nics[i].NetNS)
	}
	if err := all[0].Kill(); err != nil {
		t.Errorf("Kill: %v", err)
	}
	for i := range all[1:] {
		s.checkReached(t, i+1, nics[i+1].NetNS)
	}
	_ = nics[0].Tap.Close() // the engine may have done that
	err := netns.Do(nics[0].NetNS, func() error {
		tap, err := netns.OpenTap(vmm.TapName)
		if err == nil {
			err = tap.Close()
		}
		return err
	})
	if got := inNamespace(nics[0].NetNS); err != nil || len(got) > 0 {
		t.Errorf("after Kill: the tap can be opened: %v; processes in its namespace: %v", err, got)
	}
}

// checkReached connects to a port that nothing listens on: the guest's kernel says so.
func (s *suite) checkReached(t *testing.T, child int, ns *os.File) {
	t.Helper()
	const port = 9
	err := netns.Do(ns, func() error {
		ctx, cancel := context.WithTimeout(t.Context(), s.h.Timeout)
		defer cancel()
		conn, err := (&net.Dialer{}).DialContext(ctx, "tcp4", netip.AddrPortFrom(guestPrefix.Addr(), port).String())
		if err == nil {
			_ = conn.Close()
		}
		return err
	})
	if !errors.Is(err, unix.ECONNREFUSED) {
		t.Errorf("child %d, asked over its network for a port that nothing listens on: %v, want it to refuse", child, err)
	}
}

// newNIC makes a namespace with a tap in it, and with what the guest takes for its gateway.
func newNIC(t *testing.T) *vmm.NIC {
	t.Helper()
	nic := &vmm.NIC{}
	var err error
	nic.NetNS, err = netns.New(func() (err error) {
		nic.Tap, err = netns.OpenTap(vmm.TapName)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { nic.Tap.Close(); nic.NetNS.Close() })
	h, err := netlink.NewHandleAt(nlns.NsHandle(nic.NetNS.Fd()), unix.NETLINK_ROUTE)
	if err != nil {
		t.Fatal(err)
	}
	defer h.Close()
	tap, err := h.LinkByName(vmm.TapName)
	if err == nil {
		err = h.LinkSetUp(tap)
	}
	if err == nil {
		own := net.IPNet{IP: gateway.AsSlice(), Mask: net.CIDRMask(guestPrefix.Bits(), 32)}
		err = h.AddrAdd(tap, &netlink.Addr{IPNet: &own})
	}
	if err != nil {
		t.Fatal(err)
	}
	return nic
}

// tapsOf lists the taps that a process has open.
func tapsOf(pid int) (names []string) {
	infos, _ := filepath.Glob(fmt.Sprintf("/proc/%d/fdinfo/*", pid))
	for _, info := range infos {
		b, _ := os.ReadFile(info)
		for line := range strings.Lines(string(b)) {
			if name, ok := strings.CutPrefix(line, "iff:"); ok {
				names = append(names, strings.TrimSpace(name))
			}
		}
	}
	return names
}

// inNamespace lists the processes in a network namespace.
func inNamespace(ns *os.File) (list []int) {
	want, err := ns.Stat()
	if err != nil {
		return nil
	}
	for _, pid := range pids() {
		if sameFile(fmt.Sprintf("/proc/%d/ns/net", pid), want) {
			list = append(list, pid)
		}
	}
	return list
}
