package snapshot

import (
	"bytes"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/forkd/forkd/internal/memory"
	"github.com/forkd/forkd/internal/vmm"
)

// node is a snapshot of the model.
type node struct {
	id, parent string
	memory     []byte
}

// grow publishes a random layer over parent: some pages new, some zeroed, some the same as before.
func grow(t *testing.T, s *Store, rnd *rand.Rand, parent node, id string) node {
	t.Helper()
	child := node{id, parent.id, bytes.Clone(parent.memory)}
	ram, err := memory.New("layer", testMiB<<20)
	if err != nil {
		t.Fatal(err)
	}
	defer ram.Close()
	extents := []memory.Extent{}
	for range rnd.IntN(12) {
		first := rnd.Uint64N(testMiB << 8)
		e := memory.Extent{First: first, N: 1 + rnd.Uint64N(min(testMiB<<8-first, 40))}
		extents = append(extents, e)
		fill := child.memory[e.Offset() : e.Offset()+e.Bytes()]
		switch rnd.IntN(3) {
		case 0:
			clear(fill)
		case 1:
			for i := range fill {
				fill[i] = byte(rnd.Uint32())
			}
		}
	}
	for _, e := range extents {
		if _, err := ram.WriteAt(child.memory[e.Offset():e.Offset()+e.Bytes()], e.Offset()); err != nil {
			t.Fatal(err)
		}
	}
	put(t, s, id, parent.id, ram, extents)
	return child
}

// TestChains grows random trees to depth 10 and compares the memory of every snapshot, loaded alone, through a cache, and compacted, with
// a model.
func TestChains(t *testing.T) {
	t.Parallel()
	for name, options := range map[string][]Option{"plain": nil, "compressed": {WithCompression()}} {
		t.Run(name, func(t *testing.T) {
			s := newStore(t, options...)
			rnd := rand.New(rand.NewPCG(7, 8))
			ram := newRAM(t, 1, memory.Extent{First: 0, N: 1000}, memory.Extent{First: 1500, N: 10})
			root := node{"n0", "", make([]byte, testMiB<<20)}
			if _, err := ram.ReadAt(root.memory, 0); err != nil {
				t.Fatal(err)
			}
			put(t, s, root.id, "", ram, nil)
			nodes := []node{root}
			for i := range 14 {
				parent := nodes[len(nodes)-1]
				if i >= 10 {
					parent = nodes[rnd.IntN(len(nodes))]
				}
				nodes = append(nodes, grow(t, s, rnd, parent, fmt.Sprint("n", i+1)))
			}
			cache := memory.NewCache(1 << 30)
			defer cache.Close()
			for _, n := range nodes {
				checkNode(t, s, cache, n)
			}
			if got := cache.Stats(); got.Bytes > 3*1010*memory.PageSize+14*12*40*memory.PageSize*17/16 {
				t.Errorf("got %+v: the base is held more than once", got)
			}
		})
	}
}

func checkNode(t *testing.T, s *Store, cache *memory.Cache, n node) {
	t.Helper()
	alone, err := s.Load(t.Context(), n.id)
	if err != nil {
		t.Fatal(err)
	}
	defer alone.Close()
	ref, err := s.Acquire(t.Context(), cache, n.id)
	if err != nil {
		t.Fatal(err)
	}
	defer ref.Release()
	if _, err := s.Compact(t.Context(), n.id, "c-"+n.id); err != nil {
		t.Fatal(err)
	}
	compacted, err := s.Load(t.Context(), "c-"+n.id)
	if err != nil {
		t.Fatal(err)
	}
	defer compacted.Close()
	if len(compacted.Layers()) != 0 {
		t.Errorf("%s: compacted, and yet has layers", n.id)
	}
	for how, img := range map[string]*memory.Image{"loaded": alone, "acquired": ref.Image(), "compacted": compacted} {
		if !bytes.Equal(content(t, img), n.memory) {
			t.Errorf("%s, %s: memory differs from the model", n.id, how)
		}
	}
}

