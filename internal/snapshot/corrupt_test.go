package snapshot

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"testing"

	"github.com/forkd/forkd/internal/memory"
)

// damage runs the check with a file changed, and puts the file back.
func damage(t *testing.T, path string, change func([]byte) []byte, check func(t *testing.T)) {
	t.Helper()
	good, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, change(bytes.Clone(good)), 0o600); err != nil {
		t.Fatal(err)
	}
	check(t)
	if err := os.WriteFile(path, good, 0o600); err != nil {
		t.Fatal(err)
	}
}

// restore reads all that a restore needs.
func restore(t *testing.T, s *Store, id string) ([]byte, error) {
	img, err := s.Load(t.Context(), id)
	if err != nil {
		return nil, err
	}
	defer img.Close()
	f, err := s.Device(id)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	return content(t, img), nil
}

// wantCorrupt checks that Verify and a restore both find the damage and say where it is.
func wantCorrupt(t *testing.T, s *Store, id, file, what string) {
	t.Helper()
	_, loadErr := restore(t, s, id)
	for name, err := range map[string]error{"Verify": s.Verify(t.Context(), id), "restore": loadErr} {
		var corrupt *CorruptError
		if !errors.Is(err, ErrCorrupt) || !errors.As(err, &corrupt) {
			t.Fatalf("%s: %s: got %v, want %v", what, name, err, ErrCorrupt)
		}
		if corrupt.Snapshot != id || corrupt.File != file {
			t.Fatalf("%s: %s blames file %q of snapshot %s, want %q of %s", what, name, corrupt.File, corrupt.Snapshot, file, id)
		}
	}
}

// positions are offsets all over a file.
func positions(size int) []int {
	var out []int
	step := size/31 + 1
	for p := 0; p < size; p += step {
		out = append(out, p)
	}
	return append(out, size-1)
}

// TestEveryFlippedBit takes each bit of the files that are decoded.
func TestEveryFlippedBit(t *testing.T) {
	manifest, err := fullManifest().Encode()
	if err != nil {
		t.Fatal(err)
	}
	x := &index{logical: testMiB << 20, layer: true, data: []memory.Extent{{First: 0, N: 300}}, zero: []memory.Extent{{First: 302, N: 7}},
		sums: make([][digestBytes]byte, 2), stored: []uint32{100, 4096}}
	for name, c := range map[string]struct {
		file   []byte
		decode func([]byte) error
	}{
		manifestFile: {manifest, func(b []byte) error { _, err := Decode(b); return err }},
		indexFile:    {x.encode(), func(b []byte) error { _, err := decodeIndex(b); return err }},
	} {
		if err := c.decode(c.file); err != nil {
			t.Fatalf("%s, undamaged: %v", name, err)
		}
		for p := range c.file {
			for bit := range 8 {
				c.file[p] ^= 1 << bit
				if c.decode(c.file) == nil {
					t.Errorf("%s: bit %d of byte %d flipped, and nobody noticed", name, bit, p)
				}
				c.file[p] ^= 1 << bit
			}
		}
	}
}

func TestFlippedBits(t *testing.T) {
	t.Parallel()
	s := newStore(t)
	put(t, s, "base", "", newRAM(t, 1, memory.Extent{First: 0, N: 600}, memory.Extent{First: 900, N: 3}), nil)
	put(t, s, "tip", "base", newRAM(t, 2, memory.Extent{First: 10, N: 3}), []memory.Extent{{First: 10, N: 5}})
	for _, id := range []string{"base", "tip"} {
		for _, name := range []string{manifestFile, indexFile, memoryFile, deviceFile} {
			t.Run(id+"/"+name, func(t *testing.T) {
				path := filepath.Join(s.Dir(id), name)
				info, err := os.Stat(path)
				if err != nil {
					t.Fatal(err)
				}
				for _, p := range positions(int(info.Size())) {
					flip := func(b []byte) []byte { b[p] ^= 1 << (p % 8); return b }
					damage(t, path, flip, func(t *testing.T) { wantCorrupt(t, s, id, name, "bit flipped") })
				}
			})
		}
	}
	if err := s.Verify(t.Context(), "tip"); err != nil {
		t.Errorf("undamaged: %v", err)
	}
}

