package memory

import (
	"errors"
	"fmt"
	"os"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Support says what this host lets us do with a monitor's memory. A nil error means that it can be done; others say what is
// missing and what to do.
type Support struct {
	Live  error // live branches: write protection of a monitor's memory, and calls in its threads
	Calls error // calls in a monitor's threads: layers over an image
}

// Probe tries what can be tried without a monitor: it protects a private mapping of a memfd of our own, and looks at our
// capabilities.
func Probe() Support {
	calls := probeCalls()
	live := probeProtection()
	if live == nil {
		live = calls
	}
	return Support{Live: live, Calls: calls}
}

// probeCalls looks for what ptrace needs: the capabilities, and that no filter is over us (else a monitor's can't be suspended).
func probeCalls() error {
	if b, err := os.ReadFile("/proc/sys/kernel/yama/ptrace_scope"); err == nil && b[0] == '3' {
		return fmt.Errorf("%w: kernel.yama.ptrace_scope is 3: set it to 2 or less and start the host again", ErrNotPermitted)
	}
	header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var data [2]unix.CapUserData
	if err := unix.Capget(&header, &data[0]); err != nil {
		return fmt.Errorf("%w: read capabilities: %w", ErrNotPermitted, err)
	}
	for name, bit := range map[string]uint{"CAP_SYS_PTRACE": unix.CAP_SYS_PTRACE, "CAP_SYS_ADMIN": unix.CAP_SYS_ADMIN} {
		if data[0].Effective&(1<<bit) == 0 {
			return fmt.Errorf("%w: the daemon lacks %s: run it as root", ErrNotPermitted, name)
		}
	}
	if filtered(os.Getpid(), unix.Gettid()) {
		return fmt.Errorf("%w: the daemon runs under a seccomp filter: run it without one (in a container: --security-opt seccomp=unconfined)",
			ErrNotPermitted)
	}
	return nil
}

func probeProtection() error { return protectOwnPage(func([]byte) error { return nil }) }

// protectOwnPage calls do with a page of a memfd that we map privately, as a monitor does, that was never touched and is
// write-protected by a userfaultfd of our own. Don't write to it.
func protectOwnPage(do func(page []byte) error) (err error) {
	dev, err := OpenUFFD()
	if err != nil {
		return err
	}
	defer dev.Close()
	fd, _, errno := unix.Syscall(unix.SYS_IOCTL, dev.Fd(), userfaultfdNew, unix.O_CLOEXEC|unix.O_NONBLOCK)
	if errno != 0 {
		return fmt.Errorf("%s: %w (%w)", uffdDevice, ErrNotTracked, errno)
	}
	u := &UFFD{fd: int(fd)}
	defer func() { err = errors.Join(err, u.Close()) }()
	if err := negotiate(u.fd); err != nil {
		return err
	}
	f, err := New("probe", PageSize)
	if err != nil {
		return err
	}
	defer f.Close()
	page, err := unix.Mmap(int(f.Fd()), 0, PageSize, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE)
	if err != nil {
		return fmt.Errorf("map %s: %w", f.Name(), err)
	}
	defer unix.Munmap(page)
	addr := uint64(uintptr(unsafe.Pointer(&page[0])))
	if err := u.register(addr, PageSize); err != nil {
		return err
	}
	if err := u.writeProtect(addr, PageSize, true); err != nil {
		return fmt.Errorf("write-protect a page: %w (%w)", ErrNotTracked, err)
	}
	return do(page)
}
