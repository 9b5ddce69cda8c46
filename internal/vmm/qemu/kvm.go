package qemu

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"github.com/forkd/forkd/internal/vmm/probeguest"
)

var errNoKVM = errors.New("KVM can't be used")

// KVMWorks runs a small guest that does what a stock kernel does early on, on KVM itself and then in QEMU with KVM, and says what fails. A
// /dev/kvm that is present may still not run a stock kernel; this takes at most a few seconds to find out.
func KVMWorks(ctx context.Context, binary string) error {
	if err := probeguest.Check(); err != nil {
		return fmt.Errorf("%w: %w", errNoKVM, err)
	}
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
	if err := os.WriteFile(rom, probeguest.SelfTestROM(), 0o600); err != nil {
		return fmt.Errorf("%w: self-test: %w", errNoKVM, err)
	}
	limit := limitFor(ctx, binary)
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	var said, complaint bytes.Buffer
	cmd := exec.CommandContext(ctx, binary, "-M", "microvm,pit=off,pic=off,rtc=off,isa-serial=off", "-accel", accel, "-cpu", cpu, "-m", "64",
		"-nodefaults", "-no-user-config", "-display", "none", "-no-reboot", "-bios", rom, "-chardev", "stdio,id=c,signal=off",
		"-device", "isa-debugcon,iobase=0x402,chardev=c", "-device", "isa-debug-exit,iobase=0xf4,iosize=1")
	cmd.Stdout, cmd.Stderr = &said, &complaint
	cmd.WaitDelay = time.Second
	err = cmd.Run()
	var exit *exec.ExitError
	if said.String() == probeguest.SelfTestDone && errors.As(err, &exit) && exit.ExitCode() == 1 { // isa-debug-exit: 2*0+1
		return nil
	}
	why := firstLine(strings.TrimSpace(complaint.String()))
	if ctx.Err() != nil {
		why = "it did not end within " + limit.String()
	}
	return fmt.Errorf("%w: a test guest failed to %s: %s", errNoKVM, probeguest.FailedAt(said.String()), why)
}

// maxTestLimit is the longest that the test guest gets.
const maxTestLimit = 20 * time.Second

// limitFor is how long the test guest may take: a machine on which QEMU takes long to say its version, because it is emulated itself or busy,
// takes long for everything.
func limitFor(ctx context.Context, binary string) time.Duration {
	ctx, cancel := context.WithTimeout(ctx, maxTestLimit)
	defer cancel()
	begin := time.Now()
	cmd := exec.CommandContext(ctx, binary, "--version")
	cmd.WaitDelay = time.Second
	_ = cmd.Run() // that it does not run is found out by the test itself
	const times = 10
	return min(max(probeguest.SelfTestLimit, (times*time.Since(begin)).Round(time.Second)), maxTestLimit)
}
