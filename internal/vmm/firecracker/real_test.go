package firecracker

import (
	"os"
	"os/exec"
	"testing"
	"time"

	"github.com/forkd/forkd/internal/vmm/probeguest"
)

// firecrackerBinary is the Firecracker that FORKD_FIRECRACKER names, or the one in PATH.
func firecrackerBinary(t *testing.T) string {
	t.Helper()
	name := os.Getenv("FORKD_FIRECRACKER")
	if name == "" {
		name = DefaultBinary
	}
	path, err := exec.LookPath(name)
	if err != nil {
		t.Skipf("no Firecracker on this host (%v): FORKD_FIRECRACKER can name one", err)
	}
	return path
}

func TestRealProbe(t *testing.T) {
	if err := probeguest.Accessible(); err != nil {
		t.Skipf("no KVM: %v", err)
	}
	e := New(Options{Binary: firecrackerBinary(t), Bare: true, Users: testUsers()})
	begin := time.Now()
	info, err := e.Probe(t.Context())
	t.Logf("%+v in %v: %v", info, time.Since(begin), err)
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("save mode %s", e.probed.save)
}
