package e2e

import (
	"cmp"
	"os"
	"os/exec"
	"testing"
	"time"

	"github.com/forkd/forkd/internal/vmm"
	"github.com/forkd/forkd/internal/vmm/firecracker"
	"github.com/forkd/forkd/internal/vmm/probeguest"
	"github.com/forkd/forkd/internal/vmm/vmmtest"
)

// TestFirecrackerConformance holds the Firecracker engine to the same contract as the QEMU engine, with the same image. It needs a
// Firecracker, in PATH or named by FORKD_FIRECRACKER, and a KVM that runs a stock kernel, as the lab's does.
func TestFirecrackerConformance(t *testing.T) {
	needVM(t)
	if underTest().name != "firecracker" {
		t.Skipf("this run is for %v: make test-firecracker is for it", underTest())
	}
	binary, err := exec.LookPath(cmp.Or(os.Getenv("FORKD_FIRECRACKER"), firecracker.DefaultBinary))
	if err != nil {
		t.Skipf("no Firecracker on this host (%v): FORKD_FIRECRACKER can name one", err)
	}
	if err := probeguest.Check(); err != nil {
		t.Skipf("no KVM for this here: %v", err)
	}
	img := imageForConformance(t)
	vmmtest.Run(t, vmmtest.Harness{
		Engine: firecracker.New(firecracker.Options{Binary: binary, Users: users()}), Shape: vmm.Shape{MemMiB: memMiB, VCPUs: 1},
		Kernel: img.Kernel.Path, Initramfs: img.Initramfs.Path, Rootfs: img.Rootfs.Path, Cmdline: img.Cmdline(),
		BootTimeout: 5 * time.Minute, Timeout: 2 * time.Minute, Steps: few(40, 15),
	})
}
