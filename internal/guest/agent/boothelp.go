package agent

import (
	"errors"
	"os"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

const moduleList = "/modules/load.order"

// loadModules loads what the initramfs lists, in its order; a path is below the list's directory. A list that is not there is empty: the
// kernel has everything built in.
func loadModules() error {
	list, err := readFile(moduleList)
	if err == unix.ENOENT {
		return nil
	}
	if err != nil {
		return errors.New("can't read " + moduleList + ": " + err.Error())
	}
	for line := range strings.Lines(string(list)) {
		name := strings.TrimSpace(line)
		if name == "" || name[0] == '#' {
			continue
		}
		if err := loadModule("/modules/" + name); err != nil {
			return errors.New("can't load kernel module " + name + ": " + err.Error() + "; do kernel and modules belong together?")
		}
	}
	return nil
}

func loadModule(path string) error {
	fd, err := open(path, unix.O_RDONLY)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	flags := 0
	if strings.HasSuffix(path, ".xz") || strings.HasSuffix(path, ".zst") || strings.HasSuffix(path, ".gz") {
		flags = unix.MODULE_INIT_COMPRESSED_FILE
	}
	err = unix.FinitModule(fd, "", flags)
	switch err {
	case unix.EEXIST:
		return nil // loaded, or built in
	case unix.ENODEV:
		return nil // a driver for hardware that is not here, such as a crypto module for another CPU
	}
	return err
}

// uevents is the kernel's stream of device events.
type uevents struct{ fd int }

func newUevents() (*uevents, error) {
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, unix.NETLINK_KOBJECT_UEVENT)
	if err != nil {
		return nil, os.NewSyscallError("uevent socket", err)
	}
	if err := unix.Bind(fd, &unix.SockaddrNetlink{Family: unix.AF_NETLINK, Groups: 1}); err != nil {
		unix.Close(fd)
		return nil, os.NewSyscallError("uevent bind", err)
	}
	return &uevents{fd: fd}, nil
}

func (u *uevents) close() { unix.Close(u.fd) }

var errNoEvent = errors.New("timed out")

// waitFor returns when there says yes; it is asked again at every event of a device.
func (u *uevents) waitFor(limit time.Duration, there func() bool) error {
	deadline := time.Now().Add(limit)
	var buf [4096]byte
	for !there() {
		left := time.Until(deadline)
		if left <= 0 {
			return errNoEvent
		}
		fds := []unix.PollFd{{Fd: int32(u.fd), Events: unix.POLLIN}}
		if _, err := unix.Poll(fds, int(left.Milliseconds())+1); err != nil && err != unix.EINTR {
			return os.NewSyscallError("poll", err)
		}
		for { // an overrun of the socket is no loss: the question is asked again anyway
			if _, err := unix.Read(u.fd, buf[:]); err == unix.EAGAIN || err == unix.EINTR {
				break
			}
		}
	}
	return nil
}

// loopbackUp sets the flag; the kernel then gives lo its address by itself.
func loopbackUp() error {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return os.NewSyscallError("socket", err)
	}
	defer unix.Close(fd)
	return linkUp(fd, "lo")
}
