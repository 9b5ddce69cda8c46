package image

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// commandsOfBuild are the commands of a first build.
var commandsOfBuild = []string{"apt-cache", "apt-get", "dpkg", "mmdebstrap", "mkfs.erofs"}

func TestBuild(t *testing.T) {
	needRoot(t)
	s, r := newStore(t)
	var steps []string
	img, err := s.Build(t.Context(), BuildSpec{Name: "py", Packages: []string{"python3-numpy", "git"}}, func(p Progress) {
		if len(steps) == 0 || steps[len(steps)-1] != p.Step {
			steps = append(steps, p.Step)
		}
	})
	if err != nil {
		t.Fatal(err)
	}
	if d := cmp.Diff(steps, []string{"kernel", "initramfs", "rootfs", "publish"}); d != "" {
		t.Errorf("steps (-got +want):\n%s", d)
	}
	var ran []string
	for _, c := range r.ran {
		ran = append(ran, strings.Fields(c)[0])
	}
	if d := cmp.Diff(ran, commandsOfBuild); d != "" {
		t.Errorf("commands (-got +want):\n%s", d)
	}
	if d := cmp.Diff(img.Packages, []string{"bash", "ca-certificates", "curl", "git", "python3", "python3-numpy", "sudo"}); d != "" {
		t.Errorf("packages (-got +want):\n%s", d)
	}
	if img.Name != "py" || img.KernelVersion != fakeVersion || img.Suite != DefaultSuite || img.RootfsType != "erofs" || !img.Python {
		t.Errorf("Build() = %+v", img)
	}
	for _, b := range img.blobs() {
		got, err := blobOf(b.Path)
		if err != nil || got.SHA256 != b.SHA256 || got.Bytes != b.Bytes {
			t.Errorf("blob %s: got %v, %v, want %v", b.Name, got, err, *b)
		}
	}
	if d := cmp.Diff(img.Cmdline(), []string{"forkd.root=/dev/vda", "forkd.rootfstype=erofs"}); d != "" {
		t.Errorf("Cmdline() (-got +want):\n%s", d)
	}
	byName, err := s.Get("py")
	if err != nil {
		t.Fatal(err)
	}
	if d := cmp.Diff(byName, img); d != "" {
		t.Errorf("Get() (-got +want):\n%s", d)
	}
	if got := tree(t, s.dir); len(got) != 7 { // names, names/py, the image and its four files
		t.Errorf("the store has %v", got)
	}
}

// TestBuildFails breaks and cancels a build at each of its commands: nothing may be left, and the next build must work.
func TestBuildFails(t *testing.T) {
	needRoot(t)
	for i, name := range commandsOfBuild {
		for _, how := range []string{"error", "cancel"} {
			t.Run(how+" in "+name, func(t *testing.T) {
				s, r := newStore(t)
				ctx, cancel := context.WithCancel(t.Context())
				defer cancel()
				want := errInjected
				if how == "cancel" {
					want = context.Canceled
				}
				r.before = func(n int, c command) error {
					if c.name != name || n <= i {
						return nil
					}
					if how == "cancel" {
						cancel()
						return nil
					}
					return errInjected
				}
				_, err := s.Build(ctx, BuildSpec{Name: "py"}, nil)
				if !errors.Is(err, want) {
					t.Fatalf("Build() error = %v, want %v", err, want)
				}
				if !strings.Contains(err.Error(), `image "py"`) {
					t.Errorf("Build() error %q does not name the image", err)
				}
				if d := cmp.Diff(tree(t, s.dir), []string{"names"}); d != "" {
					t.Errorf("left behind in the store (-got +want):\n%s", d)
				}
				for _, e := range tree(t, s.cacheDir) {
					if strings.HasPrefix(e, stagingPrefix) || strings.HasPrefix(e, "roots/") {
						t.Errorf("left behind in the cache: %s", e)
					}
				}
				r.before = nil
				if _, err := s.Build(t.Context(), BuildSpec{Name: "py"}, nil); err != nil {
					t.Errorf("Build() afterwards: %v", err)
				}
			})
		}
	}
}

func TestBuildKeepsOldImageWhenItFails(t *testing.T) {
	needRoot(t)
	s, r := newStore(t)
	old, err := s.Build(t.Context(), BuildSpec{Name: "py"}, nil)
	if err != nil {
		t.Fatal(err)
	}
	r.before = func(_ int, c command) error {
		if c.name == "mkfs.erofs" {
			return errInjected
		}
		return nil
	}
	if _, err := s.Build(t.Context(), BuildSpec{Name: "py", Packages: []string{"vim"}}, nil); !errors.Is(err, errInjected) {
		t.Fatalf("Build() error = %v, want %v", err, errInjected)
	}
	if got, err := s.Get("py"); err != nil || got.ID != old.ID {
		t.Errorf("Get() = %s, %v, want %s", got.ID, err, old.ID)
	}
}

