// Package probeguest holds two guests of a few hundred bytes that need no operating system, and runs them on /dev/kvm itself. They tell in
// two seconds whether a KVM runs any guest and whether it can run a stock kernel (Check), and give the Firecracker engine something to
// start where it can't. It knows no engine.
//
// guest.S and selftest.S say what the guests do; the .bin files are what they assemble to, see generate.go.
package probeguest

import (
	_ "embed"
	"encoding/binary"
	"time"
)

//go:embed guest.bin
var guestCode []byte

//go:embed selftest.bin
var selfTestCode []byte

// What the bare guest is told; guest.S says what it does then.
const (
	Ready  = 'R' // it says so when it runs
	Touch  = 'T'
	Read   = 'G'
	Work   = 'W'
	Status = 'S'
	Still  = 'M'
	Halt   = 'H'
	Echo   = '!' // any byte that is none of the others comes back
)

// FirstPage is the guest page, of 4 KiB, at which Touch, Read and Work begin.
const FirstPage = 0x400000 / 4096

const guestBase = 0x100000

// Kernel is the bare guest as an ELF file that a monitor can boot.
func Kernel() []byte {
	const header, segment = 64, 56
	b := make([]byte, 4096, 4096+len(guestCode))
	copy(b, "\x7fELF\x02\x01\x01")
	le := binary.LittleEndian
	le.PutUint16(b[16:], 2)         // an executable
	le.PutUint16(b[18:], 62)        // for x86-64
	le.PutUint32(b[20:], 1)         // version
	le.PutUint64(b[24:], guestBase) // entry
	le.PutUint64(b[32:], header)    // segments are behind this header
	le.PutUint16(b[52:], header)
	le.PutUint16(b[54:], segment)
	le.PutUint16(b[56:], 1) // segments
	p := b[header:]
	le.PutUint32(p[0:], 1) // to load
	le.PutUint32(p[4:], 7) // read, write, execute
	le.PutUint64(p[8:], 4096)
	le.PutUint64(p[16:], guestBase)
	le.PutUint64(p[24:], guestBase)
	le.PutUint64(p[32:], uint64(len(guestCode)))
	le.PutUint64(p[40:], uint64(len(guestCode)))
	le.PutUint64(p[48:], 4096)
	return append(b, guestCode...)
}

// Command is a Touch, a Read or a Work with its number of pages.
func Command(what byte, pages uint32) []byte {
	return binary.LittleEndian.AppendUint32([]byte{what}, pages)
}

// StillUnit is in how many ticks of the time stamp counter a guest that is told Still says for how long its work stood still.
const StillUnit = 256

// The self-test guest is a ROM that says a letter after each thing it could do, on port SelfTestPort, and ends with a write to
// SelfTestExit.
const (
	SelfTestDone  = "RPLSCXID"
	SelfTestPort  = 0x402
	SelfTestExit  = 0xf4
	SelfTestLimit = 4 * time.Second // for a monitor to start and the guest to end

	romSize    = 64 << 10
	romVector  = 0xfff0 // where a processor starts, in the last 64 KiB below 4 GiB
	romAddress = 1<<32 - romSize
)

// stages names what the self-test guest was about to do after each letter it had said.
var stages = []string{"run any instruction", "enter protected mode", "enter long mode", "run SSE2", "run cmpxchg16b", "run xsave",
	"run iretq", "run a short loop"}

// FailedAt names what the self-test guest could not do, by what it had said.
func FailedAt(said string) string { return stages[min(len(said), len(stages)-1)] }

// SelfTestROM is the self-test guest, the last 64 KiB below 4 GiB.
func SelfTestROM() []byte {
	rom := make([]byte, romSize)
	copy(rom, selfTestCode)
	copy(rom[romVector:], []byte{0xe9, 0x0d, 0x00}) // jmp to the ROM's first byte: the offset wraps around at 64 KiB
	return rom
}
