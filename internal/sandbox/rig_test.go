package sandbox

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/forkd/forkd/internal/failpoint"
	"github.com/forkd/forkd/internal/image"
	"github.com/forkd/forkd/internal/memory"
	"github.com/forkd/forkd/internal/snapshot"
	"github.com/forkd/forkd/internal/store"
	"github.com/forkd/forkd/internal/vmm"
	"github.com/forkd/forkd/internal/vmm/vmmtest"
)

func TestMain(m *testing.M) {
	vmmtest.RunMachineIfAsked()
	runDaemonIfAsked()
	os.Exit(m.Run())
}

// testImages are images of files that no guest looks into.
type testImages struct{ dir string }

const testImage = "debian"

func (i testImages) Get(nameOrID string) (image.Image, error) {
	if nameOrID != testImage && nameOrID != "img1" {
		return image.Image{}, fmt.Errorf("image %s: %w", nameOrID, image.ErrNotFound)
	}
	img := image.Image{ID: "img1", Name: testImage, RootfsType: "erofs"}
	for name, blob := range map[string]*image.Blob{"vmlinuz": &img.Kernel, "initramfs": &img.Initramfs, "rootfs": &img.Rootfs} {
		*blob = image.Blob{Path: filepath.Join(i.dir, name), Name: name, Bytes: int64(len(name)), SHA256: fmt.Sprintf("%x", sha256.Sum256([]byte(name)))}
		if err := os.WriteFile(blob.Path, []byte(name), 0o600); err != nil {
			return image.Image{}, err
		}
	}
	return img, nil
}

// world is what outlives a daemon: directories, and the machines that run in them.
type world struct{ root string }

func newWorld(t *testing.T) *world {
	t.Helper()
	root, err := os.MkdirTemp("", "sbx") // short: sockets go there
	if err != nil {
		t.Fatal(err)
	}
	w := &world{root}
	for _, dir := range []string{w.run(), w.machines(), w.images(), w.data()} {
		if err := os.MkdirAll(dir, 0o700); err != nil {
			t.Fatal(err)
		}
	}
	t.Cleanup(func() {
		if err := w.fake(vmmtest.FakeOptions{}).Close(); err != nil {
			t.Errorf("end fake machines: %v", err)
		}
		if err := os.RemoveAll(root); err != nil {
			t.Errorf("clean up: %v", err)
		}
	})
	return w
}

func (w *world) run() string      { return filepath.Join(w.root, "run") }
func (w *world) machines() string { return filepath.Join(w.root, "fake") }
func (w *world) images() string   { return filepath.Join(w.root, "images") }
func (w *world) data() string     { return filepath.Join(w.root, "data") }

func (w *world) fake(opts vmmtest.FakeOptions) *vmmtest.Fake {
	return vmmtest.NewFake(w.machines(), opts)
}

// daemon is a Manager with its stores.
type daemon struct {
	*Manager
	w      *world
	fake   *vmmtest.Fake
	db     *store.DB
	cache  *memory.Cache
	events *eventLog
}

type options struct {
	limits     Limits
	fake       vmmtest.FakeOptions
	failpoints *failpoint.Set
	killAll    bool
	log        *slog.Logger
	networks   *testNetworks // nil: none
}

// open starts a daemon in the world. It has not recovered yet.
func (w *world) open(o options) (*daemon, error) {
	db, err := store.Open(filepath.Join(w.data(), "forkd.db"))
	if err != nil {
		return nil, err
	}
	snaps, err := snapshot.Open(filepath.Join(w.data(), "snapshots"))
	if err != nil {
		return nil, errors.Join(err, db.Close())
	}
	if o.networks != nil {
		o.fake.Info.Features = vmm.Features{Console: true, Files: true, Layers: true, Live: true, Net: true}
	}
	d := &daemon{w: w, fake: w.fake(o.fake), db: db, cache: memory.NewCache(1 << 30), events: &eventLog{}}
	if o.limits.LaunchTimeout == 0 {
		o.limits.LaunchTimeout = 20 * time.Second
	}
	if o.limits.MemoryBudget == 0 {
		o.limits.MemoryBudget = 1 << 40
	}
	o.limits.MinMemMiB = 1 // fake guests need no more
	cfg := Config{Engine: d.fake, Images: testImages{w.images()}, Snapshots: snaps, Memory: d.cache, DB: db, RunDir: w.run(),
		Limits: o.limits, Log: o.log, Events: d.events.add, Failpoints: o.failpoints, KillOnShutdown: o.killAll}
	if o.networks != nil {
		cfg.Networks = o.networks
	}
	d.Manager, err = New(cfg)
	if err != nil {
		return nil, errors.Join(err, db.Close())
	}
	return d, nil
}

// start opens a daemon that recovers, and stops it at the end of the test.
func (w *world) start(t *testing.T, o options) *daemon {
	t.Helper()
	if o.log == nil {
		o.log = slog.New(slog.NewTextHandler(testWriter{t}, nil))
	}
	d, err := w.open(o)
	if err != nil {
		t.Fatalf("open: %v", err)
	}
	t.Cleanup(func() { d.stop(t) })
	if _, err := d.Recover(t.Context()); err != nil {
		t.Fatalf("Recover: %v", err)
	}
	return d
}

