package firecracker

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/forkd/forkd/internal/vmm"
	"github.com/forkd/forkd/internal/vmm/probeguest"
	"github.com/forkd/forkd/internal/vmm/vmmtest"
)

// imageVariable names the directory of an image as the image store keeps it: vmlinuz, initramfs and rootfs.erofs.
const imageVariable = "FORKD_TEST_IMAGE"

// TestConformance holds the engine to its contract, with a stock kernel and the agent that is shipped.
func TestConformance(t *testing.T) {
	binary := firecrackerBinary(t)
	if err := probeguest.Check(); err != nil {
		t.Skipf("this host can't run a stock kernel, the lab can: %v", err)
	}
	dir := os.Getenv(imageVariable)
	if dir == "" {
		t.Skip(imageVariable + " names no image")
	}
	opt := Options{Binary: binary, Users: testUsers()}
	cmdline := strings.Fields(os.Getenv("FORKD_TEST_CMDLINE"))
	vmmtest.Run(t, vmmtest.Harness{
		Engine: New(opt), Shape: vmm.Shape{MemMiB: 256, VCPUs: 1}, Cmdline: cmdline,
		Kernel: filepath.Join(dir, "vmlinuz"), Initramfs: filepath.Join(dir, "initramfs"), Rootfs: filepath.Join(dir, "rootfs.erofs"),
		BootTimeout: 3 * time.Minute, Timeout: time.Minute, Steps: 60,
		Detach: func(m vmm.Machine) error { m.(*machine).session.letGo(); return nil },
	})
}
