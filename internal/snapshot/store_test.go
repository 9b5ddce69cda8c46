package snapshot

import (
	"bytes"
	"context"
	"math/rand/v2"
	"os"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/forkd/forkd/internal/memory"
	"github.com/forkd/forkd/internal/vmm"
)

const testMiB = 8

// newRAM returns a memfd of testMiB MiB with random pages at the given extents.
func newRAM(t testing.TB, seed uint64, extents ...memory.Extent) *os.File {
	t.Helper()
	f, err := memory.New("test", testMiB<<20)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.Close() })
	fillPages(t, f, seed, extents...)
	return f
}

func fillPages(t testing.TB, f *os.File, seed uint64, extents ...memory.Extent) {
	t.Helper()
	var key [32]byte
	key[0] = byte(seed)
	key[1] = byte(seed >> 8)
	rnd := rand.NewChaCha8(key)
	for _, e := range extents {
		b := make([]byte, e.Bytes())
		rnd.Read(b)
		if _, err := f.WriteAt(b, e.Offset()); err != nil {
			t.Fatal(err)
		}
	}
}

func testManifest() Manifest {
	return Manifest{
		Image:  ImageRef{ID: "img1", Name: "py"},
		Engine: vmm.Info{Engine: "qemu", Version: "7.2.22", Accel: "tcg", Machine: "microvm", CPU: "max", TSCkHz: 2500000},
		Shape:  vmm.Shape{MemMiB: testMiB, VCPUs: 1},
	}
}

func newStore(t testing.TB, options ...Option) *Store {
	t.Helper()
	s, err := Open(t.TempDir(), options...)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// put publishes a snapshot of ram.
func put(t testing.TB, s *Store, id, parent string, ram *os.File, extents []memory.Extent) Manifest {
	t.Helper()
	m, err := tryPut(s, id, parent, ram, extents)
	if err != nil {
		t.Fatal(err)
	}
	return m
}

func tryPut(s *Store, id, parent string, ram *os.File, extents []memory.Extent) (Manifest, error) {
	ctx := context.Background()
	st, err := s.Stage(id)
	if err != nil {
		return Manifest{}, err
	}
	defer st.Abort()
	if err := st.WriteMemory(ctx, ram, extents); err != nil {
		return Manifest{}, err
	}
	state, err := memory.SealedCopy("state", []byte("device state of "+id))
	if err != nil {
		return Manifest{}, err
	}
	defer state.Close()
	if err := st.WriteDevice(ctx, state); err != nil {
		return Manifest{}, err
	}
	m := testManifest()
	m.Parent = parent
	return st.Publish(ctx, m)
}

func content(t testing.TB, img *memory.Image) []byte {
	t.Helper()
	b := make([]byte, img.Bytes())
	if _, err := img.ReadAt(b, 0); err != nil {
		t.Fatal(err)
	}
	return b
}

func TestRoundTrip(t *testing.T) {
	for name, options := range map[string][]Option{"plain": nil, "compressed": {WithCompression()}} {
		t.Run(name, func(t *testing.T) {
			s := newStore(t, options...)
			ram := newRAM(t, 1, memory.Extent{First: 3, N: 700}, memory.Extent{First: 1000, N: 1}, memory.Extent{First: 2047, N: 1})
			if _, err := ram.WriteAt(make([]byte, 100*memory.PageSize), 100*memory.PageSize); err != nil {
				t.Fatal(err)
			}
			want := make([]byte, testMiB<<20)
			if _, err := ram.ReadAt(want, 0); err != nil {
				t.Fatal(err)
			}
			m := put(t, s, "base", "", ram, nil)
			if got, want := m.Memory.DataBytes, int64(602*memory.PageSize); got != want {
				t.Errorf("got %d bytes of data, want %d", got, want)
			}
			read, err := s.Get("base")
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(m, read); diff != "" {
				t.Errorf("manifest read back (-published +read):\n%s", diff)
			}
			img, err := s.Load(t.Context(), "base")
			if err != nil {
				t.Fatal(err)
			}
			defer img.Close()
			if !bytes.Equal(content(t, img), want) {
				t.Error("memory differs")
			}
			if err := s.Verify(t.Context(), "base"); err != nil {
				t.Error(err)
			}
		})
	}
}
