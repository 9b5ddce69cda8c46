package hostnet

import (
	"errors"
	"fmt"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// unknown is the bandwidth of a slot that an earlier daemon made.
const unknown = -1

// limit bounds what goes in and out, each in its direction. 0 takes the bound back. Preconditions: s.mu is held.
func (s *Slot) limit(mbit int) error {
	if mbit == s.limited {
		return nil
	}
	h, err := inside(s.ns)
	if err != nil {
		return err
	}
	defer h.Close()
	for _, name := range []string{tapName, uplinkName} {
		link, err := h.LinkByName(name)
		if err == nil {
			err = shape(h, link, mbit)
		}
		if err != nil {
			return fmt.Errorf("bandwidth of %d Mbit/s: %w", mbit, err)
		}
	}
	s.limited = mbit
	return nil
}

// What a link may send at once: a packet of any size that a veth carries, so that none is too large to be sent ever.
const leastBurst = 64 << 10

// shape has what is sent over a link wait its turn: what is more than an eighth of a second of it is dropped.
func shape(h *netlink.Handle, link netlink.Link, mbit int) error {
	attrs := netlink.QdiscAttrs{LinkIndex: link.Attrs().Index, Handle: netlink.MakeHandle(1, 0), Parent: netlink.HANDLE_ROOT}
	rate := uint64(mbit) * 1_000_000 / 8 // bytes a second
	burst := max(rate/100, leastBurst)
	tbf := &netlink.Tbf{QdiscAttrs: attrs, Rate: rate, Limit: uint32(max(rate/8, 2*leastBurst))}
	if mbit > 0 {
		tbf.Buffer = netlink.Xmittime(rate, uint32(burst)) // the kernel takes the time that it takes
		return h.QdiscReplace(tbf)
	}
	if err := h.QdiscDel(tbf); err != nil && !errors.Is(err, unix.ENOENT) && !errors.Is(err, unix.EINVAL) {
		return err
	}
	return nil
}
