package e2e

import (
	"os"
	"strconv"
	"time"

	"github.com/forkd/forkd/internal/vmm/qemu"
)

// Settings from the environment, for hosts where KVM works and for the KVM lab (test/lab).
const (
	engineEnv = "FORKD_E2E_ENGINE" // what runs machines: see engines
	imagesEnv = "FORKD_E2E_IMAGES" // a directory of images, as a daemon keeps them, to take instead of building some: there may be no network
	smallEnv  = "FORKD_E2E_SMALL"  // 1: fewer of everything, where each machine costs much

	patienceEnv = "FORKD_E2E_PATIENCE" // how many times as long what hangs is waited for, where everything takes long
)

// engine is what machines run on, as a snapshot has it.
type engine struct{ name, accel string }

// engines are those that the tests run on.
var engines = map[string]engine{
	"":            {"qemu", qemu.AccelTCG},
	"qemu-tcg":    {"qemu", qemu.AccelTCG},
	"qemu-kvm":    {"qemu", qemu.AccelKVM},
	"firecracker": {"firecracker", qemu.AccelKVM},
}

// underTest is the engine that this run is for.
func underTest() engine {
	e, ok := engines[os.Getenv(engineEnv)]
	if !ok {
		panic(engineEnv + "=" + os.Getenv(engineEnv) + ": want qemu-tcg, qemu-kvm or firecracker")
	}
	return e
}

// String is how `forkd images` shows it.
func (e engine) String() string { return e.name + "/" + e.accel }

// flags have a daemon run it and nothing else.
func (e engine) flags() []string {
	if e.name == "qemu" {
		return []string{"--engine", e.name, "--accel", e.accel}
	}
	return []string{"--engine", e.name}
}

// accel is what machines run on.
func accel() string { return underTest().accel }

// patient is a limit for what takes so long elsewhere.
func patient(limit time.Duration) time.Duration {
	if n, err := strconv.Atoi(os.Getenv(patienceEnv)); err == nil && n > 1 {
		return time.Duration(n) * limit
	}
	return limit
}

// few is how many of something a test makes.
func few(standard, small int) int {
	if os.Getenv(smallEnv) == "1" {
		return small
	}
	return standard
}
