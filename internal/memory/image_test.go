package memory

import (
	"bytes"
	"errors"
	"io"
	"math/rand/v2"
	"os"
	"strings"
	"testing"
)

// TestImageChain builds chains to depth 10 and compares what is read through each image with a model.
func TestImageChain(t *testing.T) {
	const pages = 96
	rnd := rand.New(rand.NewPCG(5, 6))
	for range 20 {
		base := newRAM(t, pages, rnd.Uint64N(1<<16), Extent{0, pages / 2})
		model := readAll(t, base, pages*PageSize)
		img, err := NewImage(sealed(t, base))
		if err != nil {
			t.Fatal(err)
		}
		for range 10 {
			extents := Normalize(randomExtents(rnd))
			f := newRAM(t, pages, rnd.Uint64N(1<<16), extents...)
			for _, e := range extents {
				if rnd.IntN(3) == 0 { // the guest zeroed it
					if err := Punch(f, []Extent{e}); err != nil {
						t.Fatal(err)
					}
				}
				if _, err := f.ReadAt(model[e.Offset():e.Offset()+e.Bytes()], e.Offset()); err != nil {
					t.Fatal(err)
				}
			}
			child, err := img.Derive(Layer{sealed(t, f), extents})
			if err != nil {
				t.Fatal(err)
			}
			img.Close()
			img = child
			checkReads(t, rnd, img, model)
		}
		img.Close()
	}
}

func checkReads(t *testing.T, rnd *rand.Rand, img *Image, model []byte) {
	t.Helper()
	if !bytes.Equal(readAll(t, img, img.Bytes()), model) {
		t.Fatal("image differs from the model")
	}
	off := rnd.IntN(len(model))
	want := model[off:min(len(model), off+rnd.IntN(5*PageSize))]
	got := make([]byte, len(want))
	if _, err := img.ReadAt(got, int64(off)); err != nil || !bytes.Equal(got, want) {
		t.Fatalf("read of %d bytes at %d differs (%v)", len(want), off, err)
	}
}

func TestImageReadAtEnds(t *testing.T) {
	img, err := NewImage(sealed(t, newRAM(t, 2, 1)))
	if err != nil {
		t.Fatal(err)
	}
	defer img.Close()
	if n, err := img.ReadAt(make([]byte, 10), 2*PageSize-4); n != 4 || err != io.EOF {
		t.Errorf("read over the end: got %d, %v; want 4, EOF", n, err)
	}
	if n, err := img.ReadAt(make([]byte, 10), 2*PageSize); n != 0 || err != io.EOF {
		t.Errorf("read behind the end: got %d, %v; want 0, EOF", n, err)
	}
	if _, err := img.ReadAt(make([]byte, 10), -1); err == nil {
		t.Error("read at a negative offset: got no error")
	}
}

func TestImageRefuses(t *testing.T) {
	base := sealed(t, newRAM(t, 8, 1))
	for name, c := range map[string]struct {
		base  *os.File
		layer Layer
		want  string
	}{
		"unsealed base":   {newRAM(t, 8, 1), Layer{}, "not sealed"},
		"unsealed layer":  {base, Layer{newRAM(t, 8, 1), []Extent{{0, 1}}}, "not sealed"},
		"other size":      {base, Layer{sealed(t, newRAM(t, 9, 1)), []Extent{{0, 1}}}, "bytes"},
		"beyond memory":   {base, Layer{sealed(t, newRAM(t, 8, 1)), []Extent{{7, 2}}}, "page 9 of 8"},
		"unsorted layers": {base, Layer{sealed(t, newRAM(t, 8, 1)), []Extent{{3, 1}, {1, 1}}}, "sorted"},
	} {
		t.Run(name, func(t *testing.T) {
			var layers []Layer
			if c.layer.File != nil {
				layers = append(layers, c.layer)
			}
			_, err := NewImage(c.base, layers...)
			if err == nil || !strings.Contains(err.Error(), c.want) {
				t.Fatalf("got error %v, want one with %q", err, c.want)
			}
			if _, err := c.base.Stat(); err != nil {
				t.Errorf("base was closed although it stays the caller's: %v", err)
			}
		})
	}
}

// TestImageSharesFiles closes a family in an order that leaves the middle for last.
func TestImageSharesFiles(t *testing.T) {
	layerFile := func() *os.File { return sealed(t, newRAM(t, 8, 2, Extent{1, 1})) }
	base, first, second := sealed(t, newRAM(t, 8, 1)), layerFile(), layerFile()
	root, err := NewImage(base)
	if err != nil {
		t.Fatal(err)
	}
	mid, err := root.Derive(Layer{first, []Extent{{1, 1}}})
	if err != nil {
		t.Fatal(err)
	}
	tip, err := mid.Derive(Layer{second, []Extent{{1, 1}}})
	if err != nil {
		t.Fatal(err)
	}
	if tip.Base() != base || mid.Base() != base {
		t.Error("base is not shared")
	}
	if n := len(tip.Layers()); n != 1 {
		t.Errorf("got %d layers that can be seen, want 1", n)
	}
	closed := func(f *os.File) bool { _, err := f.Stat(); return errors.Is(err, os.ErrClosed) }
	steps := []struct {
		img  *Image
		want [3]bool // closed: base, first, second
	}{{root, [3]bool{}}, {tip, [3]bool{false, false, true}}, {tip, [3]bool{false, false, true}}, {mid, [3]bool{true, true, true}}}
	for i, s := range steps {
		if err := s.img.Close(); err != nil {
			t.Errorf("step %d: %v", i, err)
		}
		if got := [3]bool{closed(base), closed(first), closed(second)}; got != s.want {
			t.Errorf("step %d: closed %v, want %v", i, got, s.want)
		}
	}
}
