package memory

import (
	"cmp"
	"fmt"
	"io"
	"os"
	"slices"
)

// Layer is what one snapshot changed over the one it rests on: a sealed memfd of the guest's full size that holds only those
// pages, at their guest offsets. A page of an extent that the memfd does not hold (a hole) reads as zeros and is part of the layer.
type Layer struct {
	File    *os.File
	Extents []Extent // normal
}

// MergeLayers makes the extents of a chain's layers (oldest first) disjoint: a page belongs to the newest layer that has it.
// Layers that keep no page are left out.
func MergeLayers(layers []Layer) []Layer {
	merged := make([]Layer, 0, len(layers))
	var covered []Extent
	for i := len(layers) - 1; i >= 0; i-- {
		visible := Subtract(layers[i].Extents, covered)
		if len(visible) == 0 {
			continue
		}
		covered = Union(covered, visible)
		merged = append(merged, Layer{layers[i].File, visible})
	}
	for i, j := 0, len(merged)-1; i < j; i, j = i+1, j-1 {
		merged[i], merged[j] = merged[j], merged[i]
	}
	return merged
}

// Gap policy: a mapping costs about 30 µs to make and a vma for good, a filled page 4 KiB. Gaps of up to MaxGap pages cut the
// mappings of a Debian guest's layer to a third for about 5 % more memory.
const (
	MaxGap       = 8  // pages
	gapFillShare = 16 // at most one page filled for so many pages of the layer
)

// FillGaps closes small gaps between the extents of a layer under construction, smallest first, by copying the pages in between
// from the image below, and returns the layer's new extents: fewer mappings for a few more pages. It stops at a sixteenth of the
// layer's own pages.
//
// Preconditions: f is the layer's memfd, not sealed yet; below is what the layer rests on.
func FillGaps(f *os.File, extents []Extent, below io.ReaderAt) ([]Extent, error) {
	gaps := Gaps(extents)
	slices.SortStableFunc(gaps, func(a, b Extent) int { return cmp.Compare(a.N, b.N) })
	budget := Pages(extents) / gapFillShare
	var filled []Extent
	buf := make([]byte, MaxGap*PageSize)
	for _, gap := range gaps {
		if gap.N > MaxGap || gap.N > budget {
			break
		}
		budget -= gap.N
		if err := copyPages(f, below, gap, buf); err != nil {
			return nil, fmt.Errorf("%s: fill gap of %d pages at %d: %w", f.Name(), gap.N, gap.First, err)
		}
		filled = append(filled, gap)
	}
	return Union(extents, filled), nil
}

// copyPages copies an extent of at most len(buf) bytes. Pages of zeros stay holes.
func copyPages(dst io.WriterAt, src io.ReaderAt, e Extent, buf []byte) error {
	buf = buf[:e.Bytes()]
	if _, err := src.ReadAt(buf, e.Offset()); err != nil && err != io.EOF {
		return err
	}
	for p := int64(0); p < e.Bytes(); p += PageSize {
		page := buf[p : p+PageSize]
		if IsZeroPage(page) {
			continue
		}
		if _, err := dst.WriteAt(page, e.Offset()+p); err != nil {
			return err
		}
	}
	return nil
}
