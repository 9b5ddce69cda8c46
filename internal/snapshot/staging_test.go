package snapshot

import (
	"bytes"
	"context"
	"errors"
	"os"
	"strings"
	"sync"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/forkd/forkd/internal/memory"
)

func entries(t *testing.T, s *Store) []string {
	t.Helper()
	found, err := os.ReadDir(s.dir)
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, e := range found {
		names = append(names, e.Name())
	}
	return names
}

func TestStageRefusesIDs(t *testing.T) {
	s := newStore(t)
	for _, id := range []string{"", ".", "..", "a/b", "../a", "a b", "ä", ".staging-x", strings.Repeat("a", 65), "a\x00"} {
		if _, err := s.Stage(id); !errors.Is(err, ErrInvalid) {
			t.Errorf("Stage(%q): got %v, want %v", id, err, ErrInvalid)
		}
		if _, err := s.Get(id); !errors.Is(err, ErrNotFound) {
			t.Errorf("Get(%q): got %v, want %v", id, err, ErrNotFound)
		}
		if err := s.Remove(id); !errors.Is(err, ErrNotFound) {
			t.Errorf("Remove(%q): got %v, want %v", id, err, ErrNotFound)
		}
	}
	if got := entries(t, s); len(got) != 0 {
		t.Errorf("left over: %v", got)
	}
}

func TestPublishRefusesATakenID(t *testing.T) {
	t.Parallel()
	s := newStore(t)
	ram := newRAM(t, 1, memory.Extent{First: 0, N: 3})
	late, err := s.Stage("a") // staged before the other is published
	if err != nil {
		t.Fatal(err)
	}
	put(t, s, "a", "", ram, nil)
	if _, err := s.Stage("a"); !errors.Is(err, ErrExists) {
		t.Errorf("Stage: got %v, want %v", err, ErrExists)
	}
	if err := late.WriteMemory(t.Context(), ram, nil); err != nil {
		t.Fatal(err)
	}
	if err := late.WriteDevice(t.Context(), newRAM(t, 1)); err != nil {
		t.Fatal(err)
	}
	if _, err := late.Publish(t.Context(), testManifest()); !errors.Is(err, ErrExists) {
		t.Errorf("Publish: got %v, want %v", err, ErrExists)
	}
	if got := entries(t, s); len(got) != 1 {
		t.Errorf("got %v, want just a", got)
	}
	if err := s.Verify(t.Context(), "a"); err != nil {
		t.Error(err)
	}
}

func TestStagingMisuse(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	write := func(st *Staging, ram *os.File) error { return st.WriteMemory(ctx, ram, nil) }
	device := func(st *Staging, ram *os.File) error { return st.WriteDevice(ctx, ram) }
	publish := func(st *Staging, _ *os.File) error { _, err := st.Publish(ctx, testManifest()); return err }
	abort := func(st *Staging, _ *os.File) error { return st.Abort() }
	withParent := func(st *Staging, _ *os.File) error {
		m := testManifest()
		m.Parent = "base"
		_, err := st.Publish(ctx, m)
		return err
	}
	wrongShape := func(st *Staging, _ *os.File) error {
		m := testManifest()
		m.Shape.MemMiB++
		_, err := st.Publish(ctx, m)
		return err
	}
	beyond := func(st *Staging, ram *os.File) error {
		return st.WriteMemory(ctx, ram, []memory.Extent{{First: testMiB << 8, N: 1}})
	}
	layer := func(st *Staging, ram *os.File) error { return st.WriteMemory(ctx, ram, []memory.Extent{}) }
	type step = func(*Staging, *os.File) error
	for name, c := range map[string]struct {
		steps []step // all but the last succeed
		want  error
	}{
		"memory twice":              {[]step{write, write}, ErrInvalid},
		"device twice":              {[]step{device, device}, ErrInvalid},
		"publish nothing":           {[]step{publish}, ErrInvalid},
		"publish without device":    {[]step{write, publish}, ErrInvalid},
		"publish without memory":    {[]step{device, publish}, ErrInvalid},
		"layer without parent":      {[]step{layer, device, publish}, ErrInvalid},
		"whole memory with parent":  {[]step{write, device, withParent}, ErrInvalid},
		"shape of other size":       {[]step{write, device, wrongShape}, ErrInvalid},
		"extents beyond the memory": {[]step{beyond}, ErrInvalid},
		"write after abort":         {[]step{write, abort, device}, ErrFinished},
		"abort twice":               {[]step{write, abort, abort}, nil},
		"publish twice":             {[]step{write, device, publish, publish}, ErrFinished},
		"abort after publish":       {[]step{write, device, publish, abort}, nil},
		"device before memory":      {[]step{device, write, publish}, nil},
	} {
		t.Run(name, func(t *testing.T) {
			s := newStore(t)
			st, err := s.Stage("a")
			if err != nil {
				t.Fatal(err)
			}
			ram := newRAM(t, 1, memory.Extent{First: 0, N: 3})
			for i, step := range c.steps {
				err := step(st, ram)
				if i < len(c.steps)-1 && err != nil {
					t.Fatalf("step %d: %v", i, err)
				}
				if i == len(c.steps)-1 && !errors.Is(err, c.want) {
					t.Errorf("got %v, want %v", err, c.want)
				}
			}
			for _, name := range entries(t, s) {
				if name != "a" {
					t.Errorf("left over: %s", name)
				}
			}
		})
	}
}

