package memory

import (
	"math/rand/v2"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// bitmap is the model that the extent algebra is checked against.
type bitmap [96]bool

func mapOf(extents []Extent) bitmap {
	var b bitmap
	for _, e := range extents {
		for p := e.First; p < e.End(); p++ {
			b[p] = true
		}
	}
	return b
}

func (b bitmap) extents() []Extent {
	var out []Extent
	for p, set := range b {
		switch {
		case !set:
		case p > 0 && b[p-1]:
			out[len(out)-1].N++
		default:
			out = append(out, Extent{uint64(p), 1})
		}
	}
	return out
}

func combine(a, b []Extent, f func(x, y bool) bool) []Extent {
	ma, mb := mapOf(a), mapOf(b)
	var out bitmap
	for p := range out {
		out[p] = f(ma[p], mb[p])
	}
	return out.extents()
}

// randomExtents are neither sorted nor disjoint, and some are empty.
func randomExtents(rnd *rand.Rand) []Extent {
	var out []Extent
	for range rnd.IntN(12) {
		first := rnd.Uint64N(uint64(len(bitmap{})))
		out = append(out, Extent{first, rnd.Uint64N(min(uint64(len(bitmap{}))-first+1, 12))})
	}
	return out
}

func TestExtentAlgebra(t *testing.T) {
	rnd := rand.New(rand.NewPCG(1, 2))
	for range 20000 {
		raw := randomExtents(rnd)
		a, b := Normalize(raw), Normalize(randomExtents(rnd))
		limit := rnd.Uint64N(uint64(len(bitmap{}) + 8))
		cases := []struct {
			name      string
			got, want []Extent
		}{
			{"Normalize", a, mapOf(raw).extents()},
			{"Union", Union(a, b), combine(a, b, func(x, y bool) bool { return x || y })},
			{"Subtract", Subtract(a, b), combine(a, b, func(x, y bool) bool { return x && !y })},
			{"Intersect", Intersect(a, b), combine(a, b, func(x, y bool) bool { return x && y })},
			{"Clip", Clip(a, limit), combine(a, []Extent{{0, min(limit, uint64(len(bitmap{})))}}, func(x, y bool) bool { return x && y })},
			{"Gaps", Gaps(a), gapsModel(a)},
		}
		for _, c := range cases {
			if diff := cmp.Diff(c.want, c.got); diff != "" {
				t.Fatalf("%s of %v and %v (limit %d) (-want +got):\n%s", c.name, a, b, limit, diff)
			}
			if !IsNormal(c.got) {
				t.Fatalf("%s of %v and %v is not normal: %v", c.name, a, b, c.got)
			}
		}
		if got, want := Pages(a), countPages(mapOf(a)); got != want {
			t.Fatalf("Pages(%v): got %d, want %d", a, got, want)
		}
	}
}

func gapsModel(a []Extent) []Extent {
	if len(a) == 0 {
		return nil
	}
	span := []Extent{{a[0].First, a[len(a)-1].End() - a[0].First}}
	return combine(span, a, func(x, y bool) bool { return x && !y })
}

func countPages(b bitmap) uint64 {
	var n uint64
	for _, set := range b {
		if set {
			n++
		}
	}
	return n
}

func TestIsNormal(t *testing.T) {
	for name, c := range map[string]struct {
		extents []Extent
		want    bool
	}{
		"nothing":     {nil, true},
		"apart":       {[]Extent{{0, 1}, {2, 1}}, true},
		"adjacent":    {[]Extent{{0, 1}, {1, 1}}, false},
		"overlapping": {[]Extent{{0, 3}, {2, 3}}, false},
		"unsorted":    {[]Extent{{5, 1}, {1, 1}}, false},
		"empty":       {[]Extent{{5, 0}}, false},
		"overflow":    {[]Extent{{1 << 63, 1 << 63}}, false},
		"wraps":       {[]Extent{{^uint64(0), 2}}, false},
	} {
		t.Run(name, func(t *testing.T) {
			if got := IsNormal(c.extents); got != c.want {
				t.Errorf("got %v, want %v", got, c.want)
			}
		})
	}
}
