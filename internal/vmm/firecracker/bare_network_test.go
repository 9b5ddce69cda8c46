package firecracker

import (
	"errors"
	"fmt"
	"os"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/forkd/forkd/internal/confine"
	"github.com/forkd/forkd/internal/vmm"
	"github.com/forkd/forkd/internal/vmm/probeguest"
)

// TestBareNetwork has a real Firecracker, in its confinement, open the tap of each machine in that machine's own namespace: of a parent, of siblings,
// and of a child of a branch.
func TestBareNetwork(t *testing.T) {
	t.Run("confined", func(t *testing.T) { networkBare(t, newBareNet(t, Options{})) })
	t.Run("jailed", func(t *testing.T) {
		jailer := os.Getenv("FORKD_JAILER")
		if jailer == "" {
			t.Skip("FORKD_JAILER names no jailer of Firecracker's")
		}
		networkBare(t, newBareNet(t, Options{Jailer: jailer}))
	})
}

func networkBare(t *testing.T, b *bare) {
	var last *machine
	for range 3 {
		b.nic = newNIC(t, b.shape)
		last = b.child(t, b.image, b.state)
		checkPlugged(t, last, b.nic)
		resume(t, last)
		ask(t, last, []byte{probeguest.Echo}, probeguest.Echo)
	}
	if got := last.Process().Confinement; got != string(confine.Full) {
		t.Errorf("the machine's confinement is %q", got)
	}
	img, state := branch(t, last, b.image)
	b.nic = newNIC(t, b.shape)
	next := b.child(t, img, state)
	checkPlugged(t, next, b.nic)
	resume(t, next)
	ask(t, next, []byte{probeguest.Echo}, probeguest.Echo)
	if err := next.Kill(); err != nil {
		t.Error(err)
	}
	checkNetworkLeft(t, b.nic)
}

func newBareNet(t *testing.T, opt Options) *bare {
	t.Helper()
	if !canHaveTaps() {
		t.Skip("only root can make taps, where the kernel has them")
	}
	return newBareOf(t, vmm.Shape{MemMiB: bareMiB, VCPUs: 1, Net: true}, opt)
}

// TestBareUnplugged restores a machine with a network device where there are no networks.
func TestBareUnplugged(t *testing.T) {
	b := newBareNet(t, Options{})
	m := b.child(t, b.image, b.state)
	resume(t, m)
	ask(t, m, []byte{probeguest.Echo}, probeguest.Echo)
	ns, err := os.Open(fmt.Sprintf("/proc/%d/ns/net", m.Process().PID))
	if err != nil {
		t.Fatal(err)
	}
	defer ns.Close()
	checkPlugged(t, m, &vmm.NIC{NetNS: ns})
}

// TestBareNoTap: what Firecracker says of a tap that it can't open is not taken for a word about the snapshot.
func TestBareNoTap(t *testing.T) {
	b := newBareNet(t, Options{})
	nic := newNIC(t, b.shape)
	held, err := unix.Dup(int(nic.Tap.Fd()))
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(held)
	p, err := b.Prepare(t.Context(), vmm.PrepareConfig{Dir: t.TempDir(), Shape: b.shape, Memory: b.image.Base(), NIC: nic})
	if err != nil {
		t.Fatal(err)
	}
	_, err = p.Load(t.Context(), b.state)
	if err == nil || errors.Is(err, vmm.ErrIncompatible) {
		t.Errorf("Load without the tap: %v, want an error that is not about the snapshot", err)
	}
	t.Log(err)
}
