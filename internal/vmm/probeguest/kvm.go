package probeguest

import (
	"errors"
	"fmt"
	"os"
	"runtime"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Numbers of KVM's interface (linux/kvm.h).
const (
	kvmGetAPIVersion    = 0xae00
	kvmCreateVM         = 0xae01
	kvmGetVCPUMmapSize  = 0xae04
	kvmGetSupportedCPU  = 0xc008ae05
	kvmCreateVCPU       = 0xae41
	kvmSetMemory        = 0x4020ae46
	kvmSetTSSAddr       = 0xae47
	kvmRun              = 0xae80
	kvmGetRegs          = 0x8090ae81
	kvmSetRegs          = 0x4090ae82
	kvmGetSregs         = 0x8138ae83
	kvmSetSregs         = 0x4138ae84
	kvmSetCPUID2        = 0x4008ae90
	kvmVersion          = 12
	kvmTSSAddress       = 0xfffbd000 // three pages that no guest of ours uses
	exitIO              = 2
	exitHalt            = 5
	ioOut               = 1
	maxCPUIDEntries     = 256
	exitReasonAt        = 8  // of struct kvm_run
	immediateExitAt     = 1  // of struct kvm_run
	ioAt                = 32 // of struct kvm_run
	guestRAM            = 8 << 20
	kickInterval        = 10 * time.Millisecond
	maxKicks            = 200
	serialData, serialS = 0x3f8, 0x3fd
)

type memoryRegion struct {
	slot, flags       uint32
	guest, size, host uint64
}

// machine is a guest on /dev/kvm with one processor.
type machine struct {
	kvm, vm, vcpu int
	run           []byte
	ram           []byte
	rom           []byte
	out           func(port uint16, b byte) (done bool)
	in            func(port uint16) byte
}

func ioctl(fd int, request, arg uintptr) (int, error) {
	for {
		n, _, e := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), request, arg)
		if e == unix.EINTR && request != kvmRun {
			continue
		}
		if e != 0 {
			return 0, e
		}
		return int(n), nil
	}
}

// step is a call that makes a machine.
type step struct {
	what string
	do   func() error
}

func newMachine(path string) (_ *machine, err error) {
	m := &machine{kvm: -1, vm: -1, vcpu: -1}
	defer func() {
		if err != nil {
			m.close()
		}
	}()
	for _, s := range []step{
		{"open " + path, func() (err error) { m.kvm, err = unix.Open(path, unix.O_RDWR|unix.O_CLOEXEC, 0); return err }},
		{"ask for KVM's version", m.checkVersion},
		{"make a machine", func() (err error) { m.vm, err = ioctl(m.kvm, kvmCreateVM, 0); return err }},
		{"reserve the task state segment", func() error { ioctl(m.vm, kvmSetTSSAddr, kvmTSSAddress); return nil }}, // only old Intel processors need it
		{"give it memory", m.addMemory},
		{"make a processor", func() (err error) { m.vcpu, err = ioctl(m.vm, kvmCreateVCPU, 0); return err }},
		{"map the processor's state", m.mapRun},
		{"set the processor's features", m.setCPUID},
	} {
		if err := s.do(); err != nil {
			return nil, fmt.Errorf("%s: %w", s.what, err)
		}
	}
	return m, nil
}

func (m *machine) checkVersion() error {
	v, err := ioctl(m.kvm, kvmGetAPIVersion, 0)
	if err == nil && v != kvmVersion {
		err = fmt.Errorf("it is %d, want %d", v, kvmVersion)
	}
	return err
}

func (m *machine) addMemory() (err error) {
	const prot, flags = unix.PROT_READ | unix.PROT_WRITE, unix.MAP_PRIVATE | unix.MAP_ANONYMOUS
	if m.ram, err = unix.Mmap(-1, 0, guestRAM, prot, flags); err != nil {
		return err
	}
	if m.rom, err = unix.Mmap(-1, 0, romSize, prot, flags); err != nil {
		return err
	}
	for i, r := range []struct {
		at  uint64
		mem []byte
	}{{0, m.ram}, {romAddress, m.rom}} {
		region := memoryRegion{slot: uint32(i), guest: r.at, size: uint64(len(r.mem)), host: uint64(uintptr(unsafe.Pointer(&r.mem[0])))}
		if _, err := ioctl(m.vm, kvmSetMemory, uintptr(unsafe.Pointer(&region))); err != nil {
			return err
		}
	}
	return nil
}

