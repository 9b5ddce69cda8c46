package enginebench

import (
	"errors"
	"os"
	"testing"
	"time"

	"github.com/forkd/forkd/internal/vmm"
)

// TestRun measures a little of everything, where there is a Firecracker and a KVM that runs a guest.
func TestRun(t *testing.T) {
	if testing.Short() || os.Getenv("FORKD_FIRECRACKER") == "" {
		t.Skip("takes a minute, and needs the Firecracker that FORKD_FIRECRACKER names")
	}
	opt := Options{Binary: os.Getenv("FORKD_FIRECRACKER"), Branches: 2, Progress: t.Logf}
	for _, only := range []string{"branch", "share"} {
		opt.Only = only
		r, err := Run(t.Context(), opt)
		if errors.Is(err, vmm.ErrUnavailable) {
			t.Skip(err)
		}
		if err != nil {
			t.Fatal(err)
		}
		for _, b := range r.Branches {
			if b.Torn > 0 || b.PauseP50MS <= 0 {
				t.Errorf("branches of %d MiB: %+v", b.MemMiB, b)
			}
		}
		t.Logf("%+v", r)
	}
}

func TestQuantile(t *testing.T) {
	times := []time.Duration{4 * time.Millisecond, time.Millisecond, 3 * time.Millisecond, 2 * time.Millisecond}
	for part, want := range map[float64]float64{0: 1, 0.5: 3, 0.9: 4, 1: 4} {
		if got := quantile(times, part); got != want {
			t.Errorf("quantile(%v) = %v, want %v", part, got, want)
		}
	}
	if got := quantile(nil, 0.5); got != 0 {
		t.Errorf("of nothing: %v", got)
	}
}