func TestCancelled(t *testing.T) {
	s := newStore(t)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	st, err := s.Stage("a")
	if err != nil {
		t.Fatal(err)
	}
	if err := st.WriteMemory(ctx, newRAM(t, 1, memory.Extent{First: 0, N: 2048}), nil); !errors.Is(err, context.Canceled) {
		t.Errorf("WriteMemory: got %v, want %v", err, context.Canceled)
	}
	if got := entries(t, s); len(got) != 0 {
		t.Errorf("left over: %v", got)
	}
	put(t, s, "a", "", newRAM(t, 1, memory.Extent{First: 0, N: 2048}), nil)
	if _, err := s.Load(ctx, "a"); !errors.Is(err, context.Canceled) {
		t.Errorf("Load: got %v, want %v", err, context.Canceled)
	}
}

// TestOpenLeavesLiveStagingAlone opens the store a second time while a snapshot is being written.
func TestOpenLeavesLiveStagingAlone(t *testing.T) {
	s := newStore(t)
	st, err := s.Stage("a")
	if err != nil {
		t.Fatal(err)
	}
	for _, leftover := range []string{stagingPrefix + "dead", trashPrefix + "dead"} {
		if err := os.MkdirAll(s.Dir(leftover)+"/sub", 0o700); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := Open(s.dir); err != nil {
		t.Fatal(err)
	}
	if got := entries(t, s); len(got) != 1 {
		t.Errorf("got %v, want just the live staging", got)
	}
	if err := st.WriteMemory(t.Context(), newRAM(t, 1), nil); err != nil {
		t.Error(err)
	}
	if err := st.Abort(); err != nil {
		t.Error(err)
	}
}

// TestWriteMemoryGivesZeroPagesBack: resident memory shrinks, unless the memfd is sealed already.
func TestWriteMemoryGivesZeroPagesBack(t *testing.T) {
	for name, seal := range map[string]bool{"open": false, "sealed": true} {
		t.Run(name, func(t *testing.T) {
			s := newStore(t)
			ram := newRAM(t, 1, memory.Extent{First: 0, N: 500})
			if _, err := ram.WriteAt(make([]byte, 400*memory.PageSize), 50*memory.PageSize); err != nil {
				t.Fatal(err)
			}
			want := int64(100)
			if seal {
				want = 500
				if err := memory.Seal(ram); err != nil {
					t.Fatal(err)
				}
			}
			put(t, s, "a", "", ram, nil)
			var st unix.Stat_t
			if err := unix.Fstat(int(ram.Fd()), &st); err != nil {
				t.Fatal(err)
			}
			if got := st.Blocks * 512 / memory.PageSize; got != want {
				t.Errorf("got %d pages resident, want %d", got, want)
			}
		})
	}
}

// TestWriteImage stores a resident image with layers as one self-contained snapshot.
func TestWriteImage(t *testing.T) {
	s := newStore(t)
	put(t, s, "base", "", newRAM(t, 1, memory.Extent{First: 0, N: 700}), nil)
	changed := []memory.Extent{{First: 3, N: 4}, {First: 1000, N: 2}}
	put(t, s, "tip", "base", newRAM(t, 2, changed[1]), changed) // pages 3 to 6 were zeroed
	img, err := s.Load(t.Context(), "tip")
	if err != nil {
		t.Fatal(err)
	}
	defer img.Close()
	st, err := s.Stage("flat")
	if err != nil {
		t.Fatal(err)
	}
	defer st.Abort()
	if err := st.WriteImage(t.Context(), img); err != nil {
		t.Fatal(err)
	}
	if err := st.WriteDevice(t.Context(), newRAM(t, 1)); err != nil {
		t.Fatal(err)
	}
	m, err := st.Publish(t.Context(), testManifest())
	if err != nil {
		t.Fatal(err)
	}
	if got, want := m.Memory.DataBytes, int64((700-4+2)*memory.PageSize); got != want {
		t.Errorf("got %d bytes of data, want %d", got, want)
	}
	flat, err := s.Load(t.Context(), "flat")
	if err != nil {
		t.Fatal(err)
	}
	defer flat.Close()
	if !bytes.Equal(content(t, flat), content(t, img)) {
		t.Error("memory differs")
	}
}

// TestConcurrentPublish lets many stage at once, some under the same id: names never collide, and one of each id wins.
func TestConcurrentPublish(t *testing.T) {
	t.Parallel()
	s := newStore(t)
	ram := newRAM(t, 1, memory.Extent{First: 0, N: 400})
	if err := memory.Seal(ram); err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	for i := range 12 {
		wg.Go(func() {
			if _, err := tryPut(s, string(rune('a'+i%4)), "", ram, nil); err != nil && !errors.Is(err, ErrExists) {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	if got := strings.Join(entries(t, s), ""); got != "abcd" {
		t.Errorf("got %v, want a to d", got)
	}
	for _, id := range entries(t, s) {
		if err := s.Verify(t.Context(), id); err != nil {
			t.Error(err)
		}
	}
}

func TestDevice(t *testing.T) {
	s := newStore(t)
	put(t, s, "a", "", newRAM(t, 1), nil)
	f, err := s.Device("a")
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	var got bytes.Buffer
	if _, err := got.ReadFrom(f); err != nil || got.String() != "device state of a" {
		t.Errorf("got %q, %v", got.String(), err)
	}
	if !memory.Sealed(f) {
		t.Error("not sealed")
	}
}
