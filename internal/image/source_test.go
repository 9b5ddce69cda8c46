package image

import (
	"bytes"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

func at(offset int, magic string, more ...byte) []byte {
	b := make([]byte, 4096)
	copy(b[offset:], magic)
	copy(b[1024+96:], more)
	return b
}

func TestSniff(t *testing.T) {
	tests := []struct {
		name string
		head []byte
		want source
		err  string
	}{
		{"erofs", at(1024, "\xe2\xe1\xf5\xe0"), source{kind: fromImage, fsType: "erofs"}, ""},
		{"squashfs", at(0, "hsqs"), source{kind: fromImage, fsType: "squashfs"}, ""},
		{"ext4", at(1024+56, "\x53\xef"), source{kind: fromImage, fsType: "ext4"}, ""},
		{"ext4 with a journal to replay", at(1024+56, "\x53\xef", 4), source{}, "e2fsck"},
		{"tar", at(257, "ustar\x0000"), source{kind: fromArchive, fsType: "erofs"}, ""},
		{"gzip", []byte("\x1f\x8b\x08"), source{kind: fromArchive, fsType: "erofs"}, ""},
		{"zstd", []byte("\x28\xb5\x2f\xfd"), source{kind: fromArchive, fsType: "erofs"}, ""},
		{"xz", []byte("\xfd7zXZ\x00"), source{kind: fromArchive, fsType: "erofs"}, ""},
		{"text", []byte("hello"), source{}, "neither"},
		{"empty", nil, source{}, "neither"},
		{"cut off", at(1024+56, "\x53\xef")[:1024+58], source{}, "neither"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			got, err := sniff(tt.head)
			if got != tt.want {
				t.Errorf("sniff() = %+v, want %+v", got, tt.want)
			}
			if (err == nil) != (tt.err == "") || err != nil && !strings.Contains(err.Error(), tt.err) {
				t.Errorf("sniff() error = %v, want one about %q", err, tt.err)
			}
		})
	}
}

// TestImportTree builds images of a directory and of a tar archive of it, with the real tools.
func TestImportTree(t *testing.T) {
	needRoot(t)
	needTools(t, "mkfs.erofs", "fsck.erofs", "tar")
	tree := t.TempDir()
	if err := fakeRoot(tree); err != nil {
		t.Fatal(err)
	}
	if err := os.Chown(filepath.Join(tree, "etc/shadow"), 0, 42); err != nil {
		t.Fatal(err)
	}
	archive := filepath.Join(t.TempDir(), "root.tar.gz")
	if out, err := exec.Command("tar", "-C", tree, "-czf", archive, ".").CombinedOutput(); err != nil {
		t.Fatalf("tar: %v: %s", err, out)
	}
	s, r := newStore(t)
	r.real = map[string]bool{"mkfs.erofs": true, "tar": true}
	fromDir := mustImport(t, s, BuildSpec{Name: "dir", Rootfs: tree})
	fromTar := mustImport(t, s, BuildSpec{Name: "tar", Rootfs: archive})
	for _, img := range []Image{fromDir, fromTar} {
		if !img.Python || img.RootfsType != "erofs" {
			t.Errorf("image %s = %+v, want erofs with python", img.Name, img)
		}
		out := t.TempDir()
		// fsck also checks the superblock's checksum, which fixErofsTime has to renew.
		if msg, err := exec.Command("fsck.erofs", "--extract="+filepath.Join(out, "x"), img.Rootfs.Path).CombinedOutput(); err != nil {
			t.Fatalf("fsck.erofs: %v: %s", err, msg)
		}
		if raw, err := os.ReadFile(filepath.Join(out, "x/etc/hostname")); err != nil || string(raw) != "the-host\n" {
			t.Errorf("image %s: hostname %q, %v: a root file system of one's own is to be taken as it is", img.Name, raw, err)
		}
	}
	if again := mustImport(t, s, BuildSpec{Name: "tar", Rootfs: archive}); again.ID != fromTar.ID {
		t.Errorf("importing the same archive again made image %s, want %s", again.ID, fromTar.ID)
	}
	other := mustImport(t, s, BuildSpec{Name: "tar2", Rootfs: archive})
	if other.Rootfs.SHA256 != fromTar.Rootfs.SHA256 {
		t.Error("the same archive made two different root file systems")
	}

	if err := os.WriteFile(archive, []byte("\x1f\x8bnot really"), 0o644); err != nil {
		t.Fatal(err)
	}
	_, err := s.Build(t.Context(), BuildSpec{Name: "broken", Rootfs: archive}, nil)
	if !errors.Is(err, ErrInvalid) || !strings.Contains(err.Error(), "tar failed") {
		t.Errorf("Build() of a broken archive: error = %v, want what tar said", err)
	}
	if left, err := filepath.Glob(filepath.Join(s.dir, stagingPrefix+"*")); err != nil || len(left) > 0 {
		t.Errorf("left behind: %v, %v", left, err)
	}
}

