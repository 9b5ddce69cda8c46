package main

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	"path/filepath"

	"golang.org/x/sys/unix"

	"github.com/forkd/forkd/internal/image"
	"github.com/forkd/forkd/internal/image/agentbin"
	"github.com/forkd/forkd/test/e2e/bareroot"
	"github.com/forkd/forkd/test/lab"
	"github.com/forkd/forkd/test/lab/guest"
)

// buildImages makes the images that the tests use: in the lab there is no network to build them.
func buildImages(ctx context.Context, cache string) (dir string, err error) {
	agent, err := agentbin.Agent()
	if err != nil {
		return "", err
	}
	dir = filepath.Join(cache, "lab", "images")
	store, err := image.Open(dir, cache, agent)
	if err != nil {
		return "", err
	}
	bare, err := os.MkdirTemp("", "forkd-bare-")
	if err != nil {
		return "", err
	}
	defer os.RemoveAll(bare)
	if err := bareroot.Make(bare); err != nil {
		return "", fmt.Errorf("root of the bare image: %w", err)
	}
	for _, spec := range []image.BuildSpec{{Name: "python", Packages: []string{"python3", "python3-numpy"}}, {Name: "bare", Rootfs: bare}} {
		if _, err := store.Build(ctx, spec, nil); err != nil {
			return "", fmt.Errorf("build the image %s: %w", spec.Name, err)
		}
	}
	_, err = store.Prune(0, func(string) error { return nil })
	return dir, err
}

// withGiven opens a lab that has some files and directories, each by its name in one directory: on a disk of its own if it is booted for
// this, else they are copied.
func (c *cli) withGiven(ctx context.Context, given map[string]string, do func(l *lab.Lab, dir string) error) error {
	staged, release, err := stage(c.Cache, given)
	if err != nil {
		return fmt.Errorf("files for the lab: %w", err)
	}
	defer release()
	return c.with(ctx, staged, func(l *lab.Lab) error {
		release() // what it is given it has
		if l.Disk != "" {
			return do(l, l.Disk)
		}
		dir := guest.WorkDir + "/given"
		for name, src := range given {
			if err := put(ctx, l, []string{src + ":" + path.Join(dir, name)}); err != nil {
				return err
			}
		}
		return do(l, dir)
	})
}

// stage makes a directory with links to what is given. It is the same one every time, so that nothing adds up; it is locked until release.
func stage(cache string, given map[string]string) (dir string, release func(), err error) {
	dir = filepath.Join(cache, "lab", "given")
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return "", nil, err
	}
	lock, err := os.Open(dir)
	if err != nil {
		return "", nil, err
	}
	defer func() {
		if err != nil {
			lock.Close()
		}
	}()
	if err := unix.Flock(int(lock.Fd()), unix.LOCK_EX); err != nil {
		return "", nil, err
	}
	old, err := os.ReadDir(dir)
	if err != nil {
		return "", nil, err
	}
	for _, e := range old {
		if err := os.RemoveAll(filepath.Join(dir, e.Name())); err != nil {
			return "", nil, err
		}
	}
	for name, src := range given {
		if err := linkTree(filepath.Join(dir, name), src); err != nil {
			return "", nil, err
		}
	}
	return dir, func() { lock.Close() }, nil
}

// linkTree makes a copy of a file or a tree, by links where that can be.
func linkTree(to, from string) error {
	return filepath.WalkDir(from, func(name string, e fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		rel, err := filepath.Rel(from, name)
		if err != nil {
			return err
		}
		dst := filepath.Join(to, rel)
		switch {
		case e.IsDir():
			return os.MkdirAll(dst, 0o755)
		case e.Type() == fs.ModeSymlink:
			target, err := os.Readlink(name)
			if err != nil {
				return err
			}
			return os.Symlink(target, dst)
		}
		if err := os.Link(name, dst); !errors.Is(err, unix.EXDEV) {
			return err
		}
		data, err := os.ReadFile(name)
		if err != nil {
			return err
		}
		return os.WriteFile(dst, data, 0o755)
	})
}
