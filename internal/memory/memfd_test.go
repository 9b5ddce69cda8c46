package memory

import (
	"bytes"
	"errors"
	"io"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"
)

func TestNewRefusesSizes(t *testing.T) {
	for _, size := range []int64{-4096, 0, 1, 4095, 4097} {
		if f, err := New("x", size); err == nil {
			f.Close()
			t.Errorf("New with %d bytes: got no error", size)
		}
	}
}

func TestSeal(t *testing.T) {
	f := newRAM(t, 4, 1, Extent{1, 1})
	if Sealed(f) {
		t.Error("a fresh memfd is sealed")
	}
	sealed(t, f)
	if !Sealed(f) {
		t.Error("not sealed")
	}
	if _, err := f.WriteAt([]byte("x"), 0); !errors.Is(err, unix.EPERM) {
		t.Errorf("write to a sealed memfd: got %v, want EPERM", err)
	}
	if err := f.Truncate(0); !errors.Is(err, unix.EPERM) {
		t.Errorf("truncate a sealed memfd: got %v, want EPERM", err)
	}
	if err := Punch(f, []Extent{{1, 1}}); !errors.Is(err, unix.EPERM) {
		t.Errorf("punch a sealed memfd: got %v, want EPERM", err)
	}
}

func TestSealRefusesWhileMappedShared(t *testing.T) {
	f := newRAM(t, 4, 1)
	b, err := unix.Mmap(int(f.Fd()), 0, PageSize, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		t.Fatal(err)
	}
	if err := Seal(f); !errors.Is(err, unix.EBUSY) {
		t.Errorf("got %v, want EBUSY", err)
	}
	if err := unix.Munmap(b); err != nil {
		t.Fatal(err)
	}
	sealed(t, f)
}

func TestSealedCopy(t *testing.T) {
	for _, want := range [][]byte{nil, []byte("8 KiB of device state, or less"), bytes.Repeat([]byte{7}, 3*PageSize+1)} {
		f, err := SealedCopy("state", want)
		if err != nil {
			t.Fatal(err)
		}
		got, err := io.ReadAll(f) // from the offset a reader finds
		if err != nil || !bytes.Equal(got, want) {
			t.Errorf("got %d bytes (%v), want %d", len(got), err, len(want))
		}
		if !Sealed(f) {
			t.Error("not sealed")
		}
		f.Close()
	}
}

func TestDataExtentsAndTrim(t *testing.T) {
	const pages = 1000
	f := newRAM(t, pages, 1, Extent{0, 2}, Extent{300, 400}, Extent{999, 1})
	want := []Extent{{0, 2}, {300, 400}, {999, 1}}
	zeroed := []Extent{{1, 1}, {310, 290}, {999, 1}}
	for _, e := range zeroed {
		if _, err := f.WriteAt(make([]byte, e.Bytes()), e.Offset()); err != nil {
			t.Fatal(err)
		}
	}
	got, err := DataExtents(f)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("before Trim (-want +got):\n%s", diff)
	}
	before := readAll(t, f, pages*PageSize)
	trimmed, err := Trim(t.Context(), f)
	if err != nil {
		t.Fatal(err)
	}
	if want := int64(Pages(zeroed) * PageSize); trimmed != want {
		t.Errorf("got %d bytes trimmed, want %d", trimmed, want)
	}
	got, err = DataExtents(f)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(Subtract(want, zeroed), got); diff != "" {
		t.Errorf("after Trim (-want +got):\n%s", diff)
	}
	if got, want := residentBytes(f), int64(Pages(got)*PageSize); got != want {
		t.Errorf("got %d bytes resident, want %d", got, want)
	}
	if !bytes.Equal(readAll(t, f, pages*PageSize), before) {
		t.Error("Trim changed the content")
	}
}

func TestDataExtentsOfEmpty(t *testing.T) {
	got, err := DataExtents(newRAM(t, 10, 1))
	if err != nil || got != nil {
		t.Errorf("got %v, %v; want none", got, err)
	}
}

func TestIsZeroPage(t *testing.T) {
	for off := range PageSize {
		page := make([]byte, PageSize)
		if !IsZeroPage(page) {
			t.Fatal("zeros are not zero")
		}
		page[off] = 1
		if IsZeroPage(page) {
			t.Fatalf("a page with a one at %d is zero", off)
		}
	}
}