// TestAcquireSharesTheFamily loads two branches of one base and looks for its inode.
func TestAcquireSharesTheFamily(t *testing.T) {
	s := newStore(t)
	put(t, s, "base", "", newRAM(t, 1, memory.Extent{First: 0, N: 1000}), nil)
	one := []memory.Extent{{First: 7, N: 3}}
	put(t, s, "left", "base", newRAM(t, 2, one...), one)
	put(t, s, "right", "base", newRAM(t, 3, one...), one)
	put(t, s, "tip", "left", newRAM(t, 4, one...), one)
	cache := memory.NewCache(1 << 30)
	defer cache.Close()
	bases := map[*os.File]bool{}
	for _, id := range []string{"tip", "right", "left", "base"} {
		ref, err := s.Acquire(t.Context(), cache, id)
		if err != nil {
			t.Fatal(err)
		}
		defer ref.Release()
		bases[ref.Image().Base()] = true
	}
	if len(bases) != 1 {
		t.Errorf("got %d bases, want 1", len(bases))
	}
	if got, want := cache.Stats(), (memory.Stats{Images: 4, Refs: 4, Bytes: 1009 * memory.PageSize, Budget: 1 << 30, Hits: 3, Loads: 4}); got != want {
		t.Errorf("got %+v, want %+v", got, want)
	}
}

// TestLayerCostsWhatChanged: disk is proportional to the changed pages, however they are spread.
func TestLayerCostsWhatChanged(t *testing.T) {
	s := newStore(t)
	put(t, s, "base", "", newRAM(t, 1, memory.Extent{First: 0, N: 2048}), nil)
	var scattered []memory.Extent
	for first := uint64(0); first < 2048; first += 16 {
		scattered = append(scattered, memory.Extent{First: first, N: 1})
	}
	m := put(t, s, "tip", "base", newRAM(t, 2, scattered...), scattered)
	logical, physical, err := s.Sizes("tip")
	if err != nil {
		t.Fatal(err)
	}
	if want := int64(128 * memory.PageSize); m.Memory.DataBytes != want || physical > want+32<<10 || logical != testMiB<<20 {
		t.Errorf("got %d bytes of data, %d on disk, %d of memory; want %d, about as many, all", m.Memory.DataBytes, physical, logical, want)
	}
}

func TestChainAndChildren(t *testing.T) {
	s := newStore(t)
	some := []memory.Extent{{First: 1, N: 1}}
	put(t, s, "a", "", newRAM(t, 1), nil)
	put(t, s, "b", "a", newRAM(t, 1), some)
	put(t, s, "c", "b", newRAM(t, 1), []memory.Extent{}) // nothing changed
	put(t, s, "d", "a", newRAM(t, 1), some)
	chain, err := s.Chain("c")
	if err != nil {
		t.Fatal(err)
	}
	var ids []string
	for _, m := range chain {
		ids = append(ids, m.ID)
	}
	if diff := cmp.Diff([]string{"a", "b", "c"}, ids); diff != "" {
		t.Errorf("chain (-want +got):\n%s", diff)
	}
	children, err := s.Children("a")
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff([]string{"b", "d"}, children); diff != "" {
		t.Errorf("children (-want +got):\n%s", diff)
	}
	if err := s.Remove("b"); err != nil {
		t.Fatal(err)
	}
	if _, err := s.Chain("c"); !errors.Is(err, ErrCorrupt) || !strings.Contains(err.Error(), "c rests on b, which is missing") {
		t.Errorf("chain with a missing parent: got %v", err)
	}
	if _, err := s.Chain("b"); !errors.Is(err, ErrNotFound) {
		t.Errorf("chain of a removed snapshot: got %v, want %v", err, ErrNotFound)
	}
}

