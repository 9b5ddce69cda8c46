package snapshot

import (
	"context"
	"fmt"
	"os"
	"testing"

	"github.com/forkd/forkd/internal/memory"
)

const benchMiB = 256

// benchRAM is like a small guest's memory: of 256 MiB about 130 hold data, in some thousands of runs between zeroed and untouched
// pages. Half of the data is text-like, so that compression has something to do.
func benchRAM(b *testing.B) *os.File {
	b.Helper()
	f, err := memory.New("bench", benchMiB<<20)
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { f.Close() })
	text := make([]byte, 16*memory.PageSize)
	for i := range text {
		text[i] = "the quick brown fox jumps over the lazy dog\n"[(i*i/7+i/64)%44]
	}
	for first := uint64(0); first < benchMiB<<8; first += 32 {
		if first%64 == 0 {
			fillPages(b, f, first, memory.Extent{First: first, N: 17})
			continue
		}
		if _, err := f.WriteAt(text, int64(first)*memory.PageSize); err != nil {
			b.Fatal(err)
		}
		if _, err := f.WriteAt(make([]byte, 4*memory.PageSize), int64(first+16)*memory.PageSize); err != nil {
			b.Fatal(err)
		}
	}
	return f
}

func benchManifest() Manifest {
	m := testManifest()
	m.Shape.MemMiB = benchMiB
	return m
}

func benchStores() map[string][]Option {
	return map[string][]Option{"plain": nil, "zstd": {WithCompression()}}
}

func publishBench(b *testing.B, s *Store, id string, ram *os.File) Manifest {
	b.Helper()
	ctx := context.Background()
	st, err := s.Stage(id)
	if err != nil {
		b.Fatal(err)
	}
	defer st.Abort()
	if err := st.WriteMemory(ctx, ram, nil); err != nil {
		b.Fatal(err)
	}
	state, err := memory.SealedCopy("state", make([]byte, 8<<10))
	if err != nil {
		b.Fatal(err)
	}
	defer state.Close()
	if err := st.WriteDevice(ctx, state); err != nil {
		b.Fatal(err)
	}
	m, err := st.Publish(ctx, benchManifest())
	if err != nil {
		b.Fatal(err)
	}
	return m
}

func BenchmarkPublish(b *testing.B) {
	for name, options := range benchStores() {
		b.Run(name, func(b *testing.B) {
			s := newStore(b, options...)
			ram := benchRAM(b)
			if err := memory.Seal(ram); err != nil { // zero pages stay: each round does the same work
				b.Fatal(err)
			}
			var m Manifest
			n := 0
			for b.Loop() {
				n++
				m = publishBench(b, s, fmt.Sprint("b", n), ram)
				b.StopTimer()
				if err := s.Remove(m.ID); err != nil {
					b.Fatal(err)
				}
				b.StartTimer()
			}
			b.SetBytes(m.Memory.DataBytes)
			b.ReportMetric(float64(m.Memory.DataBytes)/(1<<20), "data-MiB")
			b.ReportMetric(float64(m.Memory.PhysicalBytes)/(1<<20), "disk-MiB")
		})
	}
}

// BenchmarkWriteMemory is Publish without the disk's part.
func BenchmarkWriteMemory(b *testing.B) {
	for name, options := range benchStores() {
		b.Run(name, func(b *testing.B) {
			s := newStore(b, options...)
			ram := benchRAM(b)
			if err := memory.Seal(ram); err != nil {
				b.Fatal(err)
			}
			for b.Loop() {
				st, err := s.Stage("x")
				if err != nil {
					b.Fatal(err)
				}
				if err := st.WriteMemory(b.Context(), ram, nil); err != nil {
					b.Fatal(err)
				}
				b.StopTimer()
				st.Abort()
				b.StartTimer()
			}
		})
	}
}

func BenchmarkLoad(b *testing.B) {
	for name, options := range benchStores() {
		b.Run(name, func(b *testing.B) {
			s := newStore(b, options...)
			m := publishBench(b, s, "x", benchRAM(b))
			b.SetBytes(m.Memory.DataBytes)
			for b.Loop() {
				img, err := s.Load(b.Context(), "x")
				if err != nil {
					b.Fatal(err)
				}
				b.StopTimer()
				img.Close()
				b.StartTimer()
			}
		})
	}
}

func BenchmarkVerify(b *testing.B) {
	s := newStore(b)
	m := publishBench(b, s, "x", benchRAM(b))
	b.SetBytes(m.Memory.DataBytes)
	for b.Loop() {
		if err := s.Verify(b.Context(), "x"); err != nil {
			b.Fatal(err)
		}
	}
}

func BenchmarkTrim(b *testing.B) {
	for b.Loop() {
		b.StopTimer()
		ram := benchRAM(b)
		b.StartTimer()
		if _, err := memory.Trim(b.Context(), ram); err != nil {
			b.Fatal(err)
		}
		b.StopTimer()
		ram.Close()
		b.StartTimer()
	}
}

// BenchmarkGet and BenchmarkDevice are on the path of a cold fork.
func BenchmarkGet(b *testing.B) {
	s := newStore(b)
	publishBench(b, s, "x", benchRAM(b))
	for b.Loop() {
		if _, err := s.Get("x"); err != nil {
			b.Fatal(err)
		}
	}
}

func BenchmarkDevice(b *testing.B) {
	s := newStore(b)
	publishBench(b, s, "x", benchRAM(b))
	for b.Loop() {
		f, err := s.Device("x")
		if err != nil {
			b.Fatal(err)
		}
		f.Close()
	}
}
