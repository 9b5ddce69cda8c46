package pack

import (
	"bytes"
	"context"
	"crypto/ed25519"
	"encoding/json"
	"errors"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/forkd/forkd/internal/memory"
	"github.com/forkd/forkd/internal/snapshot"
)

func TestPackUnpack(t *testing.T) {
	for name, c := range map[string]struct{ from, to []snapshot.Option }{
		"plain":           {},
		"to compressed":   {to: []snapshot.Option{snapshot.WithCompression()}},
		"from compressed": {from: []snapshot.Option{snapshot.WithCompression()}},
	} {
		t.Run(name, func(t *testing.T) {
			from, to := newSource(t, c.from...), newHost(t, c.to...)
			var last Progress
			file := from.pack(t, "tip", Options{Progress: func(p Progress) { last = p }})
			if last.Done != last.Total || last.Total == 0 {
				t.Errorf("progress ended at %+v", last)
			}
			got, err := to.unpack(t, file, UnpackOptions{Progress: func(p Progress) { last = p }})
			if err != nil {
				t.Fatal(err)
			}
			if last.Done != last.Total {
				t.Errorf("progress of unpacking ended at %+v", last)
			}
			want := Result{Manifest: got.Manifest, Published: []string{"root", "mid", "tip"}, Image: "img1", NewImage: true}
			if diff := cmp.Diff(want, got); diff != "" || got.Manifest.ID != "tip" {
				t.Errorf("result (-want +got):\n%s", diff)
			}
			if diff := cmp.Diff([]string{"img1", "mid", "root", "tip"}, to.names(t)); diff != "" {
				t.Errorf("stores (-want +got):\n%s", diff)
			}
			for _, id := range got.Published {
				if !bytes.Equal(from.memory(t, id), to.memory(t, id)) {
					t.Errorf("memory of %s differs", id)
				}
				if err := to.store.Verify(t.Context(), id); err != nil {
					t.Error(err)
				}
			}
			for _, part := range parts() {
				a, err1 := os.ReadFile(filepath.Join(from.images.dir, "img1", string(part)))
				b, err2 := os.ReadFile(filepath.Join(to.images.dir, "img1", string(part)))
				if err := errors.Join(err1, err2); err != nil || !bytes.Equal(a, b) {
					t.Errorf("%s differs (%v)", part, err)
				}
			}
		})
	}
}

// TestReproducible packs on three machines: the origin, the same with another number of cores, and one that got the snapshot by
// unpacking and keeps it compressed.
func TestReproducible(t *testing.T) {
	from, to := newSource(t), newHost(t, snapshot.WithCompression())
	key := ed25519.NewKeyFromSeed(make([]byte, 32))
	first := from.pack(t, "tip", Options{Sign: key})
	for _, cores := range []int{1, 3} {
		before := runtime.GOMAXPROCS(cores)
		again := from.pack(t, "tip", Options{Sign: key})
		runtime.GOMAXPROCS(before)
		if !bytes.Equal(first, again) {
			t.Errorf("packing with %d cores gives other bytes", cores)
		}
	}
	if _, err := to.unpack(t, first, UnpackOptions{}); err != nil {
		t.Fatal(err)
	}
	if elsewhere := to.pack(t, "tip", Options{Sign: key}); !bytes.Equal(first, elsewhere) {
		t.Error("packing elsewhere gives other bytes")
	}
}

func TestUnpackWhatIsHere(t *testing.T) {
	from, to := newSource(t), newHost(t)
	if _, err := to.unpack(t, from.pack(t, "mid", Options{}), UnpackOptions{}); err != nil {
		t.Fatal(err)
	}
	file := from.pack(t, "tip", Options{})
	got, err := to.unpack(t, file, UnpackOptions{})
	want := Result{Manifest: got.Manifest, Published: []string{"tip"}, Present: []string{"root", "mid"}, Image: "img1"}
	if diff := cmp.Diff(want, got); err != nil || diff != "" {
		t.Errorf("partly here: %v (-want +got):\n%s", err, diff)
	}
	got, err = to.unpack(t, file, UnpackOptions{})
	want = Result{Manifest: got.Manifest, Present: []string{"root", "mid", "tip"}, Image: "img1"}
	if diff := cmp.Diff(want, got); err != nil || diff != "" || got.Manifest.ID != "tip" {
		t.Errorf("all here: %v (-want +got):\n%s", err, diff)
	}
	if !bytes.Equal(from.memory(t, "tip"), to.memory(t, "tip")) {
		t.Error("memory differs")
	}
}

