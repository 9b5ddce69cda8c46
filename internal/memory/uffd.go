package memory

import (
	"context"
	"errors"
	"fmt"
	"os"
	"sync"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/forkd/forkd/internal/vmm"
)

// From linux/userfaultfd.h, which x/sys does not have.
const (
	userfaultfdNew = 0xaa00 // USERFAULTFD_IOC_NEW, on /dev/userfaultfd

	uffdioAPI          = 0xc018aa3f
	uffdioRegister     = 0xc020aa00
	uffdioUnregister   = 0x8010aa01
	uffdioWriteProtect = 0xc018aa06

	uffdAPI = 0xaa

	uffdFeatureWP      = 1 << 0  // UFFD_FEATURE_PAGEFAULT_FLAG_WP
	uffdFeatureWPShmem = 1 << 12 // UFFD_FEATURE_WP_HUGETLBFS_SHMEM, kernel 5.19: memfds too

	uffdRegisterModeWP     = 1 << 1 // UFFDIO_REGISTER_MODE_WP
	uffdIoctlWriteProtect  = 1 << 6 // bit of UFFDIO_WRITEPROTECT in what registering returns
	uffdWriteProtectModeWP = 1 << 0 // UFFDIO_WRITEPROTECT_MODE_WP; without it the range is let go and who waits for it is woken

	uffdEventPagefault = 0x12 // UFFD_EVENT_PAGEFAULT
	uffdMsgBytes       = 32   // struct uffd_msg: event at 0, address at 16
	uffdMsgAddress     = 16
)

// uffdDevice makes userfaultfds for whoever has it open, without a capability or a sysctl.
const uffdDevice = "/dev/userfaultfd"

// ErrNotTracked says that a process's memory can't be write-protected from outside on this host or for this monitor.
var ErrNotTracked = errors.New("guest memory can't be write-protected")

// ErrWindowOpen says that another window is open over the same guest memory.
var ErrWindowOpen = errors.New("another capture of this memory is going on")

// OpenUFFD opens the device that a monitor must inherit for live branches (vmm.PrepareConfig.UFFD).
func OpenUFFD() (*os.File, error) {
	f, err := os.OpenFile(uffdDevice, os.O_RDWR, 0)
	switch {
	case errors.Is(err, os.ErrNotExist):
		return nil, fmt.Errorf("%s: %w: it needs kernel 6.1 or later with CONFIG_USERFAULTFD (%w)", uffdDevice, ErrNotTracked, err)
	case err != nil:
		return nil, fmt.Errorf("%w: run the daemon as root, or give its user access (%w)", ErrNotTracked, err)
	}
	return f, nil
}

// UFFD is a userfaultfd of a monitor's address space, held by us alone. Closing it, or dying, releases every thread of the
// guest that it holds up and ends all protection.
type UFFD struct {
	id vmm.Process

	mu   sync.Mutex
	fd   int // −1 when closed
	busy bool
}

// Adopt makes a userfaultfd of a running monitor's address space: by one ioctl that its idle thread is made to run on the
// device that it inherited. It wraps ErrNotTracked or ErrNotPermitted where that is not possible, and vmm.ErrGone when there is
// no such monitor any more.
func Adopt(ctx context.Context, id vmm.Process) (*UFFD, error) {
	p, err := openProcess(id)
	if err != nil {
		return nil, err
	}
	defer p.close()
	return adopt(ctx, p)
}

func adopt(ctx context.Context, p *process) (*UFFD, error) {
	if p.UFFDDev <= 0 {
		return nil, fmt.Errorf("monitor %d has not inherited %s: %w", p.PID, uffdDevice, ErrNotTracked)
	}
	fd := -1
	err := inThread(ctx, p, func(r *remote) (err error) {
		fd, err = makeUFFD(ctx, r)
		return err
	})
	if err == nil {
		err = negotiate(fd)
	}
	if err != nil {
		if fd >= 0 {
			unix.Close(fd)
		}
		return nil, fmt.Errorf("adopt a userfaultfd of monitor %d: %w", p.PID, err)
	}
	return &UFFD{id: p.Process, fd: fd}, nil
}

