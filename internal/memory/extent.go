package memory

import (
	"cmp"
	"slices"
)

// PageSize is the unit of extents: a page of guest memory on the supported architectures.
const PageSize = 4096

// Extent is a run of N pages that starts at page First, counted from the start of guest memory.
type Extent struct {
	First uint64 `json:"first"`
	N     uint64 `json:"n"`
}

// End is the page behind the extent.
func (e Extent) End() uint64 { return e.First + e.N }

// Offset is where the extent starts, in bytes.
func (e Extent) Offset() int64 { return int64(e.First) * PageSize }

// Bytes is the extent's length in bytes.
func (e Extent) Bytes() int64 { return int64(e.N) * PageSize }

// Normalize sorts extents, drops empty ones and merges those that overlap or touch. It does not change its argument.
func Normalize(extents []Extent) []Extent {
	sorted := slices.Clone(extents)
	slices.SortFunc(sorted, func(a, b Extent) int { return cmp.Compare(a.First, b.First) })
	return mergeSorted(sorted, 0)
}

// IsNormal reports whether extents are sorted, disjoint, and neither empty nor adjacent, and whether their ends fit in 64 bits.
func IsNormal(extents []Extent) bool {
	for i, e := range extents {
		if e.N == 0 || e.End() < e.First {
			return false
		}
		if i > 0 && e.First <= extents[i-1].End() {
			return false
		}
	}
	return true
}

// Pages counts the pages of disjoint extents.
func Pages(extents []Extent) uint64 {
	var n uint64
	for _, e := range extents {
		n += e.N
	}
	return n
}

// Union returns the pages that are in a or in b.
func Union(a, b []Extent) []Extent {
	return Normalize(slices.Concat(a, b))
}

// Subtract returns the pages of a that are not in b.
func Subtract(a, b []Extent) []Extent {
	var out []Extent
	for _, e := range a {
		for len(b) > 0 && b[0].End() <= e.First {
			b = b[1:]
		}
		for _, hole := range b { // b is kept: its last hole may reach into the next extent of a
			if hole.First >= e.End() || e.N == 0 {
				break
			}
			if hole.First > e.First {
				out = append(out, Extent{e.First, hole.First - e.First})
			}
			e = from(e, hole.End())
		}
		if e.N > 0 {
			out = append(out, e)
		}
	}
	return out
}

// Intersect returns the pages that are in both a and b.
func Intersect(a, b []Extent) []Extent {
	var out []Extent
	for len(a) > 0 && len(b) > 0 {
		first, end := max(a[0].First, b[0].First), min(a[0].End(), b[0].End())
		if first < end {
			out = append(out, Extent{first, end - first})
		}
		if a[0].End() < b[0].End() {
			a = a[1:]
		} else {
			b = b[1:]
		}
	}
	return out
}

// Clip returns the pages of extents that lie below page limit.
func Clip(extents []Extent, limit uint64) []Extent {
	if limit == 0 {
		return nil
	}
	return Intersect(extents, []Extent{{0, limit}})
}

// Gaps returns the pages between the first and the last page of extents that are in none of them.
func Gaps(extents []Extent) []Extent {
	var out []Extent
	for i := 1; i < len(extents); i++ {
		end := extents[i-1].End()
		out = append(out, Extent{end, extents[i].First - end})
	}
	return out
}

// from cuts off what lies before page first.
func from(e Extent, first uint64) Extent {
	if first >= e.End() {
		return Extent{e.End(), 0}
	}
	return Extent{first, e.End() - first}
}

// mergeSorted merges neighbours that are at most gap pages apart, in place.
func mergeSorted(sorted []Extent, gap uint64) []Extent {
	out := sorted[:0]
	for _, e := range sorted {
		switch {
		case e.N == 0:
		case len(out) > 0 && e.First <= out[len(out)-1].End()+gap:
			last := &out[len(out)-1]
			last.N = max(last.End(), e.End()) - last.First
		default:
			out = append(out, e)
		}
	}
	if len(out) == 0 {
		return nil
	}
	return out
}
