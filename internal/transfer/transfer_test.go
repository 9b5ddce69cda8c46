package transfer

import (
	"bytes"
	"context"
	"crypto/ed25519"
	"errors"
	"io"
	"path/filepath"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/forkd/forkd/internal/image"
	"github.com/forkd/forkd/internal/sandbox"
	"github.com/forkd/forkd/internal/snapshot/pack"
)

func TestThereAndBack(t *testing.T) {
	t.Parallel()
	from, to := newSource(t), newHost(t)
	file := from.pack(t, "tip")
	var last sandbox.Progress
	got, err := to.Unpack(t.Context(), bytes.NewReader(file), UnpackRequest{Tag: "mine"}, func(p sandbox.Progress) { last = p })
	if err != nil {
		t.Fatal(err)
	}
	want := Unpacked{Snapshot: sandbox.Snapshot{Tag: "mine", ID: "tip", Status: sandbox.StatusReady}, New: []string{"base", "tip"}, ImageID: imageID, NewImage: true}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("Unpack() (-want +got):\n%s", diff)
	}
	if last.Done != last.Total || last.Total == 0 {
		t.Errorf("last progress = %+v, want all of it", last)
	}
	if !bytes.Equal(file, to.pack(t, "mine")) {
		t.Error("packed again it is another file")
	}
	again, err := to.Unpack(t.Context(), bytes.NewReader(file), UnpackRequest{}, nil)
	if err != nil || again.Snapshot.Tag != "tip" || len(again.New) != 0 || len(again.Present) != 2 || again.NewImage {
		t.Errorf("Unpack() of what is here, without a tag = %+v, %v", again, err)
	}
}

func TestSignatures(t *testing.T) {
	t.Parallel()
	from := newSource(t)
	public, private, err := ed25519.GenerateKey(nil)
	if err != nil {
		t.Fatal(err)
	}
	other, _, err := ed25519.GenerateKey(nil)
	if err != nil {
		t.Fatal(err)
	}
	head, err := from.Head(t.Context(), "tip")
	if err != nil || head.ID != "tip" {
		t.Fatalf("Head() = %s, %v", head.ID, err)
	}
	sig, err := pack.Sign(private, head.Contents)
	if err != nil {
		t.Fatal(err)
	}
	var file bytes.Buffer
	if err := from.Pack(t.Context(), "tip", &file, sig); err != nil {
		t.Fatal(err)
	}
	if err := from.Pack(t.Context(), "base", io.Discard, sig); sandbox.CodeOf(err) != sandbox.CodeInvalidArgument {
		t.Errorf("Pack() with the signature of another = %v, want %s", err, sandbox.CodeInvalidArgument)
	}
	unsigned := from.pack(t, "tip")
	tests := []struct {
		name    string
		file    []byte
		signers []ed25519.PublicKey
		code    sandbox.Code
	}{
		{"by one of them", file.Bytes(), []ed25519.PublicKey{other, public}, ""},
		{"nobody asks", file.Bytes(), nil, ""},
		{"by somebody else", file.Bytes(), []ed25519.PublicKey{other}, CodeUntrustedPack},
		{"not signed", unsigned, []ed25519.PublicKey{public}, CodeUntrustedPack},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			to := newHost(t)
			got, err := to.Unpack(t.Context(), bytes.NewReader(tt.file), UnpackRequest{Tag: "t", Signers: tt.signers}, nil)
			if sandbox.CodeOf(err) != tt.code {
				t.Errorf("Unpack() error = %v, want %q", err, tt.code)
			}
			if err == nil && !public.Equal(got.SignedBy) {
				t.Errorf("signed by %x, want %x", got.SignedBy, public)
			}
			if left := to.left(t); err != nil && len(left) != 0 {
				t.Errorf("left over: %v", left)
			}
		})
	}
}