// makeUFFD has the thread make a userfaultfd and takes it away from it: were the monitor to keep it, our death would not end it.
func makeUFFD(ctx context.Context, r *remote) (int, error) {
	theirs, err := r.call(ctx, unix.SYS_IOCTL, uint64(r.proc.UFFDDev), userfaultfdNew, unix.O_CLOEXEC|unix.O_NONBLOCK)
	if err != nil {
		return -1, fmt.Errorf("USERFAULTFD_IOC_NEW on its descriptor %d: %w (%w)", r.proc.UFFDDev, ErrNotTracked, err)
	}
	ours, err := unix.PidfdGetfd(r.proc.pidfd, int(theirs), 0)
	if err != nil {
		ours, err = -1, fmt.Errorf("take its userfaultfd: %w (%w)", ErrNotPermitted, err)
	}
	if _, e := r.call(ctx, unix.SYS_CLOSE, theirs); e != nil {
		err = errors.Join(err, fmt.Errorf("close its copy: %w", e))
	}
	return ours, err
}

// negotiate opens the conversation with a new userfaultfd and asks for all the features a window needs.
func negotiate(fd int) error {
	api := struct{ api, features, ioctls uint64 }{uffdAPI, uffdFeatureWP | uffdFeatureWPShmem, 0}
	if err := ioctl(fd, uffdioAPI, unsafe.Pointer(&api)); err != nil {
		return fmt.Errorf("UFFDIO_API with write protection of memfds: %w: it needs kernel 6.1 or later with CONFIG_PTE_MARKER_UFFD_WP (%w)",
			ErrNotTracked, err)
	}
	return nil
}

// Close ends all protection and releases the guest. It is safe to call twice.
// Preconditions: no capture uses it.
func (u *UFFD) Close() error {
	u.mu.Lock()
	defer u.mu.Unlock()
	if u.fd < 0 {
		return nil
	}
	fd := u.fd
	u.fd = -1
	return unix.Close(fd)
}

// acquire reserves it for one window over the memory of a monitor.
func (u *UFFD) acquire(id vmm.Process) error {
	if u.id.PID != id.PID || u.id.StartTicks != id.StartTicks {
		return fmt.Errorf("userfaultfd is of monitor %d, not of %d", u.id.PID, id.PID)
	}
	u.mu.Lock()
	defer u.mu.Unlock()
	if u.fd < 0 {
		return fmt.Errorf("userfaultfd of monitor %d is closed: %w", u.id.PID, ErrNotTracked)
	}
	if u.busy {
		return fmt.Errorf("monitor %d: %w", u.id.PID, ErrWindowOpen)
	}
	u.busy = true
	return nil
}

func (u *UFFD) release() {
	u.mu.Lock()
	defer u.mu.Unlock()
	u.busy = false
}

// register asks for the faults of writes to protected pages of a range. A range that is registered already stays so.
func (u *UFFD) register(addr, bytes uint64) error {
	arg := struct{ start, len, mode, ioctls uint64 }{addr, bytes, uffdRegisterModeWP, 0}
	err := ioctl(u.fd, uffdioRegister, unsafe.Pointer(&arg))
	switch {
	case errors.Is(err, unix.EBUSY):
		return fmt.Errorf("UFFDIO_REGISTER at %#x: %w", addr, ErrWindowOpen)
	case err != nil:
		return fmt.Errorf("UFFDIO_REGISTER at %#x: %w (%w)", addr, ErrNotTracked, err)
	case arg.ioctls&uffdIoctlWriteProtect == 0:
		return fmt.Errorf("UFFDIO_REGISTER at %#x: %w: this kind of memory has no write protection", addr, ErrNotTracked)
	}
	return nil
}

// unregister ends the protection of a range and wakes who waits for it.
func (u *UFFD) unregister(addr, bytes uint64) error {
	arg := struct{ start, len uint64 }{addr, bytes}
	if err := ioctl(u.fd, uffdioUnregister, unsafe.Pointer(&arg)); err != nil {
		return fmt.Errorf("UFFDIO_UNREGISTER at %#x: %w", addr, err)
	}
	return nil
}

// writeProtect protects a range, or lets it go and wakes who waits for it. ENOENT is returned as it is: kernels before 6.4 take
// no range of more than one mapping.
func (u *UFFD) writeProtect(addr, bytes uint64, on bool) error {
	arg := struct{ start, len, mode uint64 }{addr, bytes, 0}
	if on {
		arg.mode = uffdWriteProtectModeWP
	}
	for {
		err := ioctl(u.fd, uffdioWriteProtect, unsafe.Pointer(&arg))
		if err != unix.EAGAIN && err != unix.EINTR { // EAGAIN: the address space is being changed
			return err
		}
	}
}

// ioctl returns a plain errno, so that it can be compared.
func ioctl(fd int, request uintptr, arg unsafe.Pointer) error {
	if _, _, e := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), request, uintptr(arg)); e != 0 {
		return e
	}
	return nil
}