func TestCompat(t *testing.T) {
	m := testManifest()
	m.ID, m.Engine.CPUFeatures = "s1", "avx avx2 sse2"
	m.Engine.CPUVendor, m.Engine.CPUFamily = "AuthenticAMD", "25"
	for name, c := range map[string]struct {
		change func(*vmm.Info)
		want   []string // in the error; none: compatible
	}{
		"the same":         {func(*vmm.Info) {}, nil},
		"another path":     {func(i *vmm.Info) { i.Binary = "/opt/qemu" }, nil},
		"other features":   {func(i *vmm.Info) { i.Features.Live = true }, nil},
		"rate nearly same": {func(i *vmm.Info) { i.TSCkHz += i.TSCkHz / 1001 }, nil},
		"engine":           {func(i *vmm.Info) { i.Engine = "firecracker" }, []string{"engine", `"qemu"`, `"firecracker"`, "run the daemon with"}},
		"version":          {func(i *vmm.Info) { i.Version = "10.0.0" }, []string{"engine version", `"7.2.22"`, `"10.0.0"`, "install version 7.2.22"}},
		"accelerator":      {func(i *vmm.Info) { i.Accel = "kvm" }, []string{"accelerator", `"tcg"`, `"kvm"`}},
		"machine type":     {func(i *vmm.Info) { i.Machine = "q35" }, []string{"machine type", `"microvm"`, `"q35"`}},
		"CPU":              {func(i *vmm.Info) { i.CPU = "host" }, []string{"CPU", `"max"`, `"host"`}},
		"CPU vendor":       {func(i *vmm.Info) { i.CPUVendor = "GenuineIntel" }, []string{"CPU vendor", `"AuthenticAMD"`, `"GenuineIntel"`, "forkd snapshot rebuild"}},
		"CPU family":       {func(i *vmm.Info) { i.CPUFamily = "26" }, []string{"CPU family", `"25"`, `"26"`}},
		"more of a CPU":    {func(i *vmm.Info) { i.CPUFeatures = "avx avx2 avx512f sse2" }, nil},
		"less of a CPU":    {func(i *vmm.Info) { i.CPUFeatures = "avx sse2" }, []string{"CPU feature avx2", "--cpu-template"}},
		"rate":             {func(i *vmm.Info) { i.TSCkHz += i.TSCkHz / 500 }, []string{"TSC rate", `"2500000"`, `"2505000"`, "clock"}},
		"rate unknown":     {func(i *vmm.Info) { i.TSCkHz = 0 }, []string{"TSC rate", `"0"`}},
	} {
		t.Run(name, func(t *testing.T) {
			now := m.Engine
			c.change(&now)
			err := Compat(m, now)
			if c.want == nil {
				if err != nil {
					t.Errorf("got %v, want none", err)
				}
				return
			}
			if !errors.Is(err, vmm.ErrIncompatible) {
				t.Fatalf("got %v, want %v", err, vmm.ErrIncompatible)
			}
			for _, want := range append(c.want, "s1") {
				if !strings.Contains(err.Error(), want) {
					t.Errorf("got %q, want it to say %q", err, want)
				}
			}
		})
	}
}

func TestListKeepsBrokenApart(t *testing.T) {
	s := newStore(t)
	put(t, s, "good", "", newRAM(t, 1), nil)
	put(t, s, "bad", "", newRAM(t, 1), nil)
	for _, dir := range []string{"lost+found", "empty"} {
		if err := os.Mkdir(filepath.Join(s.dir, dir), 0o700); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.WriteFile(filepath.Join(s.dir, "file"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(s.Dir("bad"), manifestFile), []byte("{}"), 0o600); err != nil {
		t.Fatal(err)
	}
	found, broken, err := s.List()
	if err != nil || len(found) != 1 || found[0].ID != "good" {
		t.Errorf("got %v (%v), want just good", found, err)
	}
	var ids []string
	for _, b := range broken {
		ids = append(ids, b.ID)
		if !errors.Is(b.Err, ErrCorrupt) {
			t.Errorf("%s: got %v, want %v", b.ID, b.Err, ErrCorrupt)
		}
	}
	if diff := cmp.Diff([]string{"bad", "empty"}, ids); diff != "" {
		t.Errorf("broken (-want +got):\n%s", diff)
	}
}
