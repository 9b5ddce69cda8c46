package e2e

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/forkd/forkd/client"
	"github.com/forkd/forkd/test/e2e/bareroot"
)

// What the seed has.
const (
	pythonImage = "python"
	bareImage   = "bare" // a shell and a few commands: no python, no users, quick to boot
	pyTag       = "py"   // of pythonImage, warmed up
	memMiB      = 256
)

// warmUp is done in the parent of pyTag: what the tests import is imported, and some state of every kind is there to be shared.
const warmUp = `import json, os, random, socket, ssl, sys, time, uuid
import numpy
numpy.random.rand(4).sum()
ssl.RAND_bytes(8)
generator = numpy.random.default_rng()
inherited = {"from": "the parent"}`

// labPrefix begins the names of labs' directories. The short one is below /tmp, because sockets have short paths.
const labPrefix = "fke-"

// lab is where daemons live.
type lab struct {
	once sync.Once
	err  error
	root string   // run directories and logs
	data string   // the daemons' data, on the cache's file system
	bin  string   // a copy of bin/forkd: nobody builds it anew under a running test
	lock *os.File // of root: tells other labs that this one is alive

	seedOnce sync.Once
	seedErr  error
	seed     string

	mu      sync.Mutex
	count   int // of daemons, for their names
	shared  *process
	running []*process
}

// openLab returns the lab, or skips or fails the test.
func openLab(t *testing.T) *lab {
	t.Helper()
	needVM(t)
	l := &theLab
	l.once.Do(func() { l.err = l.open() })
	if l.err != nil {
		t.Fatalf("open the lab: %v", l.err)
	}
	return l
}

// cacheDir is where `make` keeps what was downloaded or built once.
func cacheDir() string {
	if dir := os.Getenv("FORKD_CACHE"); dir != "" {
		return dir
	}
	if base := os.Getenv("XDG_CACHE_HOME"); base != "" {
		return filepath.Join(base, "forkd")
	}
	return filepath.Join(os.Getenv("HOME"), ".cache", "forkd")
}

func (l *lab) open() (err error) {
	built := os.Getenv("FORKD_BIN")
	if built == "" {
		built = filepath.Join("..", "..", "bin", "forkd")
	}
	if _, err := os.Stat(built); err != nil {
		return fmt.Errorf("%w: run `make build` first", err)
	}
	cache, err := filepath.Abs(cacheDir())
	if err != nil {
		return err
	}
	labs := filepath.Join(cache, "e2e")
	if err := os.MkdirAll(labs, 0o755); err != nil {
		return err
	}
	sweepLabs()
	if l.root, err = os.MkdirTemp("/tmp", labPrefix); err != nil {
		return err
	}
	if l.lock, err = lockDir(l.root); err != nil {
		return err
	}
	l.data = filepath.Join(labs, filepath.Base(l.root))
	if err := os.Symlink(l.data, filepath.Join(l.root, "data")); err != nil {
		return err
	}
	if err := os.Mkdir(l.data, 0o755); err != nil {
		return err
	}
	l.bin = filepath.Join(l.root, "forkd")
	return copyFile(l.bin, built, 0o755)
}

// sweepLabs removes what labs left whose process was killed.
func sweepLabs() {
	dirs, _ := filepath.Glob(filepath.Join("/tmp", labPrefix+"*"))
	for _, dir := range dirs {
		lock, err := lockDir(dir)
		if err != nil {
			continue // it is in use, or somebody else's
		}
		endProcesses(dir)
		if data, err := os.Readlink(filepath.Join(dir, "data")); err == nil && filepath.Base(data) == filepath.Base(dir) {
			unmountBelow(data)
			os.RemoveAll(data)
		}
		os.RemoveAll(dir)
		lock.Close()
	}
}

func lockDir(dir string) (*os.File, error) {
	f, err := os.Open(dir)
	if err != nil {
		return nil, err
	}
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		f.Close()
		return nil, err
	}
	return f, nil
}

// close ends everything and tells what should not have been there any more.
func (l *lab) close() (problems []string) {
	if l.root == "" {
		return nil
	}
	l.mu.Lock()
	running := l.running
	l.mu.Unlock()
	for _, p := range running {
		if p != l.shared {
			problems = append(problems, "the daemon "+p.name)
		}
		problems = append(problems, p.end()...)
	}
	problems = append(problems, processesIn(l.root)...)
	problems = append(problems, processesIn(l.data)...)
	endProcesses(l.root)
	for _, mount := range unmountBelow(l.data) {
		problems = append(problems, "the mount "+mount)
	}
	for _, dir := range []string{l.data, l.root} {
		if err := os.RemoveAll(dir); err != nil {
			problems = append(problems, err.Error())
		}
	}
	l.lock.Close()
	return problems
}

