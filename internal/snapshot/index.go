package snapshot

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"

	"github.com/forkd/forkd/internal/memory"
)

// The index says which pages a memory file stores, in which order (ascending, packed), and the digest of each chunk of them.
//
//	content: magic, logical bytes, flags (1: a layer), and the numbers of data extents, zero extents and chunks; then the records:
//	         extents {first, pages} in pages, then a SHA-256 per chunk
//	layout:  a uint32 per chunk: the bytes it takes in the file; fewer than its pages have: zstd
//	sum:     SHA-256 of all before
//
// Content is the same wherever the snapshot goes: its SHA-256 is the snapshot's memory digest. Layout is how this store keeps it.
const (
	indexMagic  = "forkd-m1"
	indexHeader = len(indexMagic) + 8 + 4*4
	flagLayer   = 1
	extentBytes = 16
	digestBytes = sha256.Size
)

type index struct {
	logical int64
	layer   bool            // lies over another snapshot's memory
	data    []memory.Extent // stored, in file order
	zero    []memory.Extent // of a layer: changed to zeros, not stored
	sums    [][digestBytes]byte
	stored  []uint32 // bytes of each chunk in the file
}

// content encodes the part that names what the memory holds.
func (x *index) content() []byte {
	out := make([]byte, 0, indexHeader+extentBytes*(len(x.data)+len(x.zero))+digestBytes*len(x.sums))
	out = append(out, indexMagic...)
	out = binary.LittleEndian.AppendUint64(out, uint64(x.logical))
	flags := 0
	if x.layer {
		flags = flagLayer
	}
	for _, n := range []int{flags, len(x.data), len(x.zero), len(x.sums)} {
		out = binary.LittleEndian.AppendUint32(out, uint32(n))
	}
	for _, extents := range [][]memory.Extent{x.data, x.zero} {
		for _, e := range extents {
			out = binary.LittleEndian.AppendUint64(out, e.First)
			out = binary.LittleEndian.AppendUint64(out, e.N)
		}
	}
	for _, sum := range x.sums {
		out = append(out, sum[:]...)
	}
	return out
}

func (x *index) contentSHA256() string {
	sum := sha256.Sum256(x.content())
	return hex.EncodeToString(sum[:])
}

// encode returns the index's file.
func (x *index) encode() []byte {
	out := x.content()
	for _, n := range x.stored {
		out = binary.LittleEndian.AppendUint32(out, n)
	}
	sum := sha256.Sum256(out)
	return append(out, sum[:]...)
}

// decodeIndex reads an index's file.
func decodeIndex(file []byte) (*index, error) {
	if len(file) < digestBytes {
		return nil, fmt.Errorf("index has %d bytes, too few", len(file))
	}
	body, sum := file[:len(file)-digestBytes], file[len(file)-digestBytes:]
	if got := sha256.Sum256(body); !bytes.Equal(got[:], sum) {
		return nil, fmt.Errorf("digest of the index does not match: it says %x, its content gives %x", sum, got)
	}
	x, layout, err := decodeContent(body)
	if err != nil {
		return nil, err
	}
	if len(layout) != 4*len(x.sums) {
		return nil, fmt.Errorf("index has a layout of %d bytes for %d chunks", len(layout), len(x.sums))
	}
	for i := range x.sums {
		x.stored = append(x.stored, binary.LittleEndian.Uint32(layout[4*i:]))
	}
	return x, x.checkLayout()
}

// decodeContent reads the content part and returns what is behind it. Every count is checked against the bytes that are there
// before anything is allocated for it.
func decodeContent(b []byte) (*index, []byte, error) {
	if len(b) < indexHeader || string(b[:len(indexMagic)]) != indexMagic {
		return nil, nil, errors.New("not an index of guest memory")
	}
	b = b[len(indexMagic):]
	x := &index{logical: int64(binary.LittleEndian.Uint64(b))}
	number := func(i int) int { return int(binary.LittleEndian.Uint32(b[8+4*i:])) }
	flags, nData, nZero, nSums := number(0), number(1), number(2), number(3)
	b = b[indexHeader-len(indexMagic):]
	if x.layer = flags == flagLayer; flags > flagLayer {
		return nil, nil, fmt.Errorf("index has unknown flags %x", flags)
	}
	if need := extentBytes*(nData+nZero) + digestBytes*nSums; need > len(b) {
		return nil, nil, fmt.Errorf("index is truncated: %d bytes for %d extents and %d chunks", len(b), nData+nZero, nSums)
	}
	x.data, b = decodeExtents(b, nData)
	x.zero, b = decodeExtents(b, nZero)
	x.sums = make([][digestBytes]byte, nSums)
	for i := range x.sums {
		b = b[copy(x.sums[i][:], b):]
	}
	return x, b, x.checkContent()
}

