package vmmtest_test

import (
	"testing"
	"time"

	"github.com/forkd/forkd/internal/vmm"
	"github.com/forkd/forkd/internal/vmm/vmmtest"
)

func TestMain(m *testing.M) { vmmtest.Main(m) }

// fakeHarness is how the suite drives the fake engine.
func fakeHarness(t *testing.T, opts vmmtest.FakeOptions) vmmtest.Harness {
	t.Helper()
	engine := vmmtest.NewFake(t.TempDir(), opts)
	t.Cleanup(func() {
		if err := engine.Close(); err != nil {
			t.Errorf("Close: %v", err)
		}
	})
	return vmmtest.Harness{
		Engine:   engine,
		Shape:    vmm.Shape{MemMiB: 2, VCPUs: 1},
		Print:    func(text string) []string { return []string{"console", text} },
		Shutdown: []string{"poweroff"},
		Panic:    []string{"panic", "at the disco"},
		Detach:   func(vmm.Machine) error { return nil },
		Timeout:  10 * time.Second,
		Silence:  50 * time.Millisecond,
	}
}

func TestConformance(t *testing.T) {
	vmmtest.Run(t, fakeHarness(t, vmmtest.FakeOptions{}))
}