// newProcess prepares a daemon that was not started yet, with a copy of what is in from; "" for no data.
func (l *lab) newProcess(name, from string) (*process, error) {
	l.mu.Lock()
	l.count++
	dir := filepath.Join(l.root, fmt.Sprintf("d%d", l.count))
	p := &process{lab: l, name: name, run: filepath.Join(dir, "r"), data: filepath.Join(l.data, fmt.Sprintf("d%d", l.count))}
	l.mu.Unlock()
	p.logPath = filepath.Join(dir, "log")
	for _, d := range []string{dir, p.data} {
		if err := os.Mkdir(d, 0o700); err != nil {
			return nil, err
		}
	}
	if from != "" {
		if err := cloneData(p.data, from); err != nil {
			return nil, fmt.Errorf("copy the seed: %w", err)
		}
	}
	return p, nil
}

// cloneData copies a daemon's data. What a daemon never writes again is linked.
func cloneData(to, from string) error {
	return filepath.WalkDir(from, func(path string, e fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		rel, err := filepath.Rel(from, path)
		if err != nil {
			return err
		}
		dst := filepath.Join(to, rel)
		switch {
		case e.IsDir():
			return os.MkdirAll(dst, 0o700)
		case e.Type() == fs.ModeSymlink:
			target, err := os.Readlink(path)
			if err != nil {
				return err
			}
			return os.Symlink(target, dst)
		case strings.HasPrefix(rel, "images/"), strings.HasPrefix(rel, "snapshots/"):
			return os.Link(path, dst)
		}
		return copyFile(dst, path, 0o600)
	})
}

func copyFile(dst, src string, perm fs.FileMode) error {
	data, err := os.ReadFile(src)
	if err != nil {
		return err
	}
	return os.WriteFile(dst, data, perm)
}

// seedData returns the data directory of a daemon that built the images and made the snapshot.
func (l *lab) seedData(t *testing.T) string {
	t.Helper()
	l.seedOnce.Do(func() {
		l.seed, l.seedErr = os.Getenv("FORKD_E2E_SEED"), nil
		if l.seed != "" {
			if _, err := os.Stat(filepath.Join(l.seed, "forkd.db")); err == nil {
				return
			}
		}
		begin := time.Now()
		data, err := l.makeSeed()
		if err == nil && l.seed != "" {
			err = cloneData(l.seed, data)
		}
		if l.seed == "" {
			l.seed = data
		}
		l.seedErr = err
		t.Logf("made the images and the snapshot that the tests share in %v", time.Since(begin).Round(time.Second))
	})
	if l.seedErr != nil {
		t.Fatalf("make the images and the snapshot that the tests share: %v", l.seedErr)
	}
	return l.seed
}

func (l *lab) makeSeed() (data string, err error) {
	p, err := l.newProcess("seed", "")
	if err != nil {
		return "", err
	}
	tree, ready := filepath.Join(p.data, "bare-root"), os.Getenv(imagesEnv)
	if ready == "" {
		if err := bareroot.Make(tree); err != nil {
			return "", fmt.Errorf("root of the bare image: %w", err)
		}
	} else {
		if err := linkTree(filepath.Join(p.data, "images"), ready); err != nil {
			return "", fmt.Errorf("images that are ready: %w", err)
		}
	}
	if err := p.start(nil, nil); err != nil {
		return "", err
	}
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Minute)
	defer cancel()
	err = func() error {
		if ready == "" {
			if err := p.buildImages(ctx, tree); err != nil {
				return err
			}
		}
		_, err := p.client.CreateSnapshot(ctx, client.SnapshotRequest{Tag: pyTag, Image: pythonImage, MemMiB: memMiB,
			WarmUp: []client.WarmUp{{Kind: "eval", Code: warmUp}}}, nil)
		return err
	}()
	for _, problem := range p.end() {
		err = errors.Join(err, errors.New("left over: "+problem))
	}
	if err != nil {
		return "", fmt.Errorf("%w\n%s", err, p.logSince(0))
	}
	return p.data, errors.Join(os.RemoveAll(tree), os.Remove(filepath.Join(p.data, "lock")))
}

// buildImages builds the images of the seed.
func (p *process) buildImages(ctx context.Context, bareTree string) error {
	if _, err := p.client.BuildImage(ctx, client.ImageBuildRequest{Name: pythonImage, Packages: []string{"python3", "python3-numpy"}}, nil); err != nil {
		return err
	}
	_, err := p.client.BuildImage(ctx, client.ImageBuildRequest{Name: bareImage, Rootfs: bareTree}, nil)
	return err
}
