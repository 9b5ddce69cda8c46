package memory

import (
	"iter"
	"math/bits"
	"sync/atomic"
)

// wordPages is how many pages one word of a bitset covers.
const wordPages = 64

// bitset has one bit for each page of a guest. All methods are atomic, by word.
type bitset []atomic.Uint64

func newBitset(pages uint64) bitset { return make(bitset, (pages+wordPages-1)/wordPages) }

func bit(page uint64) uint64 { return 1 << (page % wordPages) }

func (b bitset) has(page uint64) bool { return b[page/wordPages].Load()&bit(page) != 0 }

// set sets a page's bit and reports whether it was clear before.
func (b bitset) set(page uint64) bool { return b[page/wordPages].Or(bit(page))&bit(page) == 0 }

// setAll sets the bits of an extent.
func (b bitset) setAll(e Extent) {
	for e.N > 0 {
		n := min(e.N, wordPages-e.First%wordPages)
		b[e.First/wordPages].Or(mask(n) << (e.First % wordPages))
		e.First, e.N = e.First+n, e.N-n
	}
}

// mask has the lowest n bits set.
func mask(n uint64) uint64 { return ^uint64(0) >> (wordPages - n) }

// count counts the bits.
func (b bitset) count() uint64 {
	var n int
	for i := range b {
		n += bits.OnesCount64(b[i].Load())
	}
	return uint64(n)
}

// extents are the runs of set bits.
func (b bitset) extents() []Extent {
	var out []Extent
	for i := range b {
		for e := range runsIn(uint64(i), b[i].Load()) {
			if k := len(out) - 1; k >= 0 && out[k].End() == e.First {
				out[k].N += e.N
				continue
			}
			out = append(out, e)
		}
	}
	return out
}

// runsIn yields the runs of bits set in word number i of a bitset.
func runsIn(i, word uint64) iter.Seq[Extent] {
	return func(yield func(Extent) bool) {
		for word != 0 {
			first := uint64(bits.TrailingZeros64(word))
			n := uint64(bits.TrailingZeros64(^(word >> first)))
			if !yield(Extent{i*wordPages + first, n}) {
				return
			}
			word &^= mask(n) << first
		}
	}
}
