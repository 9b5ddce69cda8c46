package agent

import (
	"errors"
	"os"

	"golang.org/x/sys/unix"
)

const (
	controlPort     = 1024
	controlPortName = "forkd.1024"
)

// findChannel waits for the control channel: a virtio-serial port with its name or, when the machine has a vsock device, that.
func findChannel(ev *uevents) (transport, error) {
	var device string
	vsock := false
	err := ev.waitFor(portWait, func() bool {
		device = findPort(controlPortName)
		vsock = device == "" && hasVsock()
		return vsock || device != "" && exists(device)
	})
	if err != nil {
		return nil, errors.New("no control channel appeared: neither a virtio-serial port named " + controlPortName + " nor a vsock device")
	}
	if vsock {
		return listenVsock(controlPort)
	}
	return openPort(device)
}

// findPort returns the device of the virtio-serial port with that name, or "".
func findPort(name string) string {
	const dir = "/sys/class/virtio-ports"
	entries, err := readDir(dir)
	if err != nil {
		return ""
	}
	for _, e := range entries {
		if b, err := readFile(dir + "/" + e + "/name"); err == nil && firstLine(b) == name {
			return "/dev/" + e
		}
	}
	return ""
}

// hasVsock says whether the machine has a vsock device with an address of its own; the driver alone makes /dev/vsock too.
func hasVsock() bool {
	fd, err := open("/dev/vsock", unix.O_RDONLY)
	if err != nil {
		return false
	}
	defer unix.Close(fd)
	cid, err := unix.IoctlGetUint32(fd, unix.IOCTL_VM_SOCKETS_GET_LOCAL_CID)
	return err == nil && cid > unix.VMADDR_CID_HOST && cid != unix.VMADDR_CID_ANY
}

func listenVsock(number uint32) (transport, error) {
	fd, err := unix.Socket(unix.AF_VSOCK, unix.SOCK_STREAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		return nil, os.NewSyscallError("vsock socket", err)
	}
	if err := unix.Bind(fd, &unix.SockaddrVM{CID: unix.VMADDR_CID_ANY, Port: number}); err != nil {
		unix.Close(fd)
		return nil, os.NewSyscallError("vsock bind", err)
	}
	if err := unix.Listen(fd, 4); err != nil {
		unix.Close(fd)
		return nil, os.NewSyscallError("vsock listen", err)
	}
	return &streams{listener: listener{fd: fd, conn: -1}}, nil
}
