package image

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"
)

func mustBuild(t *testing.T, s *Store, name string) Image {
	t.Helper()
	img, err := s.Build(t.Context(), BuildSpec{Name: name}, nil)
	if err != nil {
		t.Fatal(err)
	}
	return img
}

func TestListAndRemove(t *testing.T) {
	needRoot(t)
	s, _ := newStore(t)
	a, b := mustBuild(t, s, "a"), mustBuild(t, s, "b")
	ids := func() map[string]string {
		t.Helper()
		list, err := s.List()
		if err != nil {
			t.Fatal(err)
		}
		m := map[string]string{}
		for _, img := range list {
			m[img.ID] = img.Name
		}
		return m
	}
	if d := cmp.Diff(ids(), map[string]string{a.ID: "a", b.ID: "b"}); d != "" {
		t.Errorf("List() (-got +want):\n%s", d)
	}

	errUsed := errors.New("used by a snapshot")
	err := s.Remove("a", func(id string) error {
		if id != a.ID {
			t.Errorf("inUse was asked about %s, want %s", id, a.ID)
		}
		return errUsed
	})
	if !errors.Is(err, errUsed) {
		t.Errorf("Remove() of a used image: error = %v, want %v", err, errUsed)
	}
	if err := s.Remove("a", func(string) error { return nil }); err != nil {
		t.Errorf("Remove() error = %v", err)
	}
	if err := s.Remove("a", nil); !errors.Is(err, ErrNotFound) {
		t.Errorf("Remove() again: error = %v, want %v", err, ErrNotFound)
	}
	if err := s.Remove(b.ID, nil); err != nil {
		t.Errorf("Remove() by id: error = %v", err)
	}
	if d := cmp.Diff(tree(t, s.dir), []string{"names"}); d != "" {
		t.Errorf("left behind (-got +want):\n%s", d)
	}
}

func TestGetRefuses(t *testing.T) {
	s, _ := newStore(t)
	for _, name := range []string{"", ".", "..", "names", "none", "../images", "a/b", strings.Repeat("a", 65), ".staging-1"} {
		if _, err := s.Get(name); !errors.Is(err, ErrNotFound) {
			t.Errorf("Get(%q) error = %v, want %v", name, err, ErrNotFound)
		}
		if err := s.Remove(name, nil); !errors.Is(err, ErrNotFound) {
			t.Errorf("Remove(%q) error = %v, want %v", name, err, ErrNotFound)
		}
	}
}

func TestDamagedImages(t *testing.T) {
	needRoot(t)
	tests := []struct {
		name   string
		damage func(dir string) error
		want   string
	}{
		{"truncated root", func(dir string) error { return os.Truncate(filepath.Join(dir, "rootfs.erofs"), 5) }, "rootfs.erofs"},
		{"no kernel", func(dir string) error { return os.Remove(filepath.Join(dir, "vmlinuz")) }, "vmlinuz"},
		{"unreadable description", func(dir string) error { return os.WriteFile(filepath.Join(dir, "image.json"), []byte("{"), 0o644) }, "image.json"},
		{"description of another version", func(dir string) error {
			return os.WriteFile(filepath.Join(dir, "image.json"), []byte(`{"format_version": 99}`), 0o644)
		}, "format 99"},
		{"path in the description", func(dir string) error {
			raw, err := os.ReadFile(filepath.Join(dir, "image.json"))
			if err != nil {
				return err
			}
			return os.WriteFile(filepath.Join(dir, "image.json"), []byte(strings.ReplaceAll(string(raw), `"vmlinuz"`, `"../../../etc/passwd"`)), 0o644)
		}, "passwd"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			s, _ := newStore(t)
			img, good := mustBuild(t, s, "bad"), mustBuild(t, s, "good")
			if err := tt.damage(filepath.Join(s.dir, img.ID)); err != nil {
				t.Fatal(err)
			}
			for _, key := range []string{"bad", img.ID} {
				_, err := s.Get(key)
				if !errors.Is(err, ErrCorrupt) || !strings.Contains(err.Error(), tt.want) || !strings.Contains(err.Error(), img.ID) {
					t.Errorf("Get(%s) error = %v, want %v of %s about %q", key, err, ErrCorrupt, img.ID, tt.want)
				}
			}
			list, err := s.List()
			if !errors.Is(err, ErrCorrupt) {
				t.Errorf("List() error = %v, want %v", err, ErrCorrupt)
			}
			want := []string{good.ID}
			if tt.name == "truncated root" { // good shares its root with bad, by way of the cache
				want = nil
			}
			var got []string
			for _, img := range list {
				got = append(got, img.ID)
			}
			if d := cmp.Diff(got, want); d != "" {
				t.Errorf("List() (-got +want):\n%s", d)
			}
			if err := s.Remove("bad", nil); err != nil {
				t.Errorf("Remove() error = %v", err)
			}
		})
	}
}

func TestNameOverId(t *testing.T) {
	needRoot(t)
	s, _ := newStore(t)
	first := mustBuild(t, s, "a")
	second := mustBuild(t, s, first.ID) // a name that looks like an id
	if got, err := s.Get(first.ID); err != nil || got.ID != second.ID {
		t.Errorf("Get() = %s, %v, want the name's image %s", got.ID, err, second.ID)
	}
}

func TestOpenRemovesLeftovers(t *testing.T) {
	s, _ := newStore(t)
	live, err := newStaging(s.dir)
	if err != nil {
		t.Fatal(err)
	}
	for _, dir := range []string{filepath.Join(s.dir, ".staging-1", "root"), filepath.Join(s.cacheDir, ".staging-2")} {
		if err := os.MkdirAll(dir, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := Open(s.dir, s.cacheDir, nil); err != nil {
		t.Fatal(err)
	}
	if d := cmp.Diff(tree(t, s.dir), []string{filepath.Base(live.dir), "names"}); d != "" {
		t.Errorf("store (-got +want):\n%s", d)
	}
	if d := cmp.Diff(tree(t, s.cacheDir), []string(nil)); d != "" {
		t.Errorf("cache (-got +want):\n%s", d)
	}
	if err := live.remove(); err != nil {
		t.Errorf("remove() error = %v", err)
	}
}

func TestRemoveTreeRefusesMounts(t *testing.T) {
	needRoot(t)
	dir := t.TempDir()
	inside := filepath.Join(dir, "tree", "dev")
	if err := os.MkdirAll(inside, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := unix.Mount("none", inside, "tmpfs", 0, ""); err != nil {
		t.Skipf("can't mount here: %v", err)
	}
	err := removeTree(filepath.Join(dir, "tree"))
	if uerr := unix.Unmount(inside, 0); uerr != nil {
		t.Fatal(uerr)
	}
	if err == nil || !strings.Contains(err.Error(), "umount "+inside) {
		t.Errorf("removeTree() error = %v, want one that names the mount", err)
	}
	if err := removeTree(filepath.Join(dir, "tree")); err != nil {
		t.Errorf("removeTree() after umount: error = %v", err)
	}
}
