package hostnet

import (
	"errors"
	"fmt"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

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

// shape has what is sent over a link wait its turn: what is more than an eighth of a second of it is dropped.
func shape(h *netlink.Handle, link netlink.Link, mbit int) error {
	attrs := netlink.QdiscAttrs{LinkIndex: link.Attrs().Index, Handle: netlink.MakeHandle(1, 0), Parent: netlink.HANDLE_ROOT}
	rate := uint64(mbit) * 1_000_000 / 8 // bytes a second
	tbf := &netlink.Tbf{QdiscAttrs: attrs, Rate: rate, Buffer: uint32(max(rate/100, 16<<10)), Limit: uint32(max(rate/8, 64<<10))}
	if mbit > 0 {
		return h.QdiscReplace(tbf)
	}
	if err := h.QdiscDel(tbf); err != nil && !errors.Is(err, unix.ENOENT) && !errors.Is(err, unix.EINVAL) {
		return err
	}
	return nil
}