func TestBuildAgain(t *testing.T) {
	needRoot(t)
	s, r := newStore(t)
	build := func(spec BuildSpec) (Image, int) {
		t.Helper()
		r.ran = nil
		img, err := s.Build(t.Context(), spec, nil)
		if err != nil {
			t.Fatal(err)
		}
		return img, len(r.ran)
	}
	first, _ := build(BuildSpec{Name: "py"})

	if same, n := build(BuildSpec{Name: "py"}); same.ID != first.ID || n != 1 {
		t.Errorf("unchanged: image %s after %d commands, want %s after 1", same.ID, n, first.ID)
	}
	other, n := build(BuildSpec{Name: "other"})
	if other.ID == first.ID || other.Rootfs.SHA256 != first.Rootfs.SHA256 || n != 1 {
		t.Errorf("another name: image %s after %d commands, want a new one with the same root after 1", other.ID, n)
	}
	s.agent = []byte("new agent")
	agent, n := build(BuildSpec{Name: "py"})
	if agent.ID == first.ID || agent.Rootfs.SHA256 != first.Rootfs.SHA256 || n != 1 {
		t.Errorf("new agent: image %s after %d commands, want a new one with the same root after 1", agent.ID, n)
	}
	if old, err := s.Get(first.ID); err != nil || old.Name != "" {
		t.Errorf("the old image: name %q, %v, want none", old.Name, err)
	}
	forced, n := build(BuildSpec{Name: "py", Force: true})
	if forced.ID == agent.ID || n != 3 {
		t.Errorf("forced: image %s after %d commands, want a new one after 3", forced.ID, n)
	}
	damage(t, filepath.Join(s.cacheDir, "roots", debianKey(BuildSpec{Suite: DefaultSuite, Packages: basePackages}), "rootfs.erofs"))
	if _, n := build(BuildSpec{Name: "third"}); n != 3 {
		t.Errorf("damaged cache: %d commands, want 3", n)
	}
}

// damage flips a byte of a file, by way of a new one: others may have linked it.
func damage(t *testing.T, path string) {
	t.Helper()
	raw, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	raw[len(raw)/2] ^= 1
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, raw, 0o644); err != nil {
		t.Fatal(err)
	}
}

func TestBuildRefreshesPackageLists(t *testing.T) {
	needRoot(t)
	s, r := newStore(t)
	failed := map[string]bool{}
	r.before = func(_ int, c command) error { // each of them fails the first time
		key := c.name + c.args[0]
		if (c.name == "apt-cache" || c.args[0] == "download") && !failed[key] {
			failed[key] = true
			return errInjected
		}
		return nil
	}
	if _, err := s.Build(t.Context(), BuildSpec{Name: "py"}, nil); err != nil {
		t.Fatal(err)
	}
	updates := 0
	for _, c := range r.ran {
		if strings.HasPrefix(c, "apt-get update") {
			updates++
		}
	}
	if updates != 2 {
		t.Errorf("%d updates, want 2:\n%s", updates, strings.Join(r.ran, "\n"))
	}
}

func TestBuildOneAtATime(t *testing.T) {
	needRoot(t)
	s, r := newStore(t)
	entered, leave := make(chan struct{}), make(chan struct{})
	r.before = func(n int, _ command) error {
		if n == 1 {
			close(entered)
			<-leave
		}
		return nil
	}
	done := make(chan error, 1)
	go func() {
		_, err := s.Build(context.Background(), BuildSpec{Name: "first"}, nil)
		done <- err
	}()
	<-entered
	ctx, cancel := context.WithCancel(t.Context())
	_, err := s.Build(ctx, BuildSpec{Name: "second"}, func(p Progress) {
		if p.Step == "wait" {
			cancel()
		}
	})
	if !errors.Is(err, context.Canceled) {
		t.Errorf("second Build() error = %v, want %v", err, context.Canceled)
	}
	close(leave)
	if err := <-done; err != nil {
		t.Errorf("first Build() error = %v", err)
	}
}

