package pack

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"testing"

	"github.com/forkd/forkd/internal/memory"
)

// benchSource has an image of 2 MiB and a chain of three snapshots with 3.5 MiB each, half of it random.
func benchSource(b *testing.B) host {
	b.Helper()
	h := newHost(b)
	h.images.add(b, "img1")
	parent := ""
	for i := range 3 {
		extents := []memory.Extent{{First: uint64(i), N: 900}, {First: 1020, N: 1}}
		id := fmt.Sprint("s", i)
		h.put(b, id, parent, uint64(i), extents)
		parent = id
	}
	return h
}

func BenchmarkPack(b *testing.B) {
	h := benchSource(b)
	for b.Loop() {
		c, err := Pack(context.Background(), io.Discard, h.store, h.images, "s2", Options{})
		if err != nil {
			b.Fatal(err)
		}
		b.SetBytes(c.Bytes())
	}
}

func BenchmarkUnpack(b *testing.B) {
	h := benchSource(b)
	var file bytes.Buffer
	c, err := Pack(context.Background(), &file, h.store, h.images, "s2", Options{})
	if err != nil {
		b.Fatal(err)
	}
	b.SetBytes(c.Bytes())
	for b.Loop() {
		b.StopTimer()
		to := newHost(b)
		b.StartTimer()
		if _, err := to.unpack(b, file.Bytes(), UnpackOptions{}); err != nil {
			b.Fatal(err)
		}
	}
}