func TestDamagedBaseIsFoundFromTheTip(t *testing.T) {
	s := newStore(t)
	put(t, s, "base", "", newRAM(t, 1, memory.Extent{First: 0, N: 600}), nil)
	put(t, s, "tip", "base", newRAM(t, 2, memory.Extent{First: 10, N: 3}), []memory.Extent{{First: 10, N: 3}})
	damage(t, filepath.Join(s.Dir("base"), memoryFile), func(b []byte) []byte { b[1<<20+5] ^= 1; return b }, func(t *testing.T) {
		for name, err := range map[string]error{"Verify": s.Verify(t.Context(), "tip"), "Load": func() error { _, err := restore(t, s, "tip"); return err }()} {
			var corrupt *CorruptError
			if !errors.As(err, &corrupt) || corrupt.Snapshot != "base" || corrupt.Offset != 1<<20 || corrupt.Expected == "" || corrupt.Actual == "" {
				t.Errorf("%s: got %v, want the second chunk of base blamed, with both digests", name, err)
			}
		}
	})
}

// TestFlippedBitsCompressed allows a flip that does not change what is read: a zstd frame has bits without meaning.
func TestFlippedBitsCompressed(t *testing.T) {
	t.Parallel()
	s := newStore(t, WithCompression())
	ram := newRAM(t, 1, memory.Extent{First: 0, N: 10})
	if _, err := ram.WriteAt(bytes.Repeat([]byte("compressible "), 100000), 10*memory.PageSize); err != nil {
		t.Fatal(err)
	}
	m := put(t, s, "base", "", ram, nil)
	if m.Memory.PhysicalBytes > m.Memory.DataBytes/2 {
		t.Fatalf("not compressed: %d of %d bytes", m.Memory.PhysicalBytes, m.Memory.DataBytes)
	}
	want, err := restore(t, s, "base")
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(s.Dir("base"), memoryFile)
	for _, p := range positions(int(m.Memory.PhysicalBytes)) {
		for bit := range 2 {
			damage(t, path, func(b []byte) []byte { b[p] ^= 1 << (3*bit + p%3); return b }, func(t *testing.T) {
				got, err := restore(t, s, "base")
				if err == nil && !bytes.Equal(got, want) || err != nil && !errors.Is(err, ErrCorrupt) {
					t.Fatalf("bit %d at %d flipped: got %v", bit, p, err)
				}
			})
		}
	}
}

func TestTruncatedFiles(t *testing.T) {
	t.Parallel()
	s := newStore(t)
	put(t, s, "base", "", newRAM(t, 1, memory.Extent{First: 0, N: 600}), nil)
	for _, name := range []string{manifestFile, indexFile, memoryFile, deviceFile} {
		t.Run(name, func(t *testing.T) {
			path := filepath.Join(s.Dir("base"), name)
			info, err := os.Stat(path)
			if err != nil {
				t.Fatal(err)
			}
			for _, p := range positions(int(info.Size())) {
				damage(t, path, func(b []byte) []byte { return b[:p] }, func(t *testing.T) { wantCorrupt(t, s, "base", name, "truncated") })
			}
			damage(t, path, func(b []byte) []byte { return append(b, 'x') }, func(t *testing.T) { wantCorrupt(t, s, "base", name, "longer") })
			if err := os.Rename(path, path+".away"); err != nil {
				t.Fatal(err)
			}
			wantCorrupt(t, s, "base", name, "missing")
			if err := os.Rename(path+".away", path); err != nil {
				t.Fatal(err)
			}
		})
	}
}

// TestSwappedFiles puts the files of one healthy snapshot into another.
func TestSwappedFiles(t *testing.T) {
	s := newStore(t)
	put(t, s, "one", "", newRAM(t, 1, memory.Extent{First: 0, N: 300}), nil)
	put(t, s, "two", "", newRAM(t, 2, memory.Extent{First: 0, N: 300}), nil)
	for _, name := range []string{manifestFile, indexFile, memoryFile, deviceFile} {
		t.Run(name, func(t *testing.T) {
			other, err := os.ReadFile(filepath.Join(s.Dir("two"), name))
			if err != nil {
				t.Fatal(err)
			}
			damage(t, filepath.Join(s.Dir("one"), name), func([]byte) []byte { return other },
				func(t *testing.T) { wantCorrupt(t, s, "one", name, "of another snapshot") })
		})
	}
}
