package lab

import (
	"bufio"
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"strings"
)

// spareMiB is what a lab must leave to others.
const spareMiB = 1 << 10

// available says why this host can't have a lab.
func available(o Options) error {
	if runtime.GOOS != "linux" || runtime.GOARCH != "amd64" {
		return fmt.Errorf("%w: it emulates amd64 on Linux on amd64", ErrUnavailable)
	}
	if os.Geteuid() != 0 {
		return fmt.Errorf("%w: it needs root, for its namespaces and its root file system: run it with sudo", ErrUnavailable)
	}
	for _, program := range []string{"mmdebstrap", "mkfs.erofs", "tar"} {
		if _, err := exec.LookPath(program); err != nil {
			return fmt.Errorf("%w: %s is not installed: run: make deps", ErrUnavailable, program)
		}
	}
	free, err := availableMiB()
	if err != nil {
		return fmt.Errorf("%w: %w", ErrUnavailable, err)
	}
	if need := o.MemMiB + spareMiB; free < need {
		return fmt.Errorf("%w: it needs %d MiB of memory, %d are available", ErrUnavailable, need, free)
	}
	return nil
}

// availableMiB is MemAvailable of proc(5).
func availableMiB() (int, error) {
	f, err := os.Open("/proc/meminfo")
	if err != nil {
		return 0, err
	}
	defer f.Close()
	for lines := bufio.NewScanner(f); lines.Scan(); {
		var kib int
		if rest, ok := strings.CutPrefix(lines.Text(), "MemAvailable:"); ok {
			if _, err := fmt.Sscan(rest, &kib); err != nil {
				return 0, fmt.Errorf("available memory: %w", err)
			}
			return kib >> 10, nil
		}
	}
	return 0, fmt.Errorf("/proc/meminfo does not say how much memory is available")
}
