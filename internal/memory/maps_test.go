package memory

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"golang.org/x/sys/unix"
)

const someMaps = `55d0a0000000-55d0a0001000 r-xp 00000000 fe:00 1234 /usr/bin/qemu-system-x86_64
7f0000000000-7f0000002000 rw-p 00004000 00:01 99 /memfd:forkd-base (deleted)
7f0000100000-7f0000104000 rw-p 00000000 00:01 99 /memfd:forkd-base (deleted)
7f0000104000-7f0000105000 rw-p 00006000 00:01 100 /memfd:forkd-layer (deleted)
7f0000105000-7f0000106000 rw-p 00007000 00:01 99 /memfd:forkd-base (deleted)
7f0000200000-7f0000201000 rw-p 00000000 00:01 77 /memfd:other (deleted)
7ffc00000000-7ffc00021000 rw-p 00000000 00:00 0 [stack]
`

func TestGuestMap(t *testing.T) {
	baseFile, layerFile := inode{0, 1, 99}, inode{0, 1, 100}
	found, err := parseMaps(strings.NewReader(someMaps), map[inode]bool{baseFile: true, layerFile: true})
	if err != nil {
		t.Fatal(err)
	}
	g, err := newGuestMap(found, 8)
	if err != nil {
		t.Fatal(err)
	}
	want := &guestMap{
		mappings: []Mapping{
			{Extent{0, 4}, 0x7f0000100000, baseFile},
			{Extent{4, 2}, 0x7f0000000000, baseFile},
			{Extent{6, 1}, 0x7f0000104000, layerFile},
			{Extent{7, 1}, 0x7f0000105000, baseFile},
		},
		runs: []Mapping{
			{Extent{0, 4}, 0x7f0000100000, baseFile},
			{Extent{4, 2}, 0x7f0000000000, baseFile},
			{Extent{6, 2}, 0x7f0000104000, layerFile},
		},
		byAddr: []Mapping{
			{Extent{4, 2}, 0x7f0000000000, baseFile},
			{Extent{0, 4}, 0x7f0000100000, baseFile},
			{Extent{6, 2}, 0x7f0000104000, layerFile},
		},
	}
	if diff := cmp.Diff(want, g, cmp.AllowUnexported(guestMap{}, Mapping{}, inode{})); diff != "" {
		t.Errorf("guest map (-want +got):\n%s", diff)
	}
	for addr, want := range map[uint64]int64{
		0x7f0000000fff: 4, 0x7f0000001000: 5, 0x7f0000002000: -1, 0x7f0000100000: 0, 0x7f0000104123: 6, 0x7f0000105fff: 7,
		0x7f0000106000: -1, 0x7effffffffff: -1, 0: -1, ^uint64(0): -1,
	} {
		page, ok := g.page(addr)
		if ok != (want >= 0) || ok && page != uint64(want) {
			t.Errorf("page(%#x) = %d, %t, want %d", addr, page, ok, want)
		}
	}
}

func TestWithin(t *testing.T) {
	parts := []Mapping{{Extent: Extent{0, 4}}, {Extent: Extent{4, 2}}, {Extent: Extent{6, 2}}}
	tests := map[Extent][]Extent{
		{0, 8}: {{0, 4}, {4, 2}, {6, 2}},
		{1, 2}: {{1, 2}},
		{3, 2}: {{3, 1}, {4, 1}},
		{5, 9}: {{5, 1}, {6, 2}},
		{2, 0}: nil,
		{8, 1}: nil,
	}
	for e, want := range tests {
		var got []Extent
		within(parts, e, func(m Mapping, part Extent) error {
			if part.First < m.First || part.End() > m.End() {
				t.Errorf("within(%v): part %v is not in %v", e, part, m)
			}
			got = append(got, part)
			return nil
		})
		if diff := cmp.Diff(want, got, cmpopts.EquateEmpty()); diff != "" {
			t.Errorf("within(%v) (-want +got):\n%s", e, diff)
		}
	}
}

