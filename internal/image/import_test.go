package image

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"io/fs"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

// someImage is an image as it comes from elsewhere: its description and the contents of its files.
func someImage(t *testing.T, change func(*Image)) (meta []byte, files map[string]string) {
	t.Helper()
	files = map[string]string{"vmlinuz": "kernel", "initramfs": "agent", "rootfs.erofs": "root"}
	blob := func(name string) Blob {
		return Blob{Name: name, Bytes: int64(len(files[name])), SHA256: digest([]byte(files[name]))}
	}
	img := Image{FormatVersion: 1, ID: "0123456789abcdef", Name: "py", CreatedAt: time.Unix(1_700_000_000, 0).UTC(), RootfsType: "erofs",
		Kernel: blob("vmlinuz"), Initramfs: blob("initramfs"), Rootfs: blob("rootfs.erofs"), KernelVersion: "6.1.0", Packages: []string{"python3"}}
	if change != nil {
		change(&img)
	}
	meta, err := json.Marshal(img)
	if err != nil {
		t.Fatal(err)
	}
	return meta, files
}

// takeIn imports an image to its end.
func takeIn(t *testing.T, s *Store, meta []byte, files map[string]string) Image {
	t.Helper()
	in, err := s.Import(meta)
	if err != nil {
		t.Fatal(err)
	}
	defer in.Abort()
	img := in.Image()
	for _, b := range img.blobs() {
		if err := in.Write(t.Context(), *b, strings.NewReader(files[b.Name])); err != nil {
			t.Fatal(err)
		}
	}
	if err := in.Prepare(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := in.Commit(); err != nil {
		t.Fatal(err)
	}
	return img
}

func TestImport(t *testing.T) {
	t.Parallel()
	s, _ := newStore(t)
	meta, files := someImage(t, nil)
	want := takeIn(t, s, meta, files)
	got, err := s.Get("py")
	if err != nil {
		t.Fatal(err)
	}
	for _, b := range got.blobs() {
		data, err := os.ReadFile(b.Path)
		if err != nil || string(data) != files[b.Name] {
			t.Errorf("%s = %q, %v, want %q", b.Name, data, err, files[b.Name])
		}
		b.Path = ""
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("Get() (-want +got):\n%s", diff)
	}
	_, again, err := s.Describe(want.ID)
	if err != nil || !bytes.Equal(again, meta) {
		t.Errorf("Describe() = %s, %v, want %s", again, err, meta)
	}
	if _, err := s.Import(meta); !errors.Is(err, fs.ErrExist) {
		t.Errorf("Import() of an image that is here: error = %v, want %v", err, fs.ErrExist)
	}
	if err := s.RemoveID("py"); err != nil {
		t.Error(err)
	}
	if _, err := s.Get("py"); err != nil {
		t.Errorf("RemoveID() took a name for an id: %v", err)
	}
	if err := errors.Join(s.RemoveID(want.ID), s.RemoveID(want.ID), s.RemoveID("names"), s.RemoveID("..")); err != nil {
		t.Error(err)
	}
	if diff := cmp.Diff([]string{"names"}, tree(t, s.dir)); diff != "" {
		t.Errorf("left behind (-want +got):\n%s", diff)
	}
}

// TestImportNames holds that an image from elsewhere takes no name, and stands in for nothing, that is here.
func TestImportNames(t *testing.T) {
	t.Parallel()
	tests := []struct {
		name, of string
		taken    bool // the name leads to the second image
	}{
		{"free", "other", true},
		{"of another image", "py", false},
		{"the id of another image", "0123456789abcdef", false},
		{"what may be an id", "00112233445566ff", false},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			s, _ := newStore(t)
			first := takeInAs(t, s, "0123456789abcdef", "py")
			second := takeInAs(t, s, "fedcba9876543210", tt.of)
			got, err := s.Get(tt.of)
			if taken := err == nil && got.ID == second.ID; taken != tt.taken {
				t.Errorf("Get(%s) = %s, %v; want the second one: %v", tt.of, got.ID, err, tt.taken)
			}
			if got, err := s.Get(first.ID); err != nil || got.ID != first.ID {
				t.Errorf("Get(%s) = %s, %v", first.ID, got.ID, err)
			}
			if got, _, err := s.Describe(second.ID); err != nil || got.Name != tt.of {
				t.Errorf("Describe() has name %q, %v, want %q", got.Name, err, tt.of)
			}
		})
	}
}

func takeInAs(t *testing.T, s *Store, id, name string) Image {
	t.Helper()
	meta, files := someImage(t, func(i *Image) { i.ID, i.Name = id, name })
	return takeIn(t, s, meta, files)
}