func mustImport(t *testing.T, s *Store, spec BuildSpec) Image {
	t.Helper()
	img, err := s.Build(t.Context(), spec, nil)
	if err != nil {
		t.Fatal(err)
	}
	return img
}

func needTools(t *testing.T, names ...string) {
	t.Helper()
	for _, name := range names {
		if _, err := lookPath(name); err != nil {
			t.Skipf("%s is not installed", name)
		}
	}
}

func TestFixErofsTime(t *testing.T) {
	image := func(time byte) string {
		t.Helper()
		b := make([]byte, 8192)
		copy(b[1024:], "\xe2\xe1\xf5\xe0")
		b[1024+erofsFeaturesAt] = erofsHasChecksum
		b[1024+erofsBuildTimeAt] = time
		path := filepath.Join(t.TempDir(), "image")
		if err := os.WriteFile(path, b, 0o644); err != nil {
			t.Fatal(err)
		}
		if err := fixErofsTime(path); err != nil {
			t.Fatal(err)
		}
		return path
	}
	one, err := os.ReadFile(image(1))
	if err != nil {
		t.Fatal(err)
	}
	two, err := os.ReadFile(image(2))
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(one, two) {
		t.Error("images that differ in their time alone are still different")
	}
	if bytes.Equal(one[1024+erofsChecksumAt:1024+erofsChecksumAt+4], make([]byte, 4)) {
		t.Error("the checksum was not renewed")
	}
	path := filepath.Join(t.TempDir(), "other")
	if err := os.WriteFile(path, make([]byte, 8192), 0o644); err != nil {
		t.Fatal(err)
	}
	if err := fixErofsTime(path); err == nil {
		t.Error("fixErofsTime() of something else: no error")
	}
	if err := fixErofsTime(path + "x"); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("fixErofsTime() of nothing: error = %v, want %v", err, os.ErrNotExist)
	}
}

// Nobody may ever write to a pipe: a build that waits for it would hold up all others.
func TestPipesAreNoFiles(t *testing.T) {
	pipe := filepath.Join(t.TempDir(), "pipe")
	if err := unix.Mkfifo(pipe, 0o600); err != nil {
		t.Fatal(err)
	}
	modules := t.TempDir()
	if err := unix.Mkfifo(filepath.Join(modules, "modules.builtin"), 0o600); err != nil {
		t.Fatal(err)
	}
	kernel := filepath.Join(t.TempDir(), "vmlinuz")
	if err := os.WriteFile(kernel, fakeBzImage("6.1.2"), 0o600); err != nil {
		t.Fatal(err)
	}
	for name, spec := range map[string]BuildSpec{
		"kernel":  {Kernel: pipe},
		"rootfs":  {Rootfs: pipe},
		"modules": {Kernel: kernel, Modules: modules},
	} {
		t.Run(name, func(t *testing.T) {
			s, _ := newStore(t)
			spec.Name = "x"
			done := make(chan error, 1)
			go func() {
				_, err := s.Build(t.Context(), spec, nil)
				done <- err
			}()
			select {
			case err := <-done:
				if !errors.Is(err, ErrInvalid) || !strings.Contains(err.Error(), "pipe") {
					t.Errorf("Build() error = %v, want one that says that it is a pipe", err)
				}
			case <-time.After(20 * time.Second):
				t.Fatal("the build waits for somebody to write to the pipe")
			}
		})
	}
}