// TestUnpackRefuses holds that a pack that is not taken in leaves nothing and says why.
func TestUnpackRefuses(t *testing.T) {
	t.Parallel()
	file := newSource(t).pack(t, "tip")
	flipped := bytes.Clone(file)
	flipped[len(flipped)/2] ^= 1
	taken := &sandbox.Error{Code: sandbox.CodeSnapshotExists, Message: "somebody was faster"}
	tests := []struct {
		name   string
		file   io.Reader
		tag    string
		refuse error
		code   sandbox.Code
	}{
		{"nothing", bytes.NewReader(nil), "t", nil, CodeInvalidPack},
		{"something else", bytes.NewReader([]byte("PK\x03\x04 and so on")), "t", nil, CodeInvalidPack},
		{"cut", bytes.NewReader(file[:len(file)-10]), "t", nil, CodeInvalidPack},
		{"flipped", bytes.NewReader(flipped), "t", nil, CodeInvalidPack},
		{"with more behind it", io.MultiReader(bytes.NewReader(file), bytes.NewReader(file)), "t", nil, CodeInvalidPack},
		{"the domain won't have it", bytes.NewReader(file), "t", taken, sandbox.CodeSnapshotExists},
		{"tag in use", untouched{t}, "used", nil, sandbox.CodeSnapshotExists},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			to := newHost(t)
			to.refuse = tt.refuse
			to.tags["used"] = sandbox.Snapshot{Tag: "used"}
			_, err := to.Unpack(t.Context(), tt.file, UnpackRequest{Tag: tt.tag}, nil)
			if got := sandbox.CodeOf(err); got != tt.code {
				t.Errorf("Unpack() = %q %v, want %q", got, err, tt.code)
			}
			if left := to.left(t); len(left) != 0 {
				t.Errorf("left over: %v", left)
			}
		})
	}
	t.Run("the request ends", func(t *testing.T) {
		t.Parallel()
		to := newHost(t)
		ctx, cancel := context.WithCancel(t.Context())
		half := io.MultiReader(bytes.NewReader(file[:len(file)/2]), readerFunc(func([]byte) (int, error) {
			cancel()
			return 0, context.Canceled
		}))
		if _, err := to.Unpack(ctx, half, UnpackRequest{Tag: "t"}, nil); !errors.Is(err, context.Canceled) {
			t.Errorf("Unpack() error = %v, want %v", err, context.Canceled)
		}
		if left := to.left(t); len(left) != 0 {
			t.Errorf("left over: %v", left)
		}
	})
}

// untouched must not be read.
type untouched struct{ t *testing.T }

func (u untouched) Read([]byte) (int, error) {
	u.t.Error("the pack was read")
	return 0, io.EOF
}

type readerFunc func([]byte) (int, error)

func (f readerFunc) Read(b []byte) (int, error) { return f(b) }

func TestPackRefuses(t *testing.T) {
	t.Parallel()
	h := newSource(t)
	h.tags["deleted"] = sandbox.Snapshot{Status: sandbox.StatusReady, ID: "gone"}
	for tag, want := range map[string]sandbox.Code{
		"none": sandbox.CodeSnapshotNotFound, "deleted": sandbox.CodeSnapshotNotFound,
	} {
		var out bytes.Buffer
		if err := h.Pack(t.Context(), tag, &out, nil); sandbox.CodeOf(err) != want || out.Len() != 0 {
			t.Errorf("Pack(%s) = %v with %d bytes, want %s and none", tag, err, out.Len(), want)
		}
		if _, err := h.Head(t.Context(), tag); sandbox.CodeOf(err) != want {
			t.Errorf("Head(%s) = %v, want %s", tag, err, want)
		}
	}
	if err := h.images.RemoveID(imageID); err != nil {
		t.Fatal(err)
	}
	if err := h.Pack(t.Context(), "tip", io.Discard, nil); sandbox.CodeOf(err) != sandbox.CodeImageNotFound {
		t.Errorf("Pack() without the image = %v, want %s", err, sandbox.CodeImageNotFound)
	}
	if h.held != 0 {
		t.Errorf("%d snapshots are still held, want none", h.held)
	}
}

