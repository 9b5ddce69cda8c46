// Package vmlinux takes the ELF file out of a bzImage, for monitors that boot nothing else. It knows the formats that Linux is packed in by
// the distributions; it does not look into the kernel.
package vmlinux

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"

	"github.com/klauspost/compress/gzip"
	"github.com/klauspost/compress/zstd"
	"github.com/mikelolasagasti/xz"
	"github.com/pierrec/lz4/v4"
)

// ErrNotKernel says that a file is neither a bzImage that can be unpacked nor an ELF file.
var ErrNotKernel = errors.New("not a Linux kernel for x86-64")

// maxKernel bounds an unpacked kernel; Debian's has 60 MiB.
const maxKernel = 512 << 20

// Places in a bzImage (Linux: Documentation/arch/x86/boot.rst).
const (
	setupSectorsAt  = 0x1f1
	magicAt         = 0x202
	payloadOffsetAt = 0x248
	payloadLengthAt = 0x24c
	headerEnd       = 0x250
	sector          = 512
)

var elfMagic = []byte("\x7fELF")

// packing is a way in which the payload of a bzImage may be packed.
type packing struct {
	name   string
	magic  []byte
	unpack func(payload []byte) ([]byte, error)
}

func packings() []packing {
	return []packing{
		{"gzip", []byte{0x1f, 0x8b}, unpackGzip},
		{"xz", []byte("\xfd7zXZ\x00"), unpackXZ},
		{"zstd", []byte{0x28, 0xb5, 0x2f, 0xfd}, unpackZstd},
		{"lz4", []byte{0x02, 0x21, 0x4c, 0x18}, unpackLZ4},
		{"nothing", elfMagic, func(b []byte) ([]byte, error) { return b, nil }},
	}
}

// Extract returns the ELF file in a bzImage; an ELF file comes back as it is.
func Extract(image []byte) ([]byte, error) {
	if bytes.HasPrefix(image, elfMagic) {
		return image, nil
	}
	payload, err := payloadOf(image)
	if err != nil {
		return nil, err
	}
	for _, p := range packings() {
		if !bytes.HasPrefix(payload, p.magic) {
			continue
		}
		kernel, err := p.unpack(payload)
		if err != nil {
			return nil, fmt.Errorf("kernel packed with %s: %w", p.name, err)
		}
		if !bytes.HasPrefix(kernel, elfMagic) {
			return nil, fmt.Errorf("kernel packed with %s: no ELF file is in it: %w", p.name, ErrNotKernel)
		}
		return kernel, nil
	}
	return nil, fmt.Errorf("it is packed in a way that begins with %x (known: gzip, xz, zstd, lz4): %w", payload[:min(6, len(payload))], ErrNotKernel)
}

func payloadOf(image []byte) ([]byte, error) {
	if len(image) < headerEnd || string(image[magicAt:magicAt+4]) != "HdrS" {
		return nil, fmt.Errorf("it begins with %x: %w", image[:min(8, len(image))], ErrNotKernel)
	}
	le := binary.LittleEndian
	sectors := uint64(image[setupSectorsAt])
	if sectors == 0 {
		sectors = 4
	}
	begin := (sectors+1)*sector + uint64(le.Uint32(image[payloadOffsetAt:]))
	end := begin + uint64(le.Uint32(image[payloadLengthAt:]))
	if begin == end || end > uint64(len(image)) {
		return nil, fmt.Errorf("its payload is said to be at %d to %d of %d bytes: %w", begin, end, len(image), ErrNotKernel)
	}
	return image[begin:end], nil
}

// readAll reads a kernel, and not more than that may be.
func readAll(r io.Reader) ([]byte, error) {
	b, err := io.ReadAll(io.LimitReader(r, maxKernel+1))
	if err == nil && len(b) > maxKernel {
		err = fmt.Errorf("it has more than %d MiB: %w", maxKernel>>20, ErrNotKernel)
	}
	return b, err
}

func unpackGzip(payload []byte) ([]byte, error) {
	r, err := gzip.NewReader(bytes.NewReader(payload))
	if err != nil {
		return nil, err
	}
	r.Multistream(false) // the size of the kernel follows
	return readAll(r)
}

func unpackXZ(payload []byte) ([]byte, error) {
	r, err := xz.NewReader(bytes.NewReader(payload), 0)
	if err != nil {
		return nil, err
	}
	r.Multistream(false)
	return readAll(r)
}

func unpackZstd(payload []byte) ([]byte, error) {
	r, err := zstd.NewReader(bytes.NewReader(payload), zstd.WithDecoderMaxWindow(128<<20), zstd.WithDecoderConcurrency(1))
	if err != nil {
		return nil, err
	}
	defer r.Close()
	b, err := readAll(r)
	if bytes.HasPrefix(b, elfMagic) && errors.Is(err, zstd.ErrMagicMismatch) || errors.Is(err, io.ErrUnexpectedEOF) && bytes.HasPrefix(b, elfMagic) {
		err = nil // the size of the kernel follows the frame
	}
	return b, err
}

// unpackLZ4 unpacks what `lz4 -l` makes: blocks of up to 8 MiB, each behind its packed length, and the size of the kernel behind all.
func unpackLZ4(payload []byte) ([]byte, error) {
	const blockSize = 8 << 20
	size := binary.LittleEndian.Uint32(payload[len(payload)-4:])
	if size > maxKernel {
		return nil, fmt.Errorf("it is said to have %d bytes: %w", size, ErrNotKernel)
	}
	kernel := make([]byte, 0, int(size)+blockSize)
	for rest := payload[4:]; len(rest) > 4; {
		n := binary.LittleEndian.Uint32(rest)
		if rest = rest[4:]; uint64(n) > uint64(len(rest)) || len(kernel) > int(size) {
			return nil, fmt.Errorf("a block of %d bytes where %d are left: %w", n, len(rest), io.ErrUnexpectedEOF)
		}
		got, err := lz4.UncompressBlock(rest[:n], kernel[len(kernel):min(cap(kernel), len(kernel)+blockSize)])
		if err != nil {
			return nil, err
		}
		kernel, rest = kernel[:len(kernel)+got], rest[n:]
	}
	if len(kernel) != int(size) {
		return nil, fmt.Errorf("it has %d bytes, not %d: %w", len(kernel), size, io.ErrUnexpectedEOF)
	}
	return kernel, nil
}