// TestImportRefuses holds that nothing of a description is trusted, and that nothing is left of one that is refused.
func TestImportRefuses(t *testing.T) {
	t.Parallel()
	tests := []struct {
		name   string
		change func(*Image)
		says   string
	}{
		{"path as id", func(i *Image) { i.ID = "../x" }, "id"},
		{"the directory of names", func(i *Image) { i.ID = "names" }, "id"},
		{"no id", func(i *Image) { i.ID = "" }, "id"},
		{"path as name", func(i *Image) { i.Name = "../x" }, "name"},
		{"no name", func(i *Image) { i.Name = "" }, "name"},
		{"another format", func(i *Image) { i.FormatVersion = 2 }, "format 2"},
		{"path as kernel", func(i *Image) { i.Kernel.Name = "../../vmlinuz" }, "vmlinuz"},
		{"a file twice", func(i *Image) { i.Initramfs.Name = "vmlinuz" }, "initramfs"},
		{"a description as root", func(i *Image) { i.Rootfs.Name = "image.json" }, "image.json"},
		{"words for the kernel", func(i *Image) { i.RootfsType = "erofs init=/evil"; i.Rootfs.Name = "rootfs.erofs init=/evil" }, "init=/evil"},
		{"negative size", func(i *Image) { i.Rootfs.Bytes = -1 }, "-1 bytes"},
		{"digest of nothing", func(i *Image) { i.Rootfs.SHA256 = strings.Repeat("X", 64) }, "digest"},
		{"words for a terminal", func(i *Image) { i.KernelVersion = "\x1b[2J" }, "plain text"},
		{"lines for a terminal", func(i *Image) { i.Packages = []string{"a\nb"} }, "plain text"},
		{"a long text", func(i *Image) { i.Suite = strings.Repeat("a", 300) }, "256"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			s, _ := newStore(t)
			meta, _ := someImage(t, tt.change)
			if _, err := s.Import(meta); !errors.Is(err, ErrInvalid) || !strings.Contains(err.Error(), tt.says) {
				t.Errorf("Import() error = %v, want %v that says %q", err, ErrInvalid, tt.says)
			}
			if diff := cmp.Diff([]string{"names"}, tree(t, s.dir)); diff != "" {
				t.Errorf("left behind (-want +got):\n%s", diff)
			}
		})
	}
	for _, meta := range []string{"", "{", "[]", `{"unknown": 1}`, `{} {}`, strings.Repeat(" ", maxMeta+1) + "{}"} {
		if _, err := ParseDescription([]byte(meta)); !errors.Is(err, ErrInvalid) {
			t.Errorf("ParseDescription(%.20q) error = %v, want %v", meta, err, ErrInvalid)
		}
	}
}

// TestImportIsGivenUp holds that an image that did not get all of its files is not published and leaves nothing.
func TestImportIsGivenUp(t *testing.T) {
	t.Parallel()
	s, _ := newStore(t)
	meta, _ := someImage(t, nil)
	in, err := s.Import(meta)
	if err != nil {
		t.Fatal(err)
	}
	img := in.Image()
	if err := in.Write(t.Context(), img.Kernel, io.MultiReader(strings.NewReader("ker"), &failing{})); !errors.Is(err, errInjected) {
		t.Errorf("Write() error = %v, want %v", err, errInjected)
	}
	ended, cancel := context.WithCancelCause(t.Context())
	cancel(errInjected)
	if err := in.Write(ended, img.Rootfs, strings.NewReader("root")); !errors.Is(err, errInjected) {
		t.Errorf("Write() after the end error = %v, want %v", err, errInjected)
	}
	if err := in.Prepare(t.Context()); !errors.Is(err, ErrCorrupt) {
		t.Errorf("Prepare() error = %v, want %v", err, ErrCorrupt)
	}
	if err := errors.Join(in.Abort(), in.Abort()); err != nil {
		t.Error(err)
	}
	if diff := cmp.Diff([]string{"names"}, tree(t, s.dir)); diff != "" {
		t.Errorf("left behind (-want +got):\n%s", diff)
	}
}

type failing struct{}

func (*failing) Read([]byte) (int, error) { return 0, errInjected }

func TestPrune(t *testing.T) {
	t.Parallel()
	s, _ := newStore(t)
	for i, id := range []string{"aaaaaaaaaaaaaaaa", "bbbbbbbbbbbbbbbb", "cccccccccccccccc"} {
		name := []string{"py", "py", "py"}[i] // the first has the name, the others none
		takeInAs(t, s, id, name)
	}
	used := func(id string) error {
		if id == "cccccccccccccccc" {
			return errInjected
		}
		return nil
	}
	if got, err := s.Prune(100*365*24*time.Hour, used); err != nil || len(got) != 0 {
		t.Errorf("Prune() of young ones = %v, %v, want none", got, err)
	}
	got, err := s.Prune(time.Minute, used)
	if err != nil || len(got) != 1 || got[0].ID != "bbbbbbbbbbbbbbbb" {
		t.Errorf("Prune() = %v, %v, want the one that nobody uses", got, err)
	}
	left, err := s.List()
	if err != nil || len(left) != 2 {
		t.Errorf("left = %v, %v, want two", left, err)
	}
}