// TestHolds holds that an image on its way out or in is not removed.
func TestHolds(t *testing.T) {
	t.Parallel()
	from := newSource(t)
	pipe, w := io.Pipe()
	done := make(chan error)
	go func() { done <- from.Pack(t.Context(), "tip", w, nil) }()
	if _, err := pipe.Read(make([]byte, 1)); err != nil { // it writes, so it holds
		t.Fatal(err)
	}
	if from.held != 1 {
		t.Errorf("%d snapshots are held while one is packed", from.held)
	}
	if err := from.RemoveImage("py"); sandbox.CodeOf(err) != sandbox.CodeImageInUse {
		t.Errorf("RemoveImage() of one that is being packed = %v, want %s", err, sandbox.CodeImageInUse)
	}
	pipe.Close()
	if err := <-done; err == nil {
		t.Error("Pack() to nobody succeeded")
	}
	from.inUse[imageID] = errInjected
	if err := from.RemoveImage("py"); !errors.Is(err, errInjected) {
		t.Errorf("RemoveImage() = %v, want what the domain says", err)
	}
	delete(from.inUse, imageID)
	if err := from.RemoveImage("py"); err != nil {
		t.Error(err)
	}
	if err := from.RemoveImage("py"); !errors.Is(err, image.ErrNotFound) {
		t.Errorf("RemoveImage() again = %v, want %v", err, image.ErrNotFound)
	}
}

var errInjected = errors.New("injected")

// TestPruneImages holds that an image which a pack needs, or which has just been made, is no leftover.
func TestPruneImages(t *testing.T) {
	t.Parallel()
	h := newSource(t)
	if got, err := h.PruneImages(); err != nil || len(got) != 0 {
		t.Errorf("PruneImages() = %v, %v, want none: it has its name", got, err)
	}
	loseName(t, h)
	parts := h.parts()
	if _, err := parts.Export(t.Context(), imageID); err != nil {
		t.Fatal(err)
	}
	if got, err := h.PruneImages(); err != nil || len(got) != 0 {
		t.Errorf("PruneImages() = %v, %v, want none: it is held", got, err)
	}
	parts.release()
	if got, err := h.PruneImages(); err != nil || len(got) != 1 {
		t.Errorf("PruneImages() = %v, %v, want one", got, err)
	}
}

// TestImageMustBeWhatThePackSays holds that a pack can't pass one image off as another.
func TestImageMustBeWhatThePackSays(t *testing.T) {
	t.Parallel()
	img, err := newSource(t).parts().Export(t.Context(), imageID)
	if err != nil {
		t.Fatal(err)
	}
	for name, change := range map[string]func(*pack.Image){
		"id":     func(i *pack.Image) { i.ID = "aabbccddeeff0011" },
		"name":   func(i *pack.Image) { i.Name = "other" },
		"kernel": func(i *pack.Image) { i.Kernel = i.Rootfs },
		"root":   func(i *pack.Image) { i.Rootfs.Bytes++ },
	} {
		to, lie := newHost(t), img
		change(&lie)
		if _, err := to.parts().Stage(t.Context(), lie); !errors.Is(err, pack.ErrInvalid) {
			t.Errorf("%s: Stage() error = %v, want %v", name, err, pack.ErrInvalid)
		}
		if left := to.left(t); len(left) != 0 {
			t.Errorf("%s: left over: %v", name, left)
		}
	}
}

// TestRecover holds that a start takes back what nobody was told of.
func TestRecover(t *testing.T) {
	t.Parallel()
	h := newSource(t)
	writeFile(t, filepath.Join(h.dir, "snapshots", ".unpack-x"), `{"image": "`+imageID+`", "snapshots": ["base", "tip"]}`)
	if err := Recover(t.Context(), h.store, h.images, func(id string) bool { return id == "tip" }); err != nil {
		t.Fatal(err)
	}
	if got := len(h.left(t)); got != 4 {
		t.Errorf("left of what is recorded: %v, want all", h.left(t))
	}
	writeFile(t, filepath.Join(h.dir, "snapshots", ".unpack-x"), `{"image": "`+imageID+`", "snapshots": ["base", "tip"]}`)
	if err := Recover(t.Context(), h.store, h.images, func(string) bool { return false }); err != nil {
		t.Fatal(err)
	}
	if got := h.left(t); len(got) != 0 {
		t.Errorf("left of what is not recorded: %v, want nothing", got)
	}
}

func TestThrottled(t *testing.T) {
	t.Parallel()
	var told []int64
	report := throttled(func(p sandbox.Progress) { told = append(told, p.Done) })
	begin := time.Now()
	for i := range int64(1000) {
		report(pack.Progress{Done: i + 1, Total: 1000})
	}
	if most := int(time.Since(begin)/tellEvery) + 2; len(told) > most || told[len(told)-1] != 1000 {
		t.Errorf("told %d times, the last of %d, want at most %d and all in the end", len(told), told[len(told)-1], most)
	}
	throttled(nil)(pack.Progress{})
}