func decodeExtents(b []byte, n int) ([]memory.Extent, []byte) {
	if n == 0 {
		return nil, b
	}
	out := make([]memory.Extent, n)
	for i := range out {
		out[i] = memory.Extent{First: binary.LittleEndian.Uint64(b), N: binary.LittleEndian.Uint64(b[8:])}
		b = b[extentBytes:]
	}
	return out, b
}

func (x *index) checkContent() error {
	if x.logical <= 0 || x.logical > maxMemMiB<<20 || x.logical%memory.PageSize != 0 {
		return fmt.Errorf("index is of %d bytes of memory", x.logical)
	}
	for _, extents := range [][]memory.Extent{x.data, x.zero} {
		if !memory.IsNormal(extents) {
			return errors.New("extents of the index are not sorted and disjoint")
		}
		if n := len(extents); n > 0 && extents[n-1].End() > uint64(x.logical/memory.PageSize) {
			return fmt.Errorf("extents of the index reach page %d of %d", extents[n-1].End(), x.logical/memory.PageSize)
		}
	}
	if len(x.zero) > 0 && !x.layer {
		return errors.New("index has zero extents without being a layer's")
	}
	if len(memory.Intersect(x.data, x.zero)) > 0 {
		return errors.New("index has pages that are both data and zero")
	}
	if want := (x.dataBytes() + ChunkBytes - 1) / ChunkBytes; int64(len(x.sums)) != want {
		return fmt.Errorf("index has %d chunks for %d bytes of pages, want %d", len(x.sums), x.dataBytes(), want)
	}
	return nil
}

func (x *index) checkLayout() error {
	for i, n := range x.stored {
		if n == 0 || int(n) > x.chunkBytes(i) {
			return fmt.Errorf("index has a chunk %d of %d bytes for %d bytes of pages", i, n, x.chunkBytes(i))
		}
	}
	return nil
}

// dataBytes is how many bytes of pages are stored.
func (x *index) dataBytes() int64 { return int64(memory.Pages(x.data)) * memory.PageSize }

// chunkBytes is how many bytes of pages chunk i holds.
func (x *index) chunkBytes(i int) int {
	return int(min(ChunkBytes, x.dataBytes()-int64(i)*ChunkBytes))
}

// fileBytes is how long the memory file is.
func (x *index) fileBytes() int64 {
	var n int64
	for _, s := range x.stored {
		n += int64(s)
	}
	return n
}

// extents are all pages of the layer.
func (x *index) extents() []memory.Extent { return memory.Union(x.data, x.zero) }

// chunk is a run of stored pages that share a digest.
type chunk struct {
	n       int
	offset  int64 // in the memory file
	stored  int   // bytes there
	bytes   int   // of pages
	sum     [digestBytes]byte
	extents []memory.Extent // where the pages belong in guest memory
}

// chunks lays out the memory file.
func (x *index) chunks() []chunk {
	out := make([]chunk, len(x.sums))
	rest := x.data
	var skip uint64 // pages of rest[0] that earlier chunks have
	var offset int64
	for i := range out {
		c := chunk{n: i, offset: offset, stored: int(x.stored[i]), bytes: x.chunkBytes(i), sum: x.sums[i]}
		offset += int64(c.stored)
		for want := uint64(c.bytes / memory.PageSize); want > 0; {
			e := memory.Extent{First: rest[0].First + skip, N: min(want, rest[0].N-skip)}
			c.extents = append(c.extents, e)
			want -= e.N
			if skip += e.N; skip == rest[0].N {
				rest, skip = rest[1:], 0
			}
		}
		out[i] = c
	}
	return out
}
