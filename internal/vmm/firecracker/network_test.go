package firecracker

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/forkd/forkd/internal/netns"
	"github.com/forkd/forkd/internal/vmm"
)

const callNetwork = "PUT /network-interfaces/net"

// canHaveTaps says whether machines may have network devices here.
func canHaveTaps() bool {
	_, err := os.Stat(netns.TunDevice)
	return os.Geteuid() == 0 && err == nil
}

// newNetHost is a fake host whose machines have network devices.
func newNetHost(t *testing.T) *fakeHost {
	t.Helper()
	if !canHaveTaps() {
		t.Skip("only root can make taps, where the kernel has them")
	}
	h := newFakeHost(t, fakeOrders{})
	h.shape.Net = true
	return h
}

// newNIC makes a network namespace with a tap, as internal/hostnet does; nil for a shape without a device.
func newNIC(t *testing.T, shape vmm.Shape) *vmm.NIC {
	t.Helper()
	if !shape.Net {
		return nil
	}
	var tap *os.File
	ns, err := netns.New(func() (err error) {
		tap, err = netns.OpenTap(vmm.TapName)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { tap.Close(); ns.Close() })
	return &vmm.NIC{Tap: tap, NetNS: ns}
}

// checkNetworkLeft checks that nobody but we holds what a machine was plugged into.
func checkNetworkLeft(t *testing.T, nic *vmm.NIC) {
	t.Helper()
	if nic == nil {
		return
	}
	nic.Tap.Close() // it was, if the machine was started
	err := netns.Do(nic.NetNS, func() error {
		tap, err := netns.OpenTap(vmm.TapName)
		if err == nil {
			err = tap.Close()
		}
		return err
	})
	if err != nil {
		t.Errorf("the tap is held by somebody: %v", err)
	}
	for _, pid := range processesOf(t, nic.NetNS) {
		if pid != os.Getpid() {
			t.Errorf("process %d is left in the network namespace", pid)
		}
	}
}

// processesOf lists the processes in a network namespace.
func processesOf(t *testing.T, ns *os.File) (pids []int) {
	t.Helper()
	var want unix.Stat_t
	if err := unix.Fstat(int(ns.Fd()), &want); err != nil {
		t.Fatal(err)
	}
	all, err := filepath.Glob("/proc/[0-9]*/ns/net")
	if err != nil {
		t.Fatal(err)
	}
	for _, path := range all {
		var st unix.Stat_t
		if unix.Stat(path, &st) == nil && st.Ino == want.Ino && st.Dev == want.Dev {
			var pid int
			fmt.Sscanf(path, "/proc/%d/", &pid)
			pids = append(pids, pid)
		}
	}
	return pids
}

// tapsOf lists the taps that a process has open.
func tapsOf(t *testing.T, pid int) (names []string) {
	t.Helper()
	infos, err := filepath.Glob(fmt.Sprintf("/proc/%d/fdinfo/*", pid))
	if err != nil {
		t.Fatal(err)
	}
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

// checkPlugged checks that a machine holds its tap and no other, in its own namespace.
func checkPlugged(t *testing.T, m vmm.Machine, nic *vmm.NIC) {
	t.Helper()
	pid := m.Process().PID
	if got := tapsOf(t, pid); !slices.Equal(got, []string{vmm.TapName}) {
		t.Errorf("machine %d holds the taps %q, want %s", pid, got, vmm.TapName)
	}
	if got := processesOf(t, nic.NetNS); !slices.Equal(got, []int{pid}) {
		t.Errorf("in the machine's namespace: %v, want it, %d", got, pid)
	}
}

func TestNetwork(t *testing.T) {
	h := newNetHost(t)
	h.nic = newNIC(t, h.shape)
	parent, err := h.boot(t.Context(), t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	defer parent.Kill()
	checkPlugged(t, parent, h.nic)
	h.freeze(t)
	var all []vmm.Machine
	for range 3 {
		h.nic = newNIC(t, h.shape)
		child, err := h.child(t.Context(), t.TempDir())
		if err != nil {
			t.Fatal(err)
		}
		defer child.Kill()
		checkPlugged(t, child, h.nic)
		all = append(all, child)
	}
	if err := all[2].Kill(); err != nil {
		t.Error(err)
	}
	checkNetworkLeft(t, h.nic)
}

// TestUnplugged: a device that is plugged in nowhere has a tap as well, where nobody else is.
func TestUnplugged(t *testing.T) {
	h := newNetHost(t)
	h.freeze(t)
	m, err := h.child(t.Context(), t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	defer m.Kill()
	ns, err := os.Open(fmt.Sprintf("/proc/%d/ns/net", m.Process().PID))
	if err != nil {
		t.Fatal(err)
	}
	defer ns.Close()
	checkPlugged(t, m, &vmm.NIC{NetNS: ns})
}

// TestNoTap: a tap that can't be opened is not the snapshot's fault.
func TestNoTap(t *testing.T) {
	h := newNetHost(t)
	h.freeze(t)
	h.nic = newNIC(t, h.shape)
	held, err := unix.Dup(int(h.nic.Tap.Fd()))
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(held)
	dir, before := t.TempDir(), processes(t)
	_, err = h.child(t.Context(), dir)
	if err == nil || errors.Is(err, vmm.ErrIncompatible) || !strings.Contains(err.Error(), "tap device") {
		t.Errorf("got %v, want an error about the tap, and not about the snapshot", err)
	}
	checkNothingLeft(t, dir, before)
}
