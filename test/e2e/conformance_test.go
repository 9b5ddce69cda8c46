package e2e

import (
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/forkd/forkd/internal/confine"
	"github.com/forkd/forkd/internal/image"
	"github.com/forkd/forkd/internal/image/agentbin"
	"github.com/forkd/forkd/internal/vmm"
	"github.com/forkd/forkd/internal/vmm/qemu"
	"github.com/forkd/forkd/internal/vmm/vmmtest"
)

// imageEnv tells the daemon that the conformance suite plays, which is this test run again, where the image is.
const imageEnv = "FORKD_E2E_IMAGE"

// TestQEMUConformance holds the QEMU engine to the contract that the fake engine passes too, with the kernel, the root file system and the
// agent that are shipped.
func TestQEMUConformance(t *testing.T) {
	needVM(t)
	if underTest().name != "qemu" {
		t.Skipf("this run is for %v", underTest())
	}
	img := imageForConformance(t)
	vmmtest.Run(t, vmmtest.Harness{
		Engine: qemu.New(qemu.Options{Accel: accel(), Users: users()}), Shape: vmm.Shape{MemMiB: memMiB, VCPUs: 1},
		Kernel: img.Kernel.Path, Initramfs: img.Initramfs.Path, Rootfs: img.Rootfs.Path, Cmdline: img.Cmdline(),
		BootTimeout: 5 * time.Minute, Timeout: 2 * time.Minute, Steps: few(40, 15),
	})
}

// users are for the confinement of monitors, where we may confine them.
func users() *confine.Users {
	if os.Geteuid() != 0 {
		return nil
	}
	return confine.NewUsers(confine.RangeFor("conformance"))
}

func imageForConformance(t *testing.T) image.Image {
	t.Helper()
	dir, played := os.Getenv(imageEnv), true
	if dir == "" && os.Getenv(imagesEnv) != "" {
		dir = os.Getenv(imagesEnv)
		t.Setenv(imageEnv, dir)
	}
	if dir == "" {
		dir, played = filepath.Join(openLab(t).data, "conformance"), false
		t.Setenv(imageEnv, dir)
	}
	agent, err := agentbin.Agent()
	if err != nil {
		t.Fatal(err)
	}
	store, err := image.Open(dir, cacheDir(), agent)
	if err != nil {
		t.Fatal(err)
	}
	if played {
		img, err := store.Get(pythonImage)
		if err != nil {
			t.Fatal(err)
		}
		return img
	}
	img, err := store.Build(t.Context(), image.BuildSpec{Name: pythonImage, Packages: []string{"python3", "python3-numpy"}}, nil)
	if err != nil {
		t.Fatal(err)
	}
	return img
}
