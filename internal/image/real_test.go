package image

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/forkd/forkd/internal/image/agentbin"
)

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
	img, err := s.Build(t.Context(), spec, func(p Progress) { t.Logf("%s: %s %d/%d", p.Step, p.Detail, p.Done, p.Total) })
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("image %s: %+v", filepath.Dir(img.Kernel.Path), img)
}