func TestUnpackRefusesOtherContent(t *testing.T) {
	file := newSource(t).pack(t, "tip", Options{})
	t.Run("snapshot", func(t *testing.T) {
		to := newHost(t)
		to.images.add(t, "img1")
		to.put(t, "mid", "", 9, []memory.Extent{{First: 0, N: 2}, {First: 5, N: 1}})
		if _, err := to.unpack(t, file, UnpackOptions{}); !errors.Is(err, snapshot.ErrExists) || !strings.Contains(err.Error(), "mid") {
			t.Errorf("got %v, want %v, about mid", err, snapshot.ErrExists)
		}
		if diff := cmp.Diff([]string{"img1", "mid"}, to.names(t)); diff != "" {
			t.Errorf("stores (-want +got):\n%s", diff)
		}
	})
	t.Run("image", func(t *testing.T) {
		to := newHost(t)
		img := to.images.add(t, "img1")
		img.Kernel.Bytes++
		meta, _ := json.Marshal(img)
		if err := os.WriteFile(filepath.Join(to.images.dir, "img1", "meta.json"), meta, 0o600); err != nil {
			t.Fatal(err)
		}
		if _, err := to.unpack(t, file, UnpackOptions{}); !errors.Is(err, snapshot.ErrExists) || !strings.Contains(err.Error(), "img1") {
			t.Errorf("got %v, want %v, about img1", err, snapshot.ErrExists)
		}
	})
}

func TestPackRefuses(t *testing.T) {
	h := newSource(t)
	pack := func(id string, opt Options) error {
		_, err := Pack(t.Context(), io.Discard, h.store, h.images, id, opt)
		return err
	}
	if err := pack("gone", Options{}); !errors.Is(err, snapshot.ErrNotFound) {
		t.Errorf("unknown snapshot: got %v", err)
	}
	if err := pack("tip", Options{Sign: make([]byte, 3)}); err == nil {
		t.Error("bad key: got no error")
	}
	rootfs := filepath.Join(h.images.dir, "img1", string(Rootfs))
	data, err := os.ReadFile(rootfs)
	if err != nil {
		t.Fatal(err)
	}
	for name, bad := range map[string][]byte{"flipped": append([]byte{data[0] ^ 1}, data[1:]...), "cut": data[:100], "longer": append(data, 0)} {
		if err := os.WriteFile(rootfs, bad, 0o600); err != nil {
			t.Fatal(err)
		}
		if err := pack("tip", Options{}); err == nil || name == "flipped" && !errors.Is(err, snapshot.ErrCorrupt) {
			t.Errorf("rootfs %s: got %v, want an error", name, err)
		}
	}
	if err := h.images.Remove(t.Context(), "img1"); err != nil {
		t.Fatal(err)
	}
	if err := pack("tip", Options{}); !errors.Is(err, fs.ErrNotExist) || !strings.Contains(err.Error(), "img1") {
		t.Errorf("image missing: got %v", err)
	}
}

func TestPackCancelled(t *testing.T) {
	h := newSource(t)
	ctx, cancel := context.WithCancel(t.Context())
	var out bytes.Buffer
	_, err := Pack(ctx, &out, h.store, h.images, "tip", Options{Progress: func(p Progress) {
		if p.Member == "snapshots/root/memory" {
			cancel()
		}
	}})
	if !errors.Is(err, context.Canceled) {
		t.Errorf("got %v, want %v", err, context.Canceled)
	}
	to := newHost(t)
	if _, err := to.unpack(t, out.Bytes(), UnpackOptions{}); !errors.Is(err, ErrInvalid) {
		t.Errorf("unpacking what was written: got %v, want %v", err, ErrInvalid)
	}
}

func TestUnpackCancelled(t *testing.T) {
	file := newSource(t).pack(t, "tip", Options{})
	to := newHost(t)
	ctx, cancel := context.WithCancel(t.Context())
	_, err := Unpack(ctx, slow{bytes.NewReader(file)}, to.store, to.images, UnpackOptions{Progress: func(p Progress) {
		if p.Member == "image/rootfs" {
			cancel()
		}
	}})
	if !errors.Is(err, context.Canceled) || errors.Is(err, ErrInvalid) {
		t.Errorf("got %v, want %v", err, context.Canceled)
	}
	if got := to.names(t); len(got) != 0 {
		t.Errorf("left over: %v", got)
	}
}

// slow gives out little at a time, so that nobody has read everything when it matters.
type slow struct{ r io.Reader }

func (s slow) Read(b []byte) (int, error) { return s.r.Read(b[:min(len(b), 1000)]) }

