package vmlinux

import (
	"bytes"
	"debug/elf"
	"encoding/binary"
	"errors"
	"os"
	"os/exec"
	"testing"
	"time"
)

// kernelFile has what Extract looks at, and enough of it for more than one block of lz4.
func kernelFile() []byte {
	b := append([]byte("\x7fELF"), bytes.Repeat([]byte("a kernel "), 1_000_000)...)
	return append(b, 0xe8, 0, 0, 0, 1) // a call, for the filter that xz has for machine code
}

// bzImage wraps a payload.
func bzImage(payload []byte) []byte {
	b := make([]byte, 3*sector)
	b[setupSectorsAt] = 1
	copy(b[magicAt:], "HdrS")
	binary.LittleEndian.PutUint32(b[payloadOffsetAt:], sector)
	binary.LittleEndian.PutUint32(b[payloadLengthAt:], uint32(len(payload)))
	return append(b, payload...)
}

// pack packs the kernel with a program, as Linux's build does, and puts its size behind it.
func pack(t *testing.T, sized bool, program string, args ...string) []byte {
	t.Helper()
	if _, err := exec.LookPath(program); err != nil {
		t.Skipf("%s is not installed", program)
	}
	cmd := exec.Command(program, args...)
	cmd.Stdin = bytes.NewReader(kernelFile())
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("%s: %v", program, err)
	}
	if sized {
		out = binary.LittleEndian.AppendUint32(out, uint32(len(kernelFile())))
	}
	return out
}

func TestExtract(t *testing.T) {
	for _, tt := range []struct {
		name    string
		payload func(t *testing.T) []byte
	}{
		{"nothing", func(*testing.T) []byte { return kernelFile() }},
		{"gzip", func(t *testing.T) []byte { return pack(t, false, "gzip", "-n", "-9") }},
		{"xz", func(t *testing.T) []byte { return pack(t, true, "xz", "--check=crc32", "--x86", "--lzma2=,dict=32MiB") }},
		{"zstd", func(t *testing.T) []byte { return pack(t, true, "zstd", "-19", "-c") }},
		{"lz4", func(t *testing.T) []byte { return pack(t, true, "lz4", "-l", "-9", "-c") }},
	} {
		t.Run(tt.name, func(t *testing.T) {
			got, err := Extract(bzImage(tt.payload(t)))
			if err != nil || !bytes.Equal(got, kernelFile()) {
				t.Errorf("got %d bytes (%v), want the %d of the kernel", len(got), err, len(kernelFile()))
			}
		})
	}
}

func TestExtractRefuses(t *testing.T) {
	cut := bzImage(kernelFile())
	gz := bzImage([]byte{0x1f, 0x8b, 8, 0, 0})
	lz := bzImage([]byte{0x02, 0x21, 0x4c, 0x18, 0xff, 0, 0, 0, 1, 2, 3, 4})
	for name, image := range map[string][]byte{
		"empty": nil, "text": []byte("#!/bin/sh\n"), "cut off": cut[:len(cut)/2], "another packing": bzImage([]byte("BZh9 and more")),
		"broken gzip": gz, "broken lz4": lz, "no payload": bzImage(nil),
	} {
		t.Run(name, func(t *testing.T) {
			if got, err := Extract(image); err == nil {
				t.Errorf("got %d bytes, want an error", len(got))
			} else {
				t.Log(err)
			}
		})
	}
	if _, err := Extract([]byte("#!/bin/sh\n")); !errors.Is(err, ErrNotKernel) {
		t.Errorf("a script: %v, want ErrNotKernel", err)
	}
}

// TestRealKernel unpacks the kernel that FORKD_TEST_KERNEL names.
func TestRealKernel(t *testing.T) {
	path := os.Getenv("FORKD_TEST_KERNEL")
	if path == "" {
		t.Skip("FORKD_TEST_KERNEL names no bzImage")
	}
	image, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	begin := time.Now()
	b, err := Extract(image)
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("%d bytes in %v", len(b), time.Since(begin))
	f, err := elf.NewFile(bytes.NewReader(b))
	if err != nil || f.Machine != elf.EM_X86_64 {
		t.Errorf("not an ELF file for x86-64: %v", err)
	}
}
