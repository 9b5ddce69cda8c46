package agent

import (
	"bytes"
	"errors"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"
)

func TestLookUser(t *testing.T) {
	root := t.TempDir()
	write := func(name, text string) {
		t.Helper()
		if err := os.MkdirAll(root+"/etc", 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(root+"/etc/"+name, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	write("passwd", "# comment\nroot:x:0:0:root:/root:/bin/bash\nbroken:x\nuser:x:1000:1000::/home/user:/bin/bash\nbare:x:7:8:::\nodd:x:notanumber:1::/:/bin/sh\n")
	write("group", "root:x:0:\nsudo:x:27:user,other\nuser:x:1000:user\ndocker:x:998:user\n")
	tests := []struct {
		spec string
		want *user // nil: an error
	}{
		{"", &user{name: "root", home: "/root", shell: "/bin/bash", groups: []uint32{0}}},
		{"root", &user{name: "root", home: "/root", shell: "/bin/bash", groups: []uint32{0}}},
		{"user", &user{name: "user", home: "/home/user", shell: "/bin/bash", uid: 1000, gid: 1000, groups: []uint32{1000, 27, 998}}},
		{"1000", &user{name: "user", home: "/home/user", shell: "/bin/bash", uid: 1000, gid: 1000, groups: []uint32{1000, 27, 998}}},
		{"user:docker", &user{name: "user", home: "/home/user", shell: "/bin/bash", uid: 1000, gid: 998, groups: []uint32{998, 27, 1000}}},
		{"user:5", &user{name: "user", home: "/home/user", shell: "/bin/bash", uid: 1000, gid: 5, groups: []uint32{5, 27, 1000, 998}}},
		{"4242", &user{name: "4242", home: "/", shell: "/bin/sh", uid: 4242, gid: 4242, groups: []uint32{4242}}},
		{"bare", &user{name: "bare", home: "/", shell: "/bin/sh", uid: 7, gid: 8, groups: []uint32{8}}},
		{"nobody", nil}, {"user:none", nil}, {"odd", nil}, {"-1", nil}, {"99999999999", nil}, {"../etc", nil},
	}
	for _, tc := range tests {
		t.Run(tc.spec, func(t *testing.T) {
			got, err := lookUser(root, tc.spec)
			if (err != nil) != (tc.want == nil) {
				t.Fatalf("lookUser: got %v, %v", got, err)
			}
			if diff := cmp.Diff(got, tc.want, cmp.AllowUnexported(user{})); diff != "" {
				t.Errorf("user (-got +want):\n%s", diff)
			}
		})
	}
	if u, err := lookUser(t.TempDir(), ""); err != nil || u.uid != 0 || u.home != "/root" {
		t.Errorf("root without a passwd file: got %+v, %v, want uid 0", u, err)
	}
}

func TestLookPath(t *testing.T) {
	dir := t.TempDir()
	for name, mode := range map[string]os.FileMode{"run": 0o755, "data": 0o644} {
		if err := os.WriteFile(dir+"/"+name, nil, mode); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Mkdir(dir+"/sub", 0o755); err != nil {
		t.Fatal(err)
	}
	tests := []struct {
		name, cmd, cwd, path, want string
		err                        error
	}{
		{"on the path", "run", "/", "/nowhere:" + dir, dir + "/run", nil},
		{"absolute", dir + "/run", "/", "", dir + "/run", nil},
		{"relative to cwd", "./run", dir, "", dir + "/run", nil},
		{"from below cwd", "../run", dir + "/sub", "", dir + "/run", nil},
		{"empty element is cwd", "run", dir, ":/nowhere", dir + "/run", nil},
		{"relative element", "run", dir + "/sub", "..", dir + "/run", nil},
		{"missing", "walk", "/", dir, "", unix.ENOENT},
		{"not executable", "data", "/", dir, "", unix.EACCES},
		{"directory", "sub", "/", dir, "", unix.EACCES},
		{"empty path is cwd", "run", dir, "", dir + "/run", nil},
	}
	for _, tc := range tests {
		t.Run(tc.name, func(t *testing.T) {
			got, err := lookPath(tc.cmd, tc.cwd, tc.path)
			if !errors.Is(err, tc.err) || (err == nil && got != tc.want) {
				t.Errorf("lookPath: got %q, %v, want %q, %v", got, err, tc.want, tc.err)
			}
		})
	}
}

func TestMergeEnv(t *testing.T) {
	got := mergeEnv([]string{"A=1", "B=2"}, nil, []string{"B=3", "C="}, []string{"A=4=5"})
	if diff := cmp.Diff(got, []string{"A=4=5", "B=3", "C="}); diff != "" {
		t.Errorf("environment (-got +want):\n%s", diff)
	}
	if got := getEnv(got, "A"); got != "4=5" {
		t.Errorf("A: got %q, want %q", got, "4=5")
	}
	if got := getEnv(got, "D"); got != "" {
		t.Errorf("D: got %q, want none", got)
	}
}

func TestKernelWords(t *testing.T) {
	w := kernelWords(strings.Fields("quiet forkd.root=/dev/vdb forkd.rootfstype= forkd.root=/dev/vdc x=forkd.root"))
	for _, tc := range []struct{ name, want string }{{"forkd.root", "/dev/vdc"}, {"forkd.rootfstype", "default"}, {"forkd.other", "default"}} {
		if got := w.value(tc.name, "default"); got != tc.want {
			t.Errorf("%s: got %q, want %q", tc.name, got, tc.want)
		}
	}
}

func TestCaptureNeverEndingWriter(t *testing.T) {
	// /dev/zero never blocks and never ends: drain must come back all the same.
	fd, err := open("/dev/zero", unix.O_RDONLY)
	if err != nil {
		t.Fatal(err)
	}
	c := capture{fd: fd, limit: 10}
	c.drain()
	c.close()
	if data, cut := c.take(0); !bytes.Equal(data, make([]byte, 10)) || !cut {
		t.Errorf("capture: got %d bytes, truncated %v, want 10, true", len(data), cut)
	}
}

func TestReadFileAndDir(t *testing.T) {
	dir := t.TempDir()
	big := bytes.Repeat([]byte("0123456789"), 10000)
	if err := os.WriteFile(dir+"/big", big, 0o644); err != nil {
		t.Fatal(err)
	}
	if got, err := readFile(dir + "/big"); err != nil || !bytes.Equal(got, big) {
		t.Errorf("readFile: got %d bytes, %v, want %d", len(got), err, len(big))
	}
	if _, err := readFile(dir + "/none"); !errors.Is(err, unix.ENOENT) {
		t.Errorf("readFile of nothing: got %v, want %v", err, unix.ENOENT)
	}
	if err := mkdirAll(dir+"/a/b/c", 0o755); err != nil {
		t.Errorf("mkdirAll: %v", err)
	}
	if err := mkdirAll(dir+"/a/b/c/", 0o755); err != nil {
		t.Errorf("mkdirAll again: %v", err)
	}
	names, err := readDir(dir)
	if err != nil || len(names) != 2 {
		t.Errorf("readDir: got %q, %v, want big and a", names, err)
	}
}

func TestRemoveBelowStaysOnItsFileSystem(t *testing.T) {
	dir := t.TempDir()
	if err := os.MkdirAll(dir+"/a/b", 0o755); err != nil {
		t.Fatal(err)
	}
	outside := t.TempDir()
	for _, name := range []string{dir + "/f", dir + "/a/g", dir + "/a/b/h", outside + "/keep"} {
		if err := os.WriteFile(name, []byte("x"), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Symlink(outside, dir+"/a/link"); err != nil {
		t.Fatal(err)
	}
	fd, err := open(dir, unix.O_RDONLY|unix.O_DIRECTORY)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	removeTree(fd)
	for _, name := range []string{dir + "/f", dir + "/a/g", dir + "/a/b/h"} {
		if exists(name) {
			t.Errorf("%s is still there", name)
		}
	}
	if !exists(outside + "/keep") {
		t.Error("a file behind a symbolic link was removed")
	}
}

func TestUeventsWait(t *testing.T) {
	u, err := newUevents()
	if err != nil {
		t.Skipf("no uevents here: %v", err)
	}
	defer u.close()
	if err := u.waitFor(time.Minute, func() bool { return true }); err != nil {
		t.Errorf("waitFor what is there: %v", err)
	}
	if err := u.waitFor(10*time.Millisecond, func() bool { return false }); !errors.Is(err, errNoEvent) {
		t.Errorf("waitFor what never comes: got %v, want %v", err, errNoEvent)
	}
}

func TestRunFlags(t *testing.T) {
	for _, tc := range []struct {
		name string
		args []string
		want int
		text string
	}{
		{"none", nil, 2, "-serve-unix"},
		{"help", []string{"-h"}, 2, "process 1"},
		{"unknown", []string{"-x"}, 2, "not defined"},
		{"stray argument", []string{"-serve-unix", "/tmp/x", "y"}, 2, "-serve-unix"},
		{"path that can't be", []string{"-serve-unix", "/no/such/dir/s"}, 1, "/no/such/dir/s"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			var out bytes.Buffer
			if got := Run(append([]string{"forkd-agent"}, tc.args...), &out); got != tc.want {
				t.Errorf("status: got %d, want %d", got, tc.want)
			}
			if !strings.Contains(out.String(), tc.text) {
				t.Errorf("stderr: got %q, want it to contain %q", out.String(), tc.text)
			}
		})
	}
}