// stop shuts the daemon down, once.
func (d *daemon) stop(t *testing.T) {
	t.Helper()
	if err := d.close(); err != nil {
		t.Errorf("stop: %v", err)
	}
}

func (d *daemon) close() error {
	if d.Manager == nil {
		return nil
	}
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	err := errors.Join(d.Shutdown(ctx), d.cache.Close(), d.db.Close())
	d.Manager = nil
	return err
}

type testWriter struct{ t *testing.T }

func (w testWriter) Write(p []byte) (int, error) {
	w.t.Log(strings.TrimSpace(string(p)))
	return len(p), nil
}

// eventLog keeps events.
type eventLog struct {
	mu   sync.Mutex
	list []Event
}

func (l *eventLog) add(e Event) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.list = append(l.list, e)
}

func (l *eventLog) of(id string) []State {
	l.mu.Lock()
	defer l.mu.Unlock()
	var states []State
	for _, e := range l.list {
		if e.SandboxID == id {
			states = append(states, e.State)
		}
	}
	return states
}

const testMemMiB = 2

// snapshot makes a snapshot with the tag.
func (d *daemon) snapshot(t *testing.T, tag string, change func(*SnapshotRequest)) Snapshot {
	t.Helper()
	s, err := d.trySnapshot(t.Context(), tag, change)
	if err != nil {
		t.Fatalf("CreateSnapshot %s: %v", tag, err)
	}
	return s
}

func (d *daemon) trySnapshot(ctx context.Context, tag string, change func(*SnapshotRequest)) (Snapshot, error) {
	req := SnapshotRequest{Tag: tag, Image: testImage, MemMiB: testMemMiB, Timeout: 30 * time.Second, Env: map[string]string{"BASE": "1"}}
	if change != nil {
		change(&req)
	}
	return d.CreateSnapshot(ctx, req, nil)
}

// fork starts n sandboxes, all of which must succeed.
func (d *daemon) fork(t *testing.T, tag string, n int, change func(*ForkRequest)) []Sandbox {
	t.Helper()
	req := ForkRequest{Tag: tag, N: n}
	if change != nil {
		change(&req)
	}
	results, err := d.Fork(t.Context(), req)
	if err != nil {
		t.Fatalf("Fork %s: %v", tag, err)
	}
	var all []Sandbox
	for i, r := range results {
		if r.Err != nil {
			t.Fatalf("Fork %s: child %d: %v", tag, i, r.Err)
		}
		all = append(all, *r.Sandbox)
	}
	if len(all) != n {
		t.Fatalf("Fork %s: got %d results, want %d", tag, len(all), n)
	}
	return all
}

// sh runs a command in a sandbox and returns its output.
func (d *daemon) sh(t *testing.T, id, command string) string {
	t.Helper()
	res, err := d.Exec(t.Context(), id, ExecRequest{Args: []string{"sh", "-c", command}, Timeout: 20 * time.Second})
	if err != nil {
		t.Fatalf("Exec %q in %s: %v", command, id, err)
	}
	if res.ExitCode != 0 {
		t.Fatalf("Exec %q in %s: exit code %d, stderr %s", command, id, res.ExitCode, res.Stderr)
	}
	return strings.TrimSpace(string(res.Stdout))
}

func checkCode(t *testing.T, what string, err error, want Code) {
	t.Helper()
	if got := CodeOf(err); got != want {
		t.Errorf("%s: got code %q (%v), want %q", what, got, err, want)
	}
}

// eventually waits until check returns "".
func eventually(t *testing.T, what string, check func() string) {
	t.Helper()
	deadline := time.Now().Add(20 * time.Second)
	for pause := time.Millisecond; ; pause = min(2*pause, 50*time.Millisecond) {
		problem := check()
		if problem == "" {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("%s: %s", what, problem)
		}
		time.Sleep(pause) // what other processes do can't be awaited
	}
}

// checkTidy compares what is there with what should be: sandboxes and pool members that live, and snapshots.
func (d *daemon) checkTidy(t *testing.T, machines int, snapshots ...string) {
	t.Helper()
	eventually(t, "tidiness", func() string {
		problem := d.untidy(machines, snapshots)
		if problem == "" && d.Manager != nil {
			if _, held := d.memory.stats(); (held > 0) != (machines > 0) {
				return fmt.Sprintf("%d bytes of memory are held by admission with %d machines", held, machines)
			}
		}
		return problem
	})
}

func (d *daemon) untidy(machines int, snapshots []string) string {
	live, err := d.fake.Live()
	if err != nil {
		return err.Error()
	}
	if len(live) != machines {
		return fmt.Sprintf("%d machines live, want %d: %v", len(live), machines, live)
	}
	if dirs, _ := os.ReadDir(filepath.Join(d.w.run(), "vm")); len(dirs) != machines {
		return fmt.Sprintf("%d machine directories, want %d: %v", len(dirs), machines, dirs)
	}
	entries, _ := os.ReadDir(filepath.Join(d.w.data(), "snapshots"))
	if len(entries) != len(snapshots) {
		return fmt.Sprintf("snapshot directories: %v, want those of %v", entries, snapshots)
	}
	return ""
}
