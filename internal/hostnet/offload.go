package hostnet

import (
	"fmt"
	"os"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/forkd/forkd/internal/netns"
)

// endOffloads has the kernel finish what a guest left to it where the guest's namespace ends: packets are cut to their size and have their checksums
// before anything of the host looks at them. A monitor that opens its tap by name may offer its guest to leave both to the other side, and the guest
// says what the sizes are.
func endOffloads(ns *os.File) error {
	return netns.Do(ns, func() error {
		fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			return err
		}
		defer func() { _ = unix.Close(fd) }()
		// Without checksums there is nothing else either: the kernel takes back what rests on them.
		value := struct{ cmd, data uint32 }{unix.ETHTOOL_STXCSUM, 0}
		request := struct {
			name [unix.IFNAMSIZ]byte
			data unsafe.Pointer
			_    [16]byte
		}{data: unsafe.Pointer(&value)}
		copy(request.name[:], uplinkName)
		if _, _, e := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), unix.SIOCETHTOOL, uintptr(unsafe.Pointer(&request))); e != 0 {
			return fmt.Errorf("end the offloads of a namespace: %w", e)
		}
		return nil
	})
}