func TestUnpackBrokenInput(t *testing.T) {
	file := newSource(t).pack(t, "tip", Options{})
	broken := errors.New("connection reset")
	to := newHost(t)
	in := io.MultiReader(bytes.NewReader(file[:len(file)/2]), failing{broken})
	if _, err := Unpack(t.Context(), in, to.store, to.images, UnpackOptions{}); !errors.Is(err, broken) || errors.Is(err, ErrInvalid) {
		t.Errorf("got %v, want %v, which is not the pack's fault", err, broken)
	}
	if got := to.names(t); len(got) != 0 {
		t.Errorf("left over: %v", got)
	}
}

type failing struct{ err error }

func (f failing) Read([]byte) (int, error) { return 0, f.err }

func TestSignatures(t *testing.T) {
	from := newSource(t)
	privatePEM, publicPEM, err := GenerateKey()
	if err != nil {
		t.Fatal(err)
	}
	key, err := ParsePrivateKey(privatePEM)
	if err != nil {
		t.Fatal(err)
	}
	public, err := ParsePublicKey(publicPEM)
	if err != nil {
		t.Fatal(err)
	}
	other, _, err := ed25519.GenerateKey(nil)
	if err != nil {
		t.Fatal(err)
	}
	unsigned, signed := from.pack(t, "tip", Options{}), from.pack(t, "tip", Options{Sign: key})
	for name, c := range map[string]struct {
		file    []byte
		require []ed25519.PublicKey
		want    error
		signer  ed25519.PublicKey
	}{
		"unsigned, not required":   {unsigned, nil, nil, nil},
		"signed, not required":     {signed, nil, nil, public},
		"signed and required":      {signed, []ed25519.PublicKey{public}, nil, public},
		"one of several":           {signed, []ed25519.PublicKey{other, public}, nil, public},
		"unsigned, but required":   {unsigned, []ed25519.PublicKey{public}, ErrUnsigned, nil},
		"signed by somebody else":  {signed, []ed25519.PublicKey{other}, ErrUntrusted, nil},
		"signature of another":     {resigned(t, signed, func(s *signature) { s.Key = other }), nil, ErrSignature, nil},
		"signature flipped":        {resigned(t, signed, func(s *signature) { s.Signature[0] ^= 1 }), []ed25519.PublicKey{public}, ErrSignature, nil},
		"signature empty":          {resigned(t, signed, func(s *signature) { *s = signature{} }), nil, ErrSignature, nil},
		"signed, contents changed": {withContents(t, signed, func(c *Contents) { c.Image.Name = "js" }), []ed25519.PublicKey{public}, ErrSignature, nil},
	} {
		t.Run(name, func(t *testing.T) {
			to := newHost(t)
			got, err := to.unpack(t, c.file, UnpackOptions{RequireSignature: c.require})
			if !errors.Is(err, c.want) {
				t.Fatalf("got %v, want %v", err, c.want)
			}
			if !bytes.Equal(got.SignedBy, c.signer) {
				t.Errorf("got signer %x, want %x", got.SignedBy, c.signer)
			}
			if n := to.names(t); err != nil && len(n) != 0 {
				t.Errorf("left over: %v", n)
			}
		})
	}
}

func TestParseKeysRefuse(t *testing.T) {
	private, public, err := GenerateKey()
	if err != nil {
		t.Fatal(err)
	}
	for _, file := range [][]byte{nil, []byte("x"), public, private[:40], bytes.Replace(private, []byte("M"), []byte("N"), 1)} {
		if _, err := ParsePrivateKey(file); err == nil {
			t.Errorf("ParsePrivateKey(%q): got no error", file)
		}
	}
	for _, file := range [][]byte{nil, []byte("x"), private, public[:40]} {
		if _, err := ParsePublicKey(file); err == nil {
			t.Errorf("ParsePublicKey(%q): got no error", file)
		}
	}
}

func TestUnpackTooLarge(t *testing.T) {
	from, to := newSource(t), newHost(t)
	c, err := Pack(t.Context(), io.Discard, from.store, from.images, "tip", Options{})
	if err != nil {
		t.Fatal(err)
	}
	file := from.pack(t, "tip", Options{})
	if _, err := to.unpack(t, file, UnpackOptions{MaxBytes: c.Bytes() - 1}); !errors.Is(err, ErrTooLarge) {
		t.Errorf("got %v, want %v", err, ErrTooLarge)
	}
	if got := to.names(t); len(got) != 0 {
		t.Errorf("left over: %v", got)
	}
	if _, err := to.unpack(t, file, UnpackOptions{MaxBytes: c.Bytes()}); err != nil {
		t.Errorf("at the limit: %v", err)
	}
}
