package memory

import (
	"bytes"
	"io"
	"math/rand/v2"
	"os"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// owners says for each page which layer it belongs to, counted from 1; 0 is none.
func owners(layers []Layer, index map[*os.File]int) [96]int {
	var out [96]int
	for _, l := range layers {
		for _, e := range l.Extents {
			for p := e.First; p < e.End(); p++ {
				out[p] = index[l.File]
			}
		}
	}
	return out
}

func mappingCount(layers []Layer) int {
	n := 0
	for _, l := range layers {
		n += len(l.Extents)
	}
	return n
}

func TestMergeLayers(t *testing.T) {
	rnd := rand.New(rand.NewPCG(3, 4))
	for range 5000 {
		index := map[*os.File]int{}
		var layers []Layer
		for i := range rnd.IntN(6) {
			f := os.NewFile(uintptr(1<<20+i), "") // never used, only told apart
			index[f] = i + 1
			layers = append(layers, Layer{f, Normalize(randomExtents(rnd))})
		}
		merged, plan := MergeLayers(layers), PlanMappings(layers)
		want := owners(layers, index) // painted oldest first: the newest stays
		if diff := cmp.Diff(want, owners(merged, index)); diff != "" {
			t.Fatalf("MergeLayers(%v) (-want +got):\n%s", layers, diff)
		}
		if diff := cmp.Diff(want, owners(plan, index)); diff != "" {
			t.Fatalf("PlanMappings(%v) (-want +got):\n%s", layers, diff)
		}
		var all []Extent
		for _, l := range merged {
			if !IsNormal(l.Extents) || len(Intersect(all, l.Extents)) > 0 {
				t.Fatalf("MergeLayers(%v): extents are not disjoint: %v", layers, merged)
			}
			all = Union(all, l.Extents)
		}
		if mappingCount(plan) > mappingCount(merged) || mappingCount(plan) > mappingCount(layers) {
			t.Fatalf("PlanMappings(%v): %d mappings, merged %d", layers, mappingCount(plan), mappingCount(merged))
		}
	}
}

func TestPlanSpansWhatIsCovered(t *testing.T) {
	old, young := os.NewFile(1<<20, ""), os.NewFile(1<<20+1, "")
	got := PlanMappings([]Layer{{old, []Extent{{0, 10}}}, {young, []Extent{{2, 1}, {5, 2}}}})
	want := []Layer{{old, []Extent{{0, 10}}}, {young, []Extent{{2, 1}, {5, 2}}}}
	if len(got) != 2 || !cmp.Equal(got[0].Extents, want[0].Extents) || !cmp.Equal(got[1].Extents, want[1].Extents) {
		t.Errorf("got %v, want %v", got, want)
	}
}

// newRAM returns an unsealed memfd with random data in extents.
func newRAM(t testing.TB, pages uint64, seed uint64, extents ...Extent) *os.File {
	t.Helper()
	f, err := New("test", int64(pages)*PageSize)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.Close() })
	rnd := rand.NewChaCha8([32]byte{byte(seed), byte(seed >> 8)})
	for _, e := range extents {
		b := make([]byte, e.Bytes())
		rnd.Read(b)
		if _, err := f.WriteAt(b, e.Offset()); err != nil {
			t.Fatal(err)
		}
	}
	return f
}

func sealed(t testing.TB, f *os.File) *os.File {
	t.Helper()
	if err := Seal(f); err != nil {
		t.Fatal(err)
	}
	return f
}

func readAll(t testing.TB, r io.ReaderAt, bytes int64) []byte {
	t.Helper()
	b := make([]byte, bytes)
	if _, err := r.ReadAt(b, 0); err != nil && err != io.EOF {
		t.Fatal(err)
	}
	return b
}

func TestFillGaps(t *testing.T) {
	const pages = 2048
	base := sealed(t, newRAM(t, pages, 1, Extent{0, 1200}))
	below, err := NewImage(base)
	if err != nil {
		t.Fatal(err)
	}
	defer below.Close()
	var extents []Extent
	for first := uint64(0); first < 1600; first += 100 {
		extents = append(extents, Extent{first, 60}, Extent{first + 60 + 1 + first/200, 20})
	}
	f := newRAM(t, pages, 2, extents...)
	want := readAll(t, below, pages*PageSize)
	overlay := readAll(t, f, pages*PageSize)
	for _, e := range extents {
		copy(want[e.Offset():e.Offset()+e.Bytes()], overlay[e.Offset():])
	}

	filled, err := FillGaps(f, extents, below)
	if err != nil {
		t.Fatal(err)
	}
	if len(filled) >= len(extents) {
		t.Errorf("got %d extents, want fewer than %d", len(filled), len(extents))
	}
	if got, limit := Pages(filled)-Pages(extents), Pages(extents)/gapFillShare; got > limit {
		t.Errorf("got %d pages filled, want at most %d", got, limit)
	}
	if len(Subtract(extents, filled)) > 0 {
		t.Error("pages of the layer got lost")
	}
	img, err := below.Derive(Layer{sealed(t, f), filled})
	if err != nil {
		t.Fatal(err)
	}
	defer img.Close()
	if !bytes.Equal(readAll(t, img, pages*PageSize), want) {
		t.Error("image with filled gaps differs from the one without")
	}
	// Gaps above page 1200 lie over a hole of the base: filling them must not take memory.
	data, err := DataExtents(f)
	if err != nil {
		t.Fatal(err)
	}
	if holes := Subtract(Subtract(filled, extents), data); len(Clip(holes, 1200)) > 0 || len(holes) == 0 {
		t.Errorf("got %v as filled holes, want some, all above page 1200", holes)
	}
}
