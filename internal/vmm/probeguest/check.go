package probeguest

import (
	"encoding/binary"
	"errors"
	"fmt"
	"time"
	"unsafe"
)

// Errors of Check.
var (
	// ErrNoKVM says that KVM runs no guest at all on this host.
	ErrNoKVM = errors.New("KVM runs no guest")
	// ErrNoStockKernel says that KVM runs a guest of plain instructions, but not what a stock kernel needs.
	ErrNoStockKernel = errors.New("KVM can't run a stock kernel")
)

// checkLimit bounds each of the two guests of Check.
const checkLimit = 900 * time.Millisecond

// Check runs both guests on /dev/kvm, within two seconds. A /dev/kvm that can be opened may still run no guest, or only some.
func Check() error { return checkDevice(Device) }

func checkDevice(path string) error {
	if err := runBare(path); err != nil {
		return fmt.Errorf("%w: %w", ErrNoKVM, err)
	}
	if said, err := runSelfTest(path); err != nil {
		return fmt.Errorf("%w: a test guest failed to %s: %w", ErrNoStockKernel, FailedAt(said), err)
	}
	return nil
}

// runBare runs the bare guest: it works on a few pages, and answers.
func runBare(path string) error {
	m, err := newMachine(path)
	if err != nil {
		return err
	}
	defer m.close()
	if err := m.enterLongMode(guestBase); err != nil {
		return fmt.Errorf("enter 64-bit mode: %w", err)
	}
	copy(m.ram[guestBase:], guestCode)
	pending := append(Command(Touch, 16), Command(Work, 16)...)
	pending = append(pending, Status)
	var said []byte
	m.in = func(port uint16) byte {
		switch {
		case port == serialS && len(pending) > 0:
			return 0x61
		case port == serialS:
			return 0x60
		case port == serialData && len(pending) > 0:
			b := pending[0]
			pending = pending[1:]
			return b
		}
		return 0
	}
	const want = 12 // "RTW", "S" and two numbers
	m.out = func(port uint16, b byte) bool {
		if port == serialData {
			said = append(said, b)
		}
		return len(said) == want
	}
	if err := m.start(checkLimit); err != nil {
		return fmt.Errorf("a test guest of plain instructions: %w", err)
	}
	if string(said[:4]) != "RTWS" || binary.LittleEndian.Uint32(said[4:]) != 0 {
		return fmt.Errorf("a test guest of plain instructions said %q", said)
	}
	return nil
}

func runSelfTest(path string) (said string, err error) {
	m, err := newMachine(path)
	if err != nil {
		return "", err
	}
	defer m.close()
	copy(m.rom, SelfTestROM())
	var letters []byte
	failed := false
	m.in = func(uint16) byte { return 0 }
	m.out = func(port uint16, b byte) bool {
		if port == SelfTestPort {
			letters = append(letters, b)
		}
		failed = failed || port == SelfTestExit && b != 0
		return port == SelfTestExit
	}
	err = m.start(checkLimit)
	said = string(letters)
	if err == nil && (failed || said != SelfTestDone) {
		err = errors.New("it gave a wrong result")
	}
	return said, err
}

// segment is struct kvm_segment.
type segment struct {
	base                            uint64
	limit                           uint32
	selector                        uint16
	kind, present, dpl, db, s, l, g uint8
	avl, unusable, padding          uint8
}

// sregs is struct kvm_sregs.
type sregs struct {
	cs, ds, es, fs, gs, ss, tr, ldt segment
	gdt, idt                        struct {
		base    uint64
		limit   uint16
		padding [3]uint16
	}
	cr0, cr2, cr3, cr4, cr8, efer, apic uint64
	interrupts                          [4]uint64
}

// enterLongMode sets the processor up as a monitor does for a 64-bit kernel: the first GiB mapped one to one.
func (m *machine) enterLongMode(entry uint64) error {
	const tables = 0x9000
	le := binary.LittleEndian
	le.PutUint64(m.ram[tables:], tables+0x1003)
	le.PutUint64(m.ram[tables+0x1000:], tables+0x2003)
	for i := range uint64(512) {
		le.PutUint64(m.ram[tables+0x2000+8*i:], i<<21|0x83)
	}
	var s sregs
	if _, err := ioctl(m.vcpu, kvmGetSregs, uintptr(unsafe.Pointer(&s))); err != nil {
		return err
	}
	code := segment{limit: 0xffffffff, selector: 8, kind: 11, present: 1, s: 1, l: 1, g: 1}
	data := segment{limit: 0xffffffff, selector: 16, kind: 3, present: 1, s: 1, db: 1, g: 1}
	s.cs, s.ds, s.es, s.fs, s.gs, s.ss = code, data, data, data, data, data
	s.cr0, s.cr3, s.cr4, s.efer = 0x80000011, tables, 0x20, 0x500
	if _, err := ioctl(m.vcpu, kvmSetSregs, uintptr(unsafe.Pointer(&s))); err != nil {
		return err
	}
	var regs [18]uint64 // struct kvm_regs: 16 general ones, rip, rflags
	regs[16], regs[17] = entry, 2
	_, err := ioctl(m.vcpu, kvmSetRegs, uintptr(unsafe.Pointer(&regs)))
	return err
}
