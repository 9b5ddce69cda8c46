package memory

import "os"

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
