package firecracker

import (
	"errors"
	"fmt"
	"os"
	"testing"

	"github.com/forkd/forkd/internal/memory"
	"github.com/forkd/forkd/internal/vmm"
)

// TestBareBadState gives a real Firecracker states that are none. It refuses each, or ends, and nothing is left.
func TestBareBadState(t *testing.T) {
	b := newBare(t, Options{})
	fi, err := b.state.Stat()
	if err != nil {
		t.Fatal(err)
	}
	good := make([]byte, fi.Size())
	if _, err := b.state.ReadAt(good, 0); err != nil {
		t.Fatal(err)
	}
	bad := map[string][]byte{"cut off": good[:len(good)-3], "half": good[:len(good)/2], "zeros": make([]byte, len(good))}
	for _, at := range []int{0, 8, 9, 16, len(good) / 3, len(good) / 2, len(good) - 9, len(good) - 1} {
		flipped := append([]byte{}, good...)
		flipped[at] ^= 1
		bad[fmt.Sprintf("bit flipped at %d", at)] = flipped
	}
	for name, state := range bad {
		t.Run(name, func(t *testing.T) {
			refusesState(t, b, b.shape, b.image.Base(), state)
		})
	}
}

// TestBareShortMemory: a memory image that is shorter than the state says is found out before the guest runs into its end.
func TestBareShortMemory(t *testing.T) {
	b := newBare(t, Options{})
	short, err := memory.New("short", bareMiB<<19)
	if err != nil {
		t.Fatal(err)
	}
	defer short.Close()
	state := make([]byte, 1<<20)
	n, err := b.state.ReadAt(state, 0)
	if n == 0 {
		t.Fatal(err)
	}
	refusesState(t, b, vmm.Shape{MemMiB: bareMiB / 2, VCPUs: 1}, short, state[:n])
	if _, err := b.Prepare(t.Context(), vmm.PrepareConfig{Dir: t.TempDir(), Shape: b.shape, Memory: short}); !errors.Is(err, vmm.ErrInvalidConfig) {
		t.Errorf("memory shorter than the shape: %v, want ErrInvalidConfig", err)
	}
}

// TestBareOtherVersion: a state of another version is refused by Firecracker, too. The manifest of its snapshot says so before.
func TestBareOtherVersion(t *testing.T) {
	other := os.Getenv("FORKD_FIRECRACKER_OTHER")
	if other == "" {
		t.Skip("FORKD_FIRECRACKER_OTHER names no Firecracker of another version")
	}
	here := newBare(t, Options{})
	t.Setenv("FORKD_FIRECRACKER", other)
	there := newBare(t, Options{})
	state := make([]byte, 1<<20)
	n, err := there.state.ReadAt(state, 0)
	if n == 0 {
		t.Fatal(err)
	}
	refusesState(t, here, here.shape, there.image.Base(), state[:n])
}

// refusesState wants a state to be refused as not compatible.
func refusesState(t *testing.T, b *bare, shape vmm.Shape, ram *os.File, state []byte) {
	t.Helper()
	file := tempFile(t)
	if _, err := file.Write(state); err != nil {
		t.Fatal(err)
	}
	dir, before := t.TempDir(), processes(t)
	p, err := b.Prepare(t.Context(), vmm.PrepareConfig{Dir: dir, Shape: shape, Memory: ram})
	if err != nil {
		t.Fatal(err)
	}
	m, err := p.Load(t.Context(), file)
	if !errors.Is(err, vmm.ErrIncompatible) {
		t.Errorf("got %v, want ErrIncompatible", err)
	}
	if err == nil {
		_ = m.Kill()
	}
	checkNothingLeft(t, dir, before)
}
