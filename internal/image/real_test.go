package image

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/forkd/forkd/internal/image/agentbin"
)

// newRealStore returns a store that uses the real tools. Kernels come from the shared cache, if there is one.
func newRealStore(t *testing.T) *Store {
	t.Helper()
	if os.Getenv("FORKD_VM_TESTS") != "1" {
		t.Skip("downloads Debian packages; set FORKD_VM_TESTS=1 to run it")
	}
	needRoot(t)
	needTools(t, "mmdebstrap", "mkfs.erofs", "apt-get", "dpkg")
	cache := t.TempDir()
	if shared := os.Getenv("FORKD_CACHE"); shared != "" {
		if err := os.MkdirAll(filepath.Join(shared, "kernels"), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.Symlink(filepath.Join(shared, "kernels"), filepath.Join(cache, "kernels")); err != nil {
			t.Fatal(err)
		}
	}
	s, err := Open(t.TempDir(), cache, []byte("agent"))
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// checkNothingLeft looks for what a build that failed might leave: files, mounts, processes.
func checkNothingLeft(t *testing.T, s *Store) {
	t.Helper()
	if d := cmp.Diff(tree(t, s.dir), []string{"names"}); d != "" {
		t.Errorf("left behind in the store (-got +want):\n%s", d)
	}
	for _, e := range tree(t, s.cacheDir) {
		if !strings.HasPrefix(e, "kernels") {
			t.Errorf("left behind in the cache: %s", e)
		}
	}
	for _, dir := range []string{s.dir, s.cacheDir} {
		if mounts, err := os.ReadFile("/proc/self/mountinfo"); err != nil || strings.Contains(string(mounts), dir) {
			t.Errorf("a mount below %s was left, %v", dir, err)
		}
		roots, err := filepath.Glob("/proc/[0-9]*/root")
		if err != nil {
			t.Fatal(err)
		}
		for _, link := range roots {
			if to, err := os.Readlink(link); err == nil && strings.HasPrefix(to, dir) {
				t.Errorf("process %s still runs in %s", filepath.Dir(link), to)
			}
		}
	}
}

func TestRealBuildOfUnknownPackage(t *testing.T) {
	s := newRealStore(t)
	_, err := s.Build(t.Context(), BuildSpec{Name: "x", Packages: []string{"no-such-package-anywhere"}}, nil)
	if !errors.Is(err, ErrInvalid) || !strings.Contains(err.Error(), "no-such-package-anywhere") {
		t.Errorf("Build() error = %v, want one that names the package", err)
	}
	checkNothingLeft(t, s)
}

// TestRealBuildCancelled ends builds while mmdebstrap downloads and while it runs programs inside the new root.
func TestRealBuildCancelled(t *testing.T) {
	for _, during := range []string{"downloading packages", "installing essential packages"} {
		t.Run(during, func(t *testing.T) {
			s := newRealStore(t)
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			reached := false
			_, err := s.Build(ctx, BuildSpec{Name: "x"}, func(p Progress) {
				if p.Detail == during {
					reached = true
					cancel()
				}
			})
			if !errors.Is(err, context.Canceled) || !reached {
				t.Errorf("Build() error = %v (reached %v), want %v", err, reached, context.Canceled)
			}
			checkNothingLeft(t, s)
		})
	}
}

// TestBuildReal builds an image with the real tools. It is run on request only:
//
//	FORKD_IMAGE_BUILD=python FORKD_IMAGE_PACKAGES=python3,python3-numpy FORKD_IMAGE_DIR=/some/where go test ./internal/image -run TestBuildReal -v
//
// The image stays in FORKD_IMAGE_DIR for other uses; without it, it is built in a temporary directory.
func TestBuildReal(t *testing.T) {
	name := os.Getenv("FORKD_IMAGE_BUILD")
	if name == "" {
		t.Skip("downloads packages and takes a minute; set FORKD_IMAGE_BUILD to a name to run it")
	}
	agent, err := agentbin.Agent()
	if file := os.Getenv("FORKD_IMAGE_AGENT"); file != "" {
		agent, err = os.ReadFile(file)
	}
	if err != nil {
		t.Fatal(err)
	}
	dir := os.Getenv("FORKD_IMAGE_DIR")
	if dir == "" {
		dir = t.TempDir()
	}
	cache := os.Getenv("FORKD_CACHE")
	if cache == "" {
		cache = filepath.Join(dir, "cache")
	}
	s, err := Open(dir, cache, agent)
	if err != nil {
		t.Fatal(err)
	}
	spec := BuildSpec{Name: name, Packages: strings.FieldsFunc(os.Getenv("FORKD_IMAGE_PACKAGES"), func(r rune) bool { return r == ',' }),
		Force: os.Getenv("FORKD_IMAGE_FORCE") != "", Rootfs: os.Getenv("FORKD_IMAGE_ROOTFS")}
	img, err := s.Build(t.Context(), spec, func(p Progress) {
		t.Logf("%s %s: %s %d/%d", time.Now().Format("05.000"), p.Step, p.Detail, p.Done, p.Total)
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("image %s: %+v", filepath.Dir(img.Kernel.Path), img)
}
