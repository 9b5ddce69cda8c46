package main

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/forkd/forkd/test/lab"
)

// TestNoFirecracker: without one its tests are skipped, and said to be, or can't be run.
func TestNoFirecracker(t *testing.T) {
	s := suiteCmd{Where: "lab", Engine: []string{firecrackerEngine}, Monitors: monitors{Firecracker: filepath.Join(t.TempDir(), "none")}}
	out := captured(t, func() error { return s.Run(t.Context(), &cli{}) })
	for _, want := range []string{`"Action":"skip"`, "test/e2e (lab, firecracker)", "no Firecracker at hand", "make test-firecracker"} {
		if !strings.Contains(out, want) {
			t.Errorf("what is printed lacks %q:\n%s", want, out)
		}
	}
	s.Require = true
	if err := s.Run(t.Context(), &cli{}); err == nil || !strings.Contains(err.Error(), "FORKD_FIRECRACKER") {
		t.Errorf("where it is required: got %v, want an error that says how to name one", err)
	}
}

// TestNoLab: where no lab can be had nothing is built for it, and all is skipped, or can't be run.
func TestNoLab(t *testing.T) {
	c := &cli{Cache: t.TempDir(), Mem: 1 << 40}
	s := suiteCmd{Where: "lab", Engine: []string{"qemu-kvm"}, Short: true}
	out := captured(t, func() error { return s.Run(t.Context(), c) })
	if got := strings.Count(out, `"Action":"skip"`); got != 3 || !strings.Contains(out, "no lab on this host") {
		t.Errorf("%d jobs are skipped, want 3, with the reason:\n%s", got, out)
	}
	s.Require = true
	if err := s.Run(t.Context(), c); !errors.Is(err, lab.ErrUnavailable) {
		t.Errorf("where it is required: got %v, want lab.ErrUnavailable", err)
	}
	if left, _ := os.ReadDir(c.Cache); len(left) != 0 {
		t.Errorf("in the cache there are %v", left)
	}
}

// captured returns what a function prints to the standard output.
func captured(t *testing.T, do func() error) string {
	t.Helper()
	f, err := os.Create(filepath.Join(t.TempDir(), "out"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	old := os.Stdout
	os.Stdout = f
	err = do()
	os.Stdout = old
	if err != nil {
		t.Errorf("got the error %v", err)
	}
	out, err := os.ReadFile(f.Name())
	if err != nil {
		t.Fatal(err)
	}
	return string(out)
}

// TestJobs: both sets are for the engine that they name, and what costs most is not in the short one.
func TestJobs(t *testing.T) {
	titles := func(s suiteCmd) (all []string) {
		for _, engine := range s.Engine {
			for _, j := range s.jobs(engine) {
				all = append(all, j.title("lab"))
			}
		}
		return all
	}
	engines := []string{"qemu-kvm", "firecracker"}
	for name, tt := range map[string]struct {
		suite suiteCmd
		want  []string
	}{
		"short": {suiteCmd{Engine: engines, Short: true}, []string{"test/e2e (lab, qemu-kvm)", "test/e2e (lab, qemu-kvm, service)", "test/e2e (lab, firecracker)"}},
		"all": {suiteCmd{Engine: engines}, []string{"test/e2e (lab, qemu-kvm, contract)", "test/e2e (lab, qemu-kvm)", "test/e2e (lab, qemu-kvm, service)",
			"test/e2e (lab, firecracker, contract)", "test/e2e (lab, firecracker)", "test/e2e (lab, firecracker, service)"}},
		"with a jailer": {suiteCmd{Engine: engines[1:], Monitors: monitors{Jailer: "jailer"}}, []string{"test/e2e (lab, firecracker, contract)", "test/e2e (lab, firecracker)",
			"test/e2e (lab, firecracker, service)", "test/e2e (lab, firecracker, jailer)"}},
		"some": {suiteCmd{Engine: engines[:1], Only: "TestX"}, []string{"test/e2e (lab, qemu-kvm)"}},
	} {
		if diff := cmp.Diff(tt.want, titles(tt.suite)); diff != "" {
			t.Errorf("%s (-want +got):\n%s", name, diff)
		}
	}
}

// TestStage: what is given is there by its names, and what was given before is not.
func TestStage(t *testing.T) {
	cache, src := t.TempDir(), t.TempDir()
	for _, name := range []string{"tree/sub/file", "program"} {
		path := filepath.Join(src, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(name), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Symlink("sub/file", filepath.Join(src, "tree", "link")); err != nil {
		t.Fatal(err)
	}
	for _, given := range []map[string]string{{"old": filepath.Join(src, "program")}, {"images": filepath.Join(src, "tree"), "forkd": filepath.Join(src, "program")}} {
		dir, release, err := stage(cache, given)
		if err != nil {
			t.Fatal(err)
		}
		release()
		var got []string
		for _, pattern := range []string{"*", "*/*"} {
			found, _ := filepath.Glob(filepath.Join(dir, pattern))
			for _, path := range found {
				rel, _ := filepath.Rel(dir, path)
				got = append(got, rel)
			}
		}
		want := []string{"old"}
		if given["old"] == "" {
			want = []string{"forkd", "images", "images/link", "images/sub"}
			if b, err := os.ReadFile(filepath.Join(dir, "images", "link")); err != nil || string(b) != "tree/sub/file" {
				t.Errorf("through a link: %q, %v", b, err)
			}
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("what is given (-want +got):\n%s", diff)
		}
	}
}
