package firecracker

import (
	"fmt"
	"os"
	"strings"

	"github.com/forkd/forkd/internal/netns"
	"github.com/forkd/forkd/internal/vmm"
)

// Firecracker opens the tap by its name, when the device is attached and when a state with it is loaded. The name is in the state, and is the same in
// every network namespace, so that no child needs another than its parent had. What the device may offer to a guest can't be chosen: checksums and
// segmentation are left to the other side, in both directions. internal/hostnet sees to it that segments of a guest's making end in its namespace.

// plug returns what a machine's device is plugged into; done is called when the machine has started. A device that is not plugged in anywhere
// has a tap in a namespace of its own, with nothing else in it: Firecracker knows no device without one.
func plug(nic *vmm.NIC) (_ *vmm.NIC, done func(), err error) {
	if nic != nil {
		return nic, func() {}, nil
	}
	if os.Geteuid() != 0 {
		return nil, nil, fmt.Errorf("the machine has a network device, which Firecracker needs a tap for, and only root can make one: "+
			"run the daemon as root, or make a snapshot without the device: %w", vmm.ErrIncompatible)
	}
	nic = &vmm.NIC{}
	nic.NetNS, err = netns.New(func() (err error) {
		nic.Tap, err = netns.OpenTap(vmm.TapName)
		return err
	})
	if err != nil {
		return nil, nil, fmt.Errorf("a tap for a network device that is not plugged in: %w", err)
	}
	return nic, func() {
		_ = nic.Tap.Close() // it was, if the machine got as far as that
		_ = nic.NetNS.Close()
	}, nil
}

// aboutTap says whether a refusal is about a tap, and not about the state that names it.
func (r *refusal) aboutTap() bool { return strings.Contains(r.message, "tap device") }