func TestGuestMapRefuses(t *testing.T) {
	tests := map[string]struct {
		mappings []Mapping
		want     string
	}{
		"nothing":      {nil, "0 of 8 pages are mapped"},
		"hole":         {[]Mapping{{Extent: Extent{0, 4}}, {Extent: Extent{5, 3}}}, "page 5 is mapped where page 4 was expected"},
		"mapped twice": {[]Mapping{{Extent: Extent{0, 8}}, {Extent: Extent{2, 1}}}, "page 2 is mapped where page 8"},
		"cut off":      {[]Mapping{{Extent: Extent{0, 7}}}, "7 of 8 pages"},
		"too long":     {[]Mapping{{Extent: Extent{0, 9}}}, "9 of 8 pages"},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			if _, err := newGuestMap(tt.mappings, 8); err == nil || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("got error %v, want %q", err, tt.want)
			}
		})
	}
}

// A process that is ending has lost its memory before its end can be seen.
func TestParseMapsOfTheDying(t *testing.T) {
	if _, err := parseMaps(strings.NewReader(""), nil); !errors.Is(err, unix.ESRCH) {
		t.Errorf("no mappings at all: %v, want %v", err, unix.ESRCH)
	}
}

func TestParseMapsRefusesShared(t *testing.T) {
	shared := strings.Replace(someMaps, "rw-p", "rw-s", 1)
	_, err := parseMaps(strings.NewReader(shared), map[inode]bool{{0, 1, 99}: true})
	if err == nil || !strings.Contains(err.Error(), "is shared") {
		t.Errorf("a parent's mapping: error %v, want one that says it is shared", err)
	}
}

func FuzzParseMaps(f *testing.F) {
	f.Add(someMaps)
	f.Add("0-0 rw-p 0 00:01 99\n")
	f.Fuzz(func(_ *testing.T, maps string) {
		found, err := parseMaps(strings.NewReader(maps), map[inode]bool{{0, 1, 99}: true})
		if err == nil {
			newGuestMap(found, 8)
		}
	})
}

// A daemon that starts again must find the memory that a child was started from in the child itself, and be able to go on with
// it.
func TestMappedImage(t *testing.T) {
	needRoot(t)
	rnd := rand.New(rand.NewPCG(11, 12))
	for depth := range uint64(4) {
		t.Run(fmt.Sprint("depth ", depth), func(t *testing.T) {
			img := base(t, testPages, testWritten)
			for i := range depth {
				next, err := img.Derive(randomLayer(t, rnd, i, 40, testPages))
				if err != nil {
					t.Fatal(err)
				}
				defer next.Close()
				img = next
			}
			g := startGuest(t, img, guestConfig{Writers: areas(1, testWritten)})
			again, err := MappedImage(g.process, img.Bytes())
			if err != nil {
				t.Fatal(err)
			}
			defer again.Close()
			if !bytes.Equal(readImage(t, again), readImage(t, img)) {
				t.Error("the image found in the child has other bytes than the one it was started from")
			}
			if got, want := again.Mappings(), img.Mappings(); got != want {
				t.Errorf("the image found in the child has %d mappings, want %d", got, want)
			}
			g.image = again
			g.do("start")
			g.advances(testWritten)
			c, branch := g.capture(CaptureOptions{Mode: ModeLive})
			if c.Pages != testWritten || !bytes.Equal(readImage(t, branch)[:8], binary.LittleEndian.AppendUint64(nil, firstWord(g.at[0]))) {
				t.Errorf("a layer of %d pages over it, want %d", c.Pages, testWritten)
			}
		})
	}
	ours := startTicksOf(t)
	if _, err := MappedImage(processHere(ours), 12345*PageSize); err == nil {
		t.Error("an image was found in a process that is no monitor")
	}
}

// firstWord is the first word of a writer's area.
func firstWord(w writerState) uint64 {
	if w.Pos == 0 {
		return w.Round - 1
	}
	return w.Round
}

func startTicksOf(t *testing.T) uint64 {
	t.Helper()
	ticks, err := startTicks(os.Getpid())
	if err != nil {
		t.Fatal(err)
	}
	return ticks
}
