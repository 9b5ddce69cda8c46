package pack

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"testing"

	"github.com/forkd/forkd/internal/memory"
	"github.com/forkd/forkd/internal/snapshot"
	"github.com/forkd/forkd/internal/vmm"
)

const testMiB = 4

// fakeImages keeps images as directories: meta.json and the parts.
type fakeImages struct{ dir string }

func newImages(t testing.TB) *fakeImages { return &fakeImages{t.TempDir()} }

// add makes an image with random parts.
func (f *fakeImages) add(t testing.TB, id string) Image {
	t.Helper()
	img := Image{ID: id, Name: "py", Meta: json.RawMessage(`{"python": true, "note": "<any>"}`)}
	dir := filepath.Join(f.dir, id)
	if err := os.Mkdir(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	for i, part := range parts() {
		data := randomBytes(uint64(i)+7, 300_000*(i+1))
		sum := sha256.Sum256(data)
		*map[Part]*snapshot.Blob{Kernel: &img.Kernel, Initramfs: &img.Initramfs, Rootfs: &img.Rootfs}[part] = snapshot.Blob{Bytes: int64(len(data)), SHA256: hex.EncodeToString(sum[:])}
		if err := os.WriteFile(filepath.Join(dir, string(part)), data, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	meta, err := json.Marshal(img)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, "meta.json"), meta, 0o600); err != nil {
		t.Fatal(err)
	}
	return img
}

func randomBytes(seed uint64, n int) []byte {
	b := make([]byte, n)
	rand.NewChaCha8([32]byte{byte(seed), byte(seed >> 8), 1}).Read(b)
	return b
}

func (f *fakeImages) Export(_ context.Context, id string) (Image, error) {
	meta, err := os.ReadFile(filepath.Join(f.dir, id, "meta.json"))
	if err != nil {
		return Image{}, err
	}
	var img Image
	err = json.Unmarshal(meta, &img)
	return img, err
}

func (f *fakeImages) Open(_ context.Context, id string, part Part) (io.ReadCloser, error) {
	return os.Open(filepath.Join(f.dir, id, string(part)))
}

func (f *fakeImages) Stage(_ context.Context, img Image) (ImageStaging, error) {
	dir, err := os.MkdirTemp(f.dir, ".staging-")
	return &fakeStaging{f, img, dir, false}, err
}

func (f *fakeImages) Remove(_ context.Context, id string) error {
	return os.RemoveAll(filepath.Join(f.dir, id))
}

// sweep is what a store does when it is opened.
func (f *fakeImages) sweep(t *testing.T) {
	left, err := filepath.Glob(filepath.Join(f.dir, ".staging-*"))
	if err != nil {
		t.Fatal(err)
	}
	for _, dir := range left {
		os.RemoveAll(dir)
	}
}

type fakeStaging struct {
	images *fakeImages
	img    Image
	dir    string
	done   bool
}

func (s *fakeStaging) Write(_ context.Context, part Part, r io.Reader) error {
	data, err := io.ReadAll(r)
	if err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(s.dir, string(part)), data, 0o600)
}

func (s *fakeStaging) Prepare(context.Context) error {
	meta, err := json.Marshal(s.img)
	if err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(s.dir, "meta.json"), meta, 0o600)
}

func (s *fakeStaging) Commit() error {
	s.done = true
	return os.Rename(s.dir, filepath.Join(s.images.dir, s.img.ID))
}

func (s *fakeStaging) Abort() error {
	if s.done {
		return nil
	}
	return os.RemoveAll(s.dir)
}

// host is a machine's stores.
type host struct {
	store  *snapshot.Store
	images *fakeImages
}

func newHost(t testing.TB, options ...snapshot.Option) host {
	t.Helper()
	s, err := snapshot.Open(t.TempDir(), options...)
	if err != nil {
		t.Fatal(err)
	}
	return host{s, newImages(t)}
}

// names lists what is in both stores, leftovers included.
func (h host) names(t testing.TB) []string {
	t.Helper()
	var out []string
	for _, dir := range []string{h.images.dir, h.store.Path()} {
		entries, err := os.ReadDir(dir)
		if err != nil {
			t.Fatal(err)
		}
		for _, e := range entries {
			out = append(out, e.Name())
		}
	}
	return out
}

// newSource is a host with a chain of three snapshots: root, mid and tip.
func newSource(t testing.TB, options ...snapshot.Option) host {
	t.Helper()
	h := newHost(t, options...)
	h.images.add(t, "img1")
	h.put(t, "root", "", 1, []memory.Extent{{First: 0, N: 300}, {First: 700, N: 50}})
	h.put(t, "mid", "root", 2, []memory.Extent{{First: 10, N: 20}, {First: 400, N: 5}})
	h.put(t, "tip", "mid", 3, []memory.Extent{{First: 15, N: 1}, {First: 999, N: 25}})
	return h
}

func (h host) put(t testing.TB, id, parent string, seed uint64, extents []memory.Extent) {
	t.Helper()
	ctx := context.Background()
	ram, err := memory.New("test", testMiB<<20)
	if err != nil {
		t.Fatal(err)
	}
	defer ram.Close()
	for _, e := range extents[:len(extents)-1] { // the last becomes zeros
		data := randomBytes(seed, int(e.Bytes()))
		copy(data[len(data)/2:], bytes.Repeat([]byte("text"), len(data)/8))
		if _, err := ram.WriteAt(data, e.Offset()); err != nil {
			t.Fatal(err)
		}
	}
	st, err := h.store.Stage(id)
	if err != nil {
		t.Fatal(err)
	}
	defer st.Abort()
	if parent == "" {
		extents = nil
	}
	if err := st.WriteMemory(ctx, ram, extents); err != nil {
		t.Fatal(err)
	}
	state, err := memory.SealedCopy("state", []byte("device state of "+id))
	if err != nil {
		t.Fatal(err)
	}
	defer state.Close()
	if err := st.WriteDevice(ctx, state); err != nil {
		t.Fatal(err)
	}
	img, err := h.images.Export(ctx, "img1")
	if err != nil {
		t.Fatal(err)
	}
	_, err = st.Publish(ctx, snapshot.Manifest{
		Parent: parent,
		Image: snapshot.ImageRef{ID: img.ID, Name: img.Name, KernelSHA256: img.Kernel.SHA256, InitramfsSHA256: img.Initramfs.SHA256,
			RootfsSHA256: img.Rootfs.SHA256},
		Engine: vmm.Info{Engine: "qemu", Version: "7.2.22"},
		Shape:  vmm.Shape{MemMiB: testMiB, VCPUs: 1},
	})
	if err != nil {
		t.Fatal(err)
	}
}

func (h host) memory(t testing.TB, id string) []byte {
	t.Helper()
	img, err := h.store.Load(context.Background(), id)
	if err != nil {
		t.Fatal(err)
	}
	defer img.Close()
	b := make([]byte, img.Bytes())
	if _, err := img.ReadAt(b, 0); err != nil {
		t.Fatal(err)
	}
	return b
}

func (h host) pack(t testing.TB, id string, opt Options) []byte {
	t.Helper()
	var out bytes.Buffer
	if _, err := Pack(context.Background(), &out, h.store, h.images, id, opt); err != nil {
		t.Fatal(err)
	}
	return out.Bytes()
}

func (h host) unpack(t testing.TB, file []byte, opt UnpackOptions) (Result, error) {
	return Unpack(context.Background(), bytes.NewReader(file), h.store, h.images, opt)
}
