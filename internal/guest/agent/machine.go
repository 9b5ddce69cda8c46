package agent

import (
	"os"
	"unsafe"

	"golang.org/x/sys/unix"
)

// kernel is the Machine of a guest of its own.
type kernel struct {
	random int // /dev/urandom, opened at the first use; -1 before
	// struct rand_pool_info of linux/random.h: entropy_count in bits, buf_size in bytes, buf.
	pool struct {
		bits, size int32
		buf        [256]byte
	}
}

// SetClock sets the wall clock.
func (*kernel) SetClock(unixNano int64) error {
	ts := unix.NsecToTimespec(unixNano)
	return os.NewSyscallError("clock_settime", unix.ClockSettime(unix.CLOCK_REALTIME, &ts))
}

// AddEntropy mixes fresh bytes into the kernel's pool, credits them, and makes the generator take its next key from the pool, which also
// throws away what it has generated ahead for each CPU.
func (k *kernel) AddEntropy(fresh []byte) error {
	if k.random < 0 {
		fd, err := open("/dev/urandom", unix.O_RDWR)
		if err != nil {
			return os.NewSyscallError("open /dev/urandom", err)
		}
		k.random = fd
	}
	for len(fresh) > 0 {
		n := copy(k.pool.buf[:], fresh)
		fresh = fresh[n:]
		k.pool.size = int32(n)
		k.pool.bits = int32(8 * n)
		if _, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(k.random), unix.RNDADDENTROPY, uintptr(unsafe.Pointer(&k.pool))); errno != 0 {
			return os.NewSyscallError("RNDADDENTROPY", errno)
		}
	}
	clear(k.pool.buf[:])
	if _, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(k.random), unix.RNDRESEEDCRNG, 0); errno != 0 {
		return os.NewSyscallError("RNDRESEEDCRNG", errno)
	}
	return nil
}

// SetHostname sets the kernel's host name.
func (*kernel) SetHostname(name string) error {
	return os.NewSyscallError("sethostname", unix.Sethostname([]byte(name)))
}

// nowhere is the Machine of a sandboxed agent: it changes nothing.
type nowhere struct{}

// SetClock does nothing.
func (nowhere) SetClock(int64) error { return nil }

// AddEntropy does nothing.
func (nowhere) AddEntropy([]byte) error { return nil }

// SetHostname does nothing.
func (nowhere) SetHostname(string) error { return nil }
