package memory

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// randomLayer is a layer of so many runs of one to eight pages, which say which layer and page they are.
func randomLayer(t testing.TB, rnd *rand.Rand, number, runs, pages uint64) Layer {
	t.Helper()
	f, err := New(fmt.Sprint("layer", number), int64(pages)*PageSize)
	if err != nil {
		t.Fatal(err)
	}
	var extents []Extent
	for range runs {
		n := 1 + rnd.Uint64N(8)
		extents = append(extents, Extent{rnd.Uint64N(pages - n), n})
	}
	extents = Normalize(extents)
	page := make([]byte, PageSize)
	for _, e := range extents {
		for p := e.First; p < e.End(); p++ {
			if p%5 == 0 {
				continue // a zero page of the layer
			}
			fillPattern(page, p+number<<32)
			if _, err := f.WriteAt(page, int64(p)*PageSize); err != nil {
				t.Fatal(err)
			}
		}
	}
	if err := Seal(f); err != nil {
		t.Fatal(err)
	}
	return Layer{f, extents}
}

// readGuest reads all of a guest's memory as it sees it.
func readGuest(t *testing.T, g *guest) []byte {
	t.Helper()
	p := pin(t, g.process)
	m, err := readGuestMap(p, g.image)
	if err != nil {
		t.Fatal(err)
	}
	out := make([]byte, g.image.Bytes())
	for _, run := range m.runs {
		local := unix.Iovec{Base: &out[run.Offset()]}
		local.SetLen(int(run.Bytes()))
		remote := []unix.RemoteIovec{{Base: uintptr(run.Addr), Len: int(run.Bytes())}}
		if err := readProcess(p, []unix.Iovec{local}, remote); err != nil {
			t.Fatal(err)
		}
	}
	return out
}

func readImage(t *testing.T, img *Image) []byte {
	t.Helper()
	out := make([]byte, img.Bytes())
	if _, err := img.ReadAt(out, 0); err != nil && err != io.EOF {
		t.Fatal(err)
	}
	return out
}

// A monitor must see an image of any depth as the image says, page for page.
func TestOverlay(t *testing.T) {
	needRoot(t)
	const pages = 2048
	for _, split := range []bool{false, true} {
		rnd := rand.New(rand.NewPCG(3, 4))
		img := base(t, pages, 100)
		for depth := range uint64(9) {
			t.Run(fmt.Sprintf("split=%t/depth=%d", split, depth), func(t *testing.T) {
				g := startGuest(t, img, guestConfig{Split: split})
				if !bytes.Equal(readGuest(t, g), readImage(t, img)) {
					t.Error("the guest sees other bytes than its image has")
				}
				g.sane()
			})
			next, err := img.Derive(randomLayer(t, rnd, depth, 40, pages))
			if err != nil {
				t.Fatal(err)
			}
			defer next.Close()
			img = next
		}
	}
}

// A layer may have been sent to the monitor while it ran, so that its number is another one.
func TestOverlayOfOtherNumbers(t *testing.T) {
	needRoot(t)
	rnd := rand.New(rand.NewPCG(5, 6))
	img, err := base(t, 256, 0).Derive(randomLayer(t, rnd, 0, 5, 256), randomLayer(t, rnd, 1, 5, 256))
	if err != nil {
		t.Fatal(err)
	}
	defer img.Close()
	g := launchGuest(t, img, guestConfig{})
	fds := g.process.LayerFDs
	g.process.LayerFDs = nil
	if err := Overlay(t.Context(), g.process, img, fds); err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(readGuest(t, g), readImage(t, img)) {
		t.Error("the guest sees other bytes than its image has")
	}
}

func TestOverlayRefuses(t *testing.T) {
	needRoot(t)
	rnd := rand.New(rand.NewPCG(7, 8))
	img, err := base(t, 256, 0).Derive(randomLayer(t, rnd, 0, 5, 256), randomLayer(t, rnd, 1, 5, 256))
	if err != nil {
		t.Fatal(err)
	}
	defer img.Close()
	tests := map[string]struct {
		fds  func(right []int) []int
		want string
	}{
		"too few":   {func(r []int) []int { return r[:1] }, "holds 1 layers, the image has 2"},
		"too many":  {func(r []int) []int { return append(slices.Clone(r), 9) }, "holds 3 layers"},
		"swapped":   {func(r []int) []int { return []int{r[1], r[0]} }, "is not layer 0"},
		"not open":  {func(r []int) []int { return []int{r[0], 999} }, "descriptor 999"},
		"the base":  {func(r []int) []int { return []int{r[0], guestMemoryFD} }, "is not layer 1"},
		"no memory": {func(r []int) []int { return []int{r[0], guestControlFD} }, "is not layer 1"},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			g := launchGuest(t, img, guestConfig{})
			err := Overlay(t.Context(), g.process, img, tt.fds(g.process.LayerFDs))
			if err == nil || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("got error %v, want %q", err, tt.want)
			}
			g.sane()
		})
	}
}

func TestOverlayRefusesTooMany(t *testing.T) {
	const pages = 3 * MaxOverlay
	f, err := New("layer", pages*PageSize)
	if err != nil {
		t.Fatal(err)
	}
	if err := Seal(f); err != nil {
		t.Fatal(err)
	}
	var extents []Extent
	for i := range uint64(MaxOverlay + 1) {
		extents = append(extents, Extent{2 * i, 1})
	}
	img, err := base(t, pages, pages).Derive(Layer{f, extents})
	if err != nil {
		t.Fatal(err)
	}
	defer img.Close()
	ticks, err := startTicks(os.Getpid())
	if err != nil {
		t.Fatal(err)
	}
	id := processHere(ticks)
	if err := Overlay(context.Background(), id, img, nil); !errors.Is(err, ErrTooManyExtents) {
		t.Errorf("got error %v, want %v", err, ErrTooManyExtents)
	}
}

// BenchmarkOverlay maps a layer of a number of extents into a fresh monitor.
func BenchmarkOverlay(b *testing.B) {
	needRoot(b)
	for _, extents := range []uint64{2, 100, 324, 2000} {
		b.Run(fmt.Sprint(extents), func(b *testing.B) {
			rnd := rand.New(rand.NewPCG(9, 10))
			const pages = 256 << 20 / PageSize
			img, err := base(b, pages, pages).Derive(randomLayer(b, rnd, 0, extents, pages))
			if err != nil {
				b.Fatal(err)
			}
			defer img.Close()
			for b.Loop() {
				b.StopTimer()
				g := launchGuest(b, img, guestConfig{})
				b.StartTimer()
				if err := Overlay(b.Context(), g.process, img, nil); err != nil {
					b.Fatal(err)
				}
				b.StopTimer()
				g.kill()
				b.StartTimer()
			}
		})
	}
}
