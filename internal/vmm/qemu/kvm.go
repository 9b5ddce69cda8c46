package qemu

import (
	"bytes"
	"context"
	_ "embed"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"
)

// selfTestCode is assembled from selftest.S, which also says what it does.
//
//go:embed selftest.bin
var selfTestCode []byte

const (
	selfTestLimit  = 4 * time.Second
	selfTestROM    = 64 << 10
	selfTestVector = 0xfff0 // where a processor starts, in the last 64 KiB below 4 GiB
	selfTestDone   = "RPLSCXID"
)

// selfTestStages names what the guest was about to do after each letter it had printed.
var selfTestStages = []string{"run any instruction", "enter protected mode", "enter long mode", "run SSE2", "run cmpxchg16b", "run xsave",
	"run iretq", "run a short loop"}

var errNoKVM = errors.New("KVM can't be used")

// KVMWorks runs a small guest under KVM that does what a stock kernel does early on, and says what fails. A /dev/kvm that is present
// may still not run a stock kernel; this takes at most a few seconds to find out.
func KVMWorks(ctx context.Context, binary string) error {
	f, err := os.OpenFile("/dev/kvm", os.O_RDWR, 0)
	if err != nil {
		return fmt.Errorf("%w: %w", errNoKVM, err)
	}
	f.Close()
	return selfTest(ctx, binary, AccelKVM, "host")
}

// selfTest runs the test guest under an accelerator.
func selfTest(ctx context.Context, binary, accel, cpu string) error {
	dir, err := os.MkdirTemp("", "forkd-selftest-")
	if err != nil {
		return fmt.Errorf("%w: self-test: %w", errNoKVM, err)
	}
	defer os.RemoveAll(dir)
	rom := filepath.Join(dir, "rom")
	if err := os.WriteFile(rom, selfTestImage(), 0o600); err != nil {
		return fmt.Errorf("%w: self-test: %w", errNoKVM, err)
	}
	ctx, cancel := context.WithTimeout(ctx, selfTestLimit)
	defer cancel()
	var said, complaint bytes.Buffer
	cmd := exec.CommandContext(ctx, binary, "-M", "microvm,pit=off,pic=off,rtc=off,isa-serial=off", "-accel", accel, "-cpu", cpu, "-m", "64",
		"-nodefaults", "-no-user-config", "-display", "none", "-no-reboot", "-bios", rom, "-chardev", "stdio,id=c,signal=off",
		"-device", "isa-debugcon,iobase=0x402,chardev=c", "-device", "isa-debug-exit,iobase=0xf4,iosize=1")
	cmd.Stdout, cmd.Stderr = &said, &complaint
	cmd.WaitDelay = time.Second
	err = cmd.Run()
	var exit *exec.ExitError
	if said.String() == selfTestDone && errors.As(err, &exit) && exit.ExitCode() == 1 { // isa-debug-exit: 2*0+1
		return nil
	}
	stage := len(selfTestStages) - 1
	if n := len(said.String()); n < stage {
		stage = n
	}
	why := firstLine(strings.TrimSpace(complaint.String()))
	if ctx.Err() != nil {
		why = "it did not end within " + selfTestLimit.String()
	}
	return fmt.Errorf("%w: a test guest failed to %s: %s", errNoKVM, selfTestStages[stage], why)
}

func selfTestImage() []byte {
	rom := make([]byte, selfTestROM)
	copy(rom, selfTestCode)
	copy(rom[selfTestVector:], []byte{0xe9, 0x0d, 0x00}) // jmp to the ROM's first byte: the offset wraps around at 64 KiB
	return rom
}
