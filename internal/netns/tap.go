package netns

import (
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// TunDevice is what taps are opened by.
const TunDevice = "/dev/net/tun"

// OpenTap makes a tap in the namespace of this thread, or opens one that was handed over. One that was not is gone when nobody has it open.
func OpenTap(name string) (*os.File, error) {
	fd, err := unix.Open(TunDevice, unix.O_RDWR|unix.O_CLOEXEC|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil, fmt.Errorf("open %s: %w", TunDevice, err)
	}
	req, err := unix.NewIfreq(name)
	if err == nil {
		req.SetUint16(unix.IFF_TAP | unix.IFF_NO_PI)
		err = unix.IoctlIfreq(fd, unix.TUNSETIFF, req)
	}
	if err != nil {
		_ = unix.Close(fd)
		return nil, fmt.Errorf("make a tap: %w", err)
	}
	return os.NewFile(uintptr(fd), "tap"), nil
}

// HandOver lets a process that is started after it open a tap by its name: one of that user, or of root, in the tap's namespace. From then on the
// tap lives as long as its namespace. It is closed here, since it can be open only once; so nothing may be using it.
//
// No other process that is being started has it open for a moment longer: os.StartProcess starts one after the other, and returns when the one
// before has closed what it does not inherit.
func HandOver(tap *os.File, uid uint32) error {
	fd := int(tap.Fd())
	err := unix.IoctlSetInt(fd, unix.TUNSETOWNER, int(uid))
	if err == nil {
		err = unix.IoctlSetInt(fd, unix.TUNSETPERSIST, 1)
	}
	if err = errors.Join(err, tap.Close()); err != nil {
		return fmt.Errorf("hand over a tap: %w", err)
	}
	return nil
}
