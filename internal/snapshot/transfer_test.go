package snapshot

import (
	"bytes"
	"errors"
	"io"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/forkd/forkd/internal/memory"
)

// TestTransfer copies a chain between stores that keep memory differently: what a Reader gives is the same everywhere.
func TestTransfer(t *testing.T) {
	stores := map[string]*Store{"plain": newStore(t), "compressed": newStore(t, WithCompression()), "plain again": newStore(t)}
	ram := newRAM(t, 1, memory.Extent{First: 0, N: 700})
	if _, err := ram.WriteAt(bytes.Repeat([]byte("text "), 2<<20/5), 4<<20); err != nil {
		t.Fatal(err)
	}
	put(t, stores["plain"], "base", "", ram, nil)
	put(t, stores["plain"], "tip", "base", newRAM(t, 2, memory.Extent{First: 3, N: 7}), []memory.Extent{{First: 0, N: 20}})
	for _, step := range [][2]string{{"plain", "compressed"}, {"compressed", "plain again"}} {
		from, to := stores[step[0]], stores[step[1]]
		for _, id := range []string{"base", "tip"} {
			r, err := from.Read(id)
			if err != nil {
				t.Fatal(err)
			}
			m := transfer(t, r, to)
			if diff := cmp.Diff(r.Manifest, m.Portable()); diff != "" {
				t.Errorf("%s (-read +stored):\n%s", id, diff)
			}
			r.Close()
		}
		if err := to.Verify(t.Context(), "tip"); err != nil {
			t.Error(err)
		}
	}
	first, err := restore(t, stores["plain"], "tip")
	if err != nil {
		t.Fatal(err)
	}
	last, err := restore(t, stores["plain again"], "tip")
	if err != nil || !bytes.Equal(first, last) {
		t.Errorf("memory differs (%v)", err)
	}
	if _, physical, _ := stores["compressed"].Sizes("base"); physical > 5<<20 {
		t.Errorf("got %d bytes on disk, want less: half is text", physical)
	}
}

func transfer(t *testing.T, r *Reader, to *Store) Manifest {
	t.Helper()
	var pages bytes.Buffer
	if err := r.WriteMemory(t.Context(), &pages); err != nil {
		t.Fatal(err)
	}
	st, err := to.Stage(r.Manifest.ID)
	if err != nil {
		t.Fatal(err)
	}
	defer st.Abort()
	behind := strings.NewReader("the next member")
	if err := st.ReadMemory(t.Context(), r.Manifest, r.Index, io.MultiReader(&pages, behind)); err != nil {
		t.Fatal(err)
	}
	if behind.Len() != 15 {
		t.Error("read behind the pages")
	}
	if err := st.ReadDevice(t.Context(), r.Manifest, bytes.NewReader(r.Device)); err != nil {
		t.Fatal(err)
	}
	m, err := st.Publish(t.Context(), r.Manifest)
	if err != nil {
		t.Fatal(err)
	}
	return m
}

func TestTransferRefuses(t *testing.T) {
	from := newStore(t)
	put(t, from, "base", "", newRAM(t, 1, memory.Extent{First: 0, N: 700}), nil)
	r, err := from.Read("base")
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	var pages bytes.Buffer
	if err := r.WriteMemory(t.Context(), &pages); err != nil {
		t.Fatal(err)
	}
	flip := func(b []byte, at int) []byte { b = bytes.Clone(b); b[at] ^= 1; return b }
	type stage = func(*Staging) error
	readMemory := func(m Manifest, index, pages []byte) stage {
		return func(st *Staging) error { return st.ReadMemory(t.Context(), m, index, bytes.NewReader(pages)) }
	}
	asLayer := r.Manifest
	asLayer.Parent = "other"
	lessData := r.Manifest
	lessData.Memory.DataBytes -= memory.PageSize
	for name, c := range map[string]struct {
		do   stage
		want error
	}{
		"index flipped": {readMemory(r.Manifest, flip(r.Index, 60), pages.Bytes()), ErrCorrupt},
		"index cut":     {readMemory(r.Manifest, r.Index[:40], pages.Bytes()), ErrCorrupt},
		"base as layer": {readMemory(asLayer, r.Index, pages.Bytes()), ErrCorrupt},
		"other size":    {readMemory(lessData, r.Index, pages.Bytes()), ErrCorrupt},
		"page flipped":  {readMemory(r.Manifest, r.Index, flip(pages.Bytes(), 1<<20+9)), ErrCorrupt},
		"pages cut":     {readMemory(r.Manifest, r.Index, pages.Bytes()[:1<<20+9]), io.ErrUnexpectedEOF},
		"no pages":      {readMemory(r.Manifest, r.Index, nil), io.EOF},
		"device flipped": {func(st *Staging) error {
			return st.ReadDevice(t.Context(), r.Manifest, bytes.NewReader(flip(r.Device, 0)))
		}, ErrCorrupt},
		"device cut": {func(st *Staging) error { return st.ReadDevice(t.Context(), r.Manifest, bytes.NewReader(r.Device[1:])) }, ErrCorrupt},
		"device too long": {func(st *Staging) error {
			return st.ReadDevice(t.Context(), r.Manifest, bytes.NewReader(append(r.Device, 0)))
		}, ErrCorrupt},
		"commit unprepared": {func(st *Staging) error { return st.Commit() }, ErrInvalid},
	} {
		t.Run(name, func(t *testing.T) {
			to := newStore(t)
			st, err := to.Stage("base")
			if err != nil {
				t.Fatal(err)
			}
			if err := c.do(st); !errors.Is(err, c.want) {
				t.Errorf("got %v, want %v", err, c.want)
			}
			if got := entries(t, to); len(got) != 0 {
				t.Errorf("left over: %v", got)
			}
		})
	}
}
