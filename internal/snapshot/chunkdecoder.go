package snapshot

import (
	"fmt"

	"github.com/klauspost/compress/zstd"
)

// chunkDecoder has the buffers to read one chunk at a time.
type chunkDecoder struct {
	stored [ChunkBytes]byte
	pages  [ChunkBytes]byte
	zstd   *zstd.Decoder // made when the first compressed chunk comes
}

// Close frees what the decoder holds.
func (d *chunkDecoder) Close() {
	if d.zstd != nil {
		d.zstd.Close()
	}
}

// decode returns the n bytes of pages that a stored chunk holds.
func (d *chunkDecoder) decode(stored []byte, n int) ([]byte, error) {
	if len(stored) == n { // as it is
		return stored, nil
	}
	if d.zstd == nil {
		var err error
		d.zstd, err = zstd.NewReader(nil, zstd.WithDecoderConcurrency(1), zstd.WithDecoderMaxMemory(2*ChunkBytes),
			zstd.WithDecodeAllCapLimit(true), zstd.IgnoreChecksum(true))
		if err != nil {
			return nil, err
		}
	}
	pages, err := d.zstd.DecodeAll(stored, d.pages[:0:n]) // never more than n bytes, whatever the frame promises
	if err != nil {
		return nil, err
	}
	if len(pages) != n {
		return nil, fmt.Errorf("%d bytes, want %d", len(pages), n)
	}
	return pages, nil
}