func TestBuildOwnKernelAndRootfs(t *testing.T) {
	s, r := newStore(t)
	dir := t.TempDir()
	if err := fakeKernelTree(dir); err != nil {
		t.Fatal(err)
	}
	kernel := filepath.Join(dir, "boot", "vmlinuz-"+fakeVersion)
	rootfs := filepath.Join(dir, "root.img")
	if err := os.WriteFile(rootfs, append([]byte("hsqs"), make([]byte, 5000)...), 0o644); err != nil {
		t.Fatal(err)
	}
	spec := BuildSpec{Name: "own", Kernel: kernel, Modules: filepath.Join(dir, "lib", "modules"), Rootfs: rootfs, Python: true}
	img, err := s.Build(t.Context(), spec, nil)
	if err != nil {
		t.Fatal(err)
	}
	if len(r.ran) != 0 {
		t.Errorf("commands %v, want none", r.ran)
	}
	if img.RootfsType != "squashfs" || img.Rootfs.Name != "rootfs.squashfs" || img.Rootfs.Bytes != 8192 || !img.Python || img.Suite != "" {
		t.Errorf("Build() = %+v", img)
	}
	// What is the user's own may change later: the image must not.
	if err := os.WriteFile(kernel, []byte("other"), 0o644); err != nil {
		t.Fatal(err)
	}
	if got, err := blobOf(img.Kernel.Path); err != nil || got.SHA256 != img.Kernel.SHA256 {
		t.Errorf("the image's kernel changed with the user's: %v, %v", got, err)
	}
}

func TestBuildRefuses(t *testing.T) {
	s, r := newStore(t)
	empty := filepath.Join(t.TempDir(), "empty")
	if err := os.WriteFile(empty, nil, 0o644); err != nil {
		t.Fatal(err)
	}
	tests := []struct {
		name string
		spec BuildSpec
		want string
	}{
		{"no name", BuildSpec{}, "name"},
		{"name with a path", BuildSpec{Name: "../x"}, "name"},
		{"name of 65 characters", BuildSpec{Name: strings.Repeat("a", 65)}, "name"},
		{"package that is an option", BuildSpec{Name: "a", Packages: []string{"--hook=x"}}, "package"},
		{"two packages in one", BuildSpec{Name: "a", Packages: []string{"a,b"}}, "package"},
		{"suite that is an option", BuildSpec{Name: "a", Suite: "-x"}, "suite"},
		{"mirror without scheme", BuildSpec{Name: "a", Mirror: "--x"}, "mirror"},
		{"modules without kernel", BuildSpec{Name: "a", Modules: "/x"}, "modules"},
		{"packages and rootfs", BuildSpec{Name: "a", Rootfs: empty, Packages: []string{"vim"}}, "root file system"},
		{"rootfs that is missing", BuildSpec{Name: "a", Rootfs: empty + "x"}, "no such file"},
		{"rootfs that is empty", BuildSpec{Name: "a", Rootfs: empty}, "tar archive"},
		{"kernel that is missing", BuildSpec{Name: "a", Kernel: empty + "x"}, "no such file"},
		{"kernel that is none", BuildSpec{Name: "a", Kernel: empty}, "kernel"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			_, err := s.Build(t.Context(), tt.spec, nil)
			if !errors.Is(err, ErrInvalid) || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("Build() error = %v, want %v about %q", err, ErrInvalid, tt.want)
			}
		})
	}
	if len(r.ran) != 0 {
		t.Errorf("commands %v, want none", r.ran)
	}
	if d := cmp.Diff(tree(t, s.dir), []string{"names"}); d != "" {
		t.Errorf("left behind (-got +want):\n%s", d)
	}
	s.agent = nil
	if _, err := s.Build(t.Context(), BuildSpec{Name: "a"}, nil); err == nil || !strings.Contains(err.Error(), "make build") {
		t.Errorf("Build() without an agent: error = %v, want a hint", err)
	}
}

func TestUnknownPackageIsTheCallersFault(t *testing.T) {
	for _, line := range []string{
		"E: Unable to locate package nosuch",
		"E: Package 'nosuch' has no installation candidate",
		"E: Couldn't find any package by glob 'nosuch'",
	} {
		s, runner := newStore(t)
		runner.before = func(_ int, c command) error {
			if c.name != "mmdebstrap" {
				return nil
			}
			c.line(line)
			return errors.New("mmdebstrap failed")
		}
		_, err := s.Build(t.Context(), BuildSpec{Name: "x", Packages: []string{"nosuch"}}, nil)
		if !errors.Is(err, ErrInvalid) || !strings.Contains(err.Error(), `package "nosuch"`) {
			t.Errorf("after %q: Build() error = %v, want one that blames the package", line, err)
		}
		checkNothingLeft(t, s)
	}
}
