package image

import (
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

func TestCustomise(t *testing.T) {
	needRoot(t)
	tree, outside := t.TempDir(), t.TempDir()
	if err := fakeRoot(tree); err != nil {
		t.Fatal(err)
	}
	resolv := filepath.Join(outside, "resolv.conf")
	if err := os.WriteFile(resolv, []byte("the host's"), 0o644); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(resolv, filepath.Join(tree, "etc/resolv.conf")); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(outside, filepath.Join(tree, "var/log")); err != nil {
		t.Fatal(err)
	}
	if err := customise(tree, time.Now().Add(-time.Hour)); err != nil {
		t.Fatal(err)
	}

	read := func(name string) string {
		t.Helper()
		raw, err := os.ReadFile(filepath.Join(tree, name))
		if err != nil {
			t.Error(err)
		}
		return string(raw)
	}
	for name, want := range map[string]string{
		"etc/passwd":         "root:x:0:0:root:/root:/bin/bash\nuser:x:1000:1000::/home/user:/bin/bash\n",
		"etc/group":          "root:x:0:\nuser:x:1000:\n",
		"etc/shadow":         "root:*:19000:0:99999:7:::\nuser:*:19000:0:99999:7:::\n",
		"etc/gshadow":        "root:*::\nuser:!::\n",
		"etc/sudoers.d/user": "user ALL=(ALL:ALL) NOPASSWD: ALL\n",
		"etc/machine-id":     "",
		"etc/hostname":       "localhost\n",
		"home/user/.profile": "# profile\n",
	} {
		if d := cmp.Diff(read(name), want); d != "" {
			t.Errorf("%s (-got +want):\n%s", name, d)
		}
	}
	if raw, err := os.ReadFile(resolv); err != nil || string(raw) != "the host's" {
		t.Errorf("a link led out of the tree: %q, %v", raw, err)
	}
	for _, gone := range []string{"var/lib/apt/lists/some_list", "var/cache/apt/pkgcache.bin", "etc/apt/apt.conf.d/99mmdebstrap"} {
		if _, err := os.Lstat(filepath.Join(tree, gone)); !os.IsNotExist(err) {
			t.Errorf("%s is still there", gone)
		}
	}
	info, err := os.Stat(filepath.Join(tree, "home/user"))
	if err != nil {
		t.Fatal(err)
	}
	if st := info.Sys().(*syscall.Stat_t); st.Uid != guestUID || st.Gid != guestUID {
		t.Errorf("home belongs to %d:%d, want %d:%d", st.Uid, st.Gid, guestUID, guestUID)
	}
	if info, err := os.Stat(filepath.Join(tree, "etc/sudoers.d/user")); err != nil || info.Mode().Perm() != 0o440 {
		t.Errorf("sudoers: %v, %v, want mode 0440", info.Mode(), err)
	}

	if err := customise(tree, time.Now().Add(-time.Hour)); err != nil {
		t.Fatalf("second customise: %v", err)
	}
	if n := strings.Count(read("etc/passwd"), "user:x:"); n != 1 {
		t.Errorf("the user is there %d times, want once", n)
	}
}

func TestClampTimes(t *testing.T) {
	tree := t.TempDir()
	old, newest := time.Unix(1_000_000_000, 0), time.Unix(1_500_000_000, 0)
	for name, when := range map[string]time.Time{"old.py": old, "newest.py": newest, "generated": time.Now()} {
		path := filepath.Join(tree, name)
		if err := os.WriteFile(path, nil, 0o644); err != nil {
			t.Fatal(err)
		}
		if err := os.Chtimes(path, when, when); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Symlink("/nowhere", filepath.Join(tree, "link")); err != nil {
		t.Fatal(err)
	}
	root, err := os.OpenRoot(tree)
	if err != nil {
		t.Fatal(err)
	}
	defer root.Close()
	if err := clampTimes(root, time.Now().Add(-time.Minute)); err != nil {
		t.Fatal(err)
	}
	for name, want := range map[string]time.Time{"old.py": old, "newest.py": newest, "generated": newest, "link": newest, ".": newest} {
		info, err := fs.Stat(root.FS(), ".")
		if name != "." {
			info, err = root.Lstat(name)
		}
		if err != nil {
			t.Fatal(err)
		}
		if !info.ModTime().Equal(want) {
			t.Errorf("%s: time %v, want %v", name, info.ModTime(), want)
		}
	}
}
