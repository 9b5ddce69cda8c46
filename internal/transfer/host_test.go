package transfer

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/forkd/forkd/internal/image"
	"github.com/forkd/forkd/internal/memory"
	"github.com/forkd/forkd/internal/sandbox"
	"github.com/forkd/forkd/internal/snapshot"
	"github.com/forkd/forkd/internal/vmm"
)

const imageID = "00112233445566aa"

// fakeDomain keeps tags, and says of an image what it is told to say.
type fakeDomain struct {
	refuse error // of AddSnapshot

	mu    sync.Mutex
	tags  map[string]sandbox.Snapshot
	inUse map[string]error
	held  int // snapshots
}

func (d *fakeDomain) Snapshot(_ context.Context, tag string) (sandbox.Snapshot, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	s, ok := d.tags[tag]
	if !ok {
		return s, &sandbox.Error{Code: sandbox.CodeSnapshotNotFound, Message: "no snapshot has the tag " + tag}
	}
	return s, nil
}

func (d *fakeDomain) TakeImage(context.Context, string, bool) error { return nil }

func (d *fakeDomain) Hold(_ context.Context, tag string) (id string, release func(), err error) {
	s, err := d.Snapshot(context.Background(), tag)
	if err != nil {
		return "", nil, err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.held++
	return s.ID, func() {
		d.mu.Lock()
		defer d.mu.Unlock()
		d.held--
	}, nil
}

func (d *fakeDomain) AddSnapshot(_ context.Context, tag, id string) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.refuse == nil {
		d.tags[tag] = sandbox.Snapshot{Tag: tag, ID: id, Status: sandbox.StatusReady}
	}
	return d.refuse
}

func (d *fakeDomain) ImageInUse(id string) error { return d.inUse[id] }

// host is a machine's stores with what moves in and out.
type host struct {
	*Service
	*fakeDomain
	dir string
}

func newHost(t *testing.T) *host {
	t.Helper()
	dir := t.TempDir()
	store, err := snapshot.Open(filepath.Join(dir, "snapshots"))
	if err != nil {
		t.Fatal(err)
	}
	images, err := image.Open(filepath.Join(dir, "images"), filepath.Join(dir, "cache"), nil)
	if err != nil {
		t.Fatal(err)
	}
	d := &fakeDomain{tags: map[string]sandbox.Snapshot{}, inUse: map[string]error{}}
	return &host{Service: New(Config{Snapshots: store, Images: images, Domain: d}), fakeDomain: d, dir: dir}
}

// newSource is a host with a chain of two snapshots: base and tip.
func newSource(t *testing.T) *host {
	t.Helper()
	h := newHost(t)
	h.putImage(t)
	h.putSnapshot(t, "base", "")
	h.putSnapshot(t, "tip", "base")
	return h
}

// putImage takes an image in, as one from elsewhere is.
func (h *host) putImage(t *testing.T) {
	t.Helper()
	files := map[string]string{"vmlinuz": "kernel", "initramfs": "agent", "rootfs.erofs": strings.Repeat("root", 100_000)}
	blob := func(name string) image.Blob {
		sum := sha256.Sum256([]byte(files[name]))
		return image.Blob{Name: name, Bytes: int64(len(files[name])), SHA256: hex.EncodeToString(sum[:])}
	}
	meta, err := json.Marshal(image.Image{FormatVersion: 1, ID: imageID, Name: "py", RootfsType: "erofs", KernelVersion: "<6.1>",
		Kernel: blob("vmlinuz"), Initramfs: blob("initramfs"), Rootfs: blob("rootfs.erofs")})
	if err != nil {
		t.Fatal(err)
	}
	in, err := h.images.Import(meta)
	if err != nil {
		t.Fatal(err)
	}
	defer in.Abort()
	for name, content := range files {
		if err := in.Write(t.Context(), blob(name), strings.NewReader(content)); err != nil {
			t.Fatal(err)
		}
	}
	if err := in.Prepare(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := in.Commit(); err != nil {
		t.Fatal(err)
	}
}

// putSnapshot publishes a snapshot under an id that is also its tag.
func (h *host) putSnapshot(t *testing.T, id, parent string) {
	t.Helper()
	ram, err := memory.New("test", 1<<20)
	if err != nil {
		t.Fatal(err)
	}
	defer ram.Close()
	data := make([]byte, 64<<10)
	rand.NewChaCha8(sha256.Sum256([]byte(id))).Read(data)
	if _, err := ram.WriteAt(data, 8<<12); err != nil {
		t.Fatal(err)
	}
	st, err := h.store.Stage(id)
	if err != nil {
		t.Fatal(err)
	}
	defer st.Abort()
	var extents []memory.Extent
	if parent != "" {
		extents = []memory.Extent{{First: 8, N: 16}}
	}
	if err := st.WriteMemory(t.Context(), ram, extents); err != nil {
		t.Fatal(err)
	}
	state, err := memory.SealedCopy("state", []byte("device state of "+id))
	if err != nil {
		t.Fatal(err)
	}
	defer state.Close()
	if err := st.WriteDevice(t.Context(), state); err != nil {
		t.Fatal(err)
	}
	img, err := h.images.Get(imageID)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := st.Publish(t.Context(), snapshot.Manifest{
		Parent: parent,
		Image: snapshot.ImageRef{ID: img.ID, Name: img.Name, KernelSHA256: img.Kernel.SHA256, InitramfsSHA256: img.Initramfs.SHA256,
			RootfsSHA256: img.Rootfs.SHA256},
		Engine: vmm.Info{Engine: "fake", Version: "1"}, Shape: vmm.Shape{MemMiB: 1, VCPUs: 1},
	}); err != nil {
		t.Fatal(err)
	}
	h.tags[id] = sandbox.Snapshot{Tag: id, ID: id, Status: sandbox.StatusReady}
}

// pack returns the pack of a snapshot.
func (h *host) pack(t *testing.T, tag string) []byte {
	t.Helper()
	var out bytes.Buffer
	if err := h.Pack(t.Context(), tag, &out, nil); err != nil {
		t.Fatal(err)
	}
	return out.Bytes()
}

// left lists what is in both stores, leftovers included.
func (h *host) left(t *testing.T) []string {
	t.Helper()
	var names []string
	for _, dir := range []string{"images", "images/names", "snapshots"} {
		entries, err := os.ReadDir(filepath.Join(h.dir, dir))
		if err != nil {
			t.Fatal(err)
		}
		for _, e := range entries {
			if e.Name() != "names" {
				names = append(names, e.Name())
			}
		}
	}
	return names
}

// loseName makes the image one whose name has moved to a newer one.
func loseName(t *testing.T, h *host) {
	t.Helper()
	if err := os.Remove(filepath.Join(h.dir, "images", "names", "py")); err != nil {
		t.Fatal(err)
	}
}

func writeFile(t *testing.T, path, content string) {
	t.Helper()
	if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
		t.Fatal(err)
	}
}