func (m *machine) mapRun() error {
	size, err := ioctl(m.kvm, kvmGetVCPUMmapSize, 0)
	if err != nil {
		return err
	}
	m.run, err = unix.Mmap(m.vcpu, 0, size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	return err
}

// setCPUID gives the guest the features that KVM supports here.
func (m *machine) setCPUID() error {
	table := make([]uint32, 2+10*maxCPUIDEntries)
	table[0] = maxCPUIDEntries
	if _, err := ioctl(m.kvm, kvmGetSupportedCPU, uintptr(unsafe.Pointer(&table[0]))); err != nil {
		return err
	}
	_, err := ioctl(m.vcpu, kvmSetCPUID2, uintptr(unsafe.Pointer(&table[0])))
	return err
}

func (m *machine) close() {
	for _, b := range [][]byte{m.run, m.ram, m.rom} {
		if b != nil {
			_ = unix.Munmap(b)
		}
	}
	for _, fd := range []int{m.vcpu, m.vm, m.kvm} {
		if fd >= 0 {
			unix.Close(fd)
		}
	}
}

var errTooLong = errors.New("it did not end in time")

// start runs the guest until out says that it is done. A guest that does not come back is interrupted by a signal to its thread.
func (m *machine) start(limit time.Duration) error {
	thread := make(chan int, 1)
	ended := make(chan error, 1)
	go func() { // its end is awaited below
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		thread <- unix.Gettid()
		ended <- m.loop(time.Now().Add(limit))
	}()
	tid := <-thread
	select {
	case err := <-ended:
		return err
	case <-time.After(limit):
	}
	// SIGURG does nothing in a Go program, but makes KVM_RUN return; a KVM that does not even do that is left behind with its thread.
	m.run[immediateExitAt] = 1
	for range maxKicks {
		_ = unix.Tgkill(unix.Getpid(), tid, unix.SIGURG)
		select {
		case err := <-ended:
			return err
		case <-time.After(kickInterval):
		}
	}
	m.run, m.ram, m.rom, m.kvm, m.vm, m.vcpu = nil, nil, nil, -1, -1, -1
	return fmt.Errorf("%w, and can't be interrupted", errTooLong)
}

func (m *machine) loop(deadline time.Time) error {
	vcpu, run := m.vcpu, m.run
	for {
		if time.Now().After(deadline) {
			return errTooLong
		}
		_, err := ioctl(vcpu, kvmRun, 0)
		if errors.Is(err, unix.EINTR) || errors.Is(err, unix.EAGAIN) {
			continue
		}
		if err != nil {
			return err
		}
		switch reason := *(*uint32)(unsafe.Pointer(&run[exitReasonAt])); reason {
		case exitIO:
			if m.io(run) {
				return nil
			}
		case exitHalt:
			return errors.New("the processor halted")
		default:
			return fmt.Errorf("KVM gave up with exit reason %d", reason)
		}
	}
}

// io serves an access to a port.
func (m *machine) io(run []byte) bool {
	io := run[ioAt:]
	size, count := int(io[1]), int(*(*uint32)(unsafe.Pointer(&io[4])))
	port := *(*uint16)(unsafe.Pointer(&io[2]))
	data := run[*(*uint64)(unsafe.Pointer(&io[8])):]
	for i := range count {
		if io[0] != ioOut {
			data[i*size] = m.in(port)
		} else if m.out(port, data[i*size]) {
			return true
		}
	}
	return false
}

// Device is where KVM is.
const Device = "/dev/kvm"

// Accessible says why KVM can't be opened, if it can't.
func Accessible() error {
	f, err := os.OpenFile(Device, os.O_RDWR, 0)
	if err != nil {
		return err
	}
	return f.Close()
}
