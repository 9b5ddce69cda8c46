package sandbox

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/forkd/forkd/internal/memory"
	"github.com/forkd/forkd/internal/vmm/vmmtest"
)

func TestCreateSnapshotRefusesBadRequests(t *testing.T) {
	d := newWorld(t).start(t, options{})
	tests := []struct {
		name   string
		change func(*SnapshotRequest)
		want   Code
	}{
		{"tag with a slash", func(r *SnapshotRequest) { r.Tag = "../x" }, CodeInvalidTag},
		{"no image", func(r *SnapshotRequest) { r.Image = "" }, CodeInvalidArgument},
		{"unknown image", func(r *SnapshotRequest) { r.Image = "nope" }, CodeImageNotFound},
		{"negative memory", func(r *SnapshotRequest) { r.MemMiB = -1 }, CodeInvalidArgument},
		{"too much memory", func(r *SnapshotRequest) { r.MemMiB = 1 << 20 }, CodeInvalidArgument},
		{"too many vCPUs", func(r *SnapshotRequest) { r.VCPUs = 99 }, CodeInvalidArgument},
		{"negative timeout", func(r *SnapshotRequest) { r.Timeout = -1 }, CodeInvalidArgument},
		{"pool too large", func(r *SnapshotRequest) { r.PoolSize = 1001 }, CodeInvalidArgument},
		{"unknown warm-up", func(r *SnapshotRequest) { r.WarmUp = []WarmUp{{"dance", "x"}} }, CodeInvalidArgument},
		{"empty warm-up", func(r *SnapshotRequest) { r.WarmUp = []WarmUp{{WarmUpExec, "  "}} }, CodeInvalidArgument},
		{"bad env", func(r *SnapshotRequest) { r.Env = map[string]string{"": "x"} }, CodeInvalidArgument},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			_, err := d.trySnapshot(t.Context(), "py", tt.change)
			checkCode(t, "CreateSnapshot", err, tt.want)
		})
	}
	d.checkTidy(t, 0)
}

func TestCreateSnapshotFailsCleanly(t *testing.T) {
	tests := []struct {
		name   string
		change func(*SnapshotRequest)
		fake   vmmtest.FakeOptions
		limits Limits
		want   Code
		says   []string
	}{
		{
			name:   "warm-up fails",
			change: func(r *SnapshotRequest) { r.WarmUp = []WarmUp{{WarmUpExec, "stderr oh no; exit 3"}} },
			want:   CodeWarmUpFailed, says: []string{"warm-up 1", "status 3", "oh no", "guest console", "fake guest: booted"},
		},
		{
			name:   "second warm-up raises",
			change: func(r *SnapshotRequest) { r.WarmUp = []WarmUp{{WarmUpEval, "x = 1"}, {WarmUpEval, "raise Oops"}} },
			want:   CodeWarmUpFailed, says: []string{"warm-up 2", "exception", "Oops"},
		},
		{
			name: "warm-up never ends",
			change: func(r *SnapshotRequest) {
				r.WarmUp, r.Timeout = []WarmUp{{WarmUpExec, "hang"}}, 2*time.Second
			},
			want: CodeWarmUpFailed, says: []string{"warm-up 1", "not done within 2s"},
		},
		{
			name: "eval never ends",
			change: func(r *SnapshotRequest) {
				r.WarmUp, r.Timeout = []WarmUp{{WarmUpEval, "hang()"}}, 2*time.Second
			},
			want: CodeWarmUpFailed, says: []string{"not done within 2s"},
		},
		{
			name:   "warm-up powers the parent off",
			change: func(r *SnapshotRequest) { r.WarmUp = []WarmUp{{WarmUpExec, "poweroff; hang"}} },
			want:   CodeWarmUpFailed, says: []string{"the parent ended", "poweroff"},
		},
		{
			name:   "warm-up crashes the monitor",
			change: func(r *SnapshotRequest) { r.WarmUp = []WarmUp{{WarmUpExec, "crash"}} },
			want:   CodeWarmUpFailed, says: []string{"the parent ended"},
		},
		{
			name:   "eval without python",
			change: func(r *SnapshotRequest) { r.WarmUp = []WarmUp{{WarmUpEval, "1"}} },
			fake:   vmmtest.FakeOptions{NoPython: true},
			want:   CodeNoInterpreter, says: []string{testImage},
		},
		{
			name: "probe never succeeds",
			change: func(r *SnapshotRequest) {
				r.Probe, r.Timeout = "echo not yet; false", 2*time.Second
			},
			want: CodeWarmUpFailed, says: []string{"probe", "status 1", "not yet", "not done within 2s"},
		},
		{
			name:   "no memory",
			limits: Limits{MemoryBudget: 1 << 20},
			want:   CodeInsufficientMemory,
		},
		{
			name: "engine is not there",
			fake: vmmtest.FakeOptions{Unavailable: errors.New("not installed")},
			want: CodeEngineUnavailable, says: []string{"not installed"},
		},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			d := newWorld(t).start(t, options{fake: tt.fake, limits: tt.limits})
			_, err := d.trySnapshot(t.Context(), "py", tt.change)
			checkCode(t, "CreateSnapshot", err, tt.want)
			for _, want := range tt.says {
				if !strings.Contains(fmt.Sprint(err), want) {
					t.Errorf("error says %q, want it to say %q", err, want)
				}
			}
			d.checkTidy(t, 0)
			if snaps, err := d.Snapshots(t.Context()); err != nil || len(snaps) != 0 {
				t.Errorf("Snapshots: got %v, %v, want none", snaps, err)
			}
			if recs, err := d.db.Snapshots(t.Context()); err != nil || len(recs) != 0 {
				t.Errorf("records: got %v, %v, want none", recs, err)
			}
		})
	}
}

func TestCreateSnapshotDiskFull(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("needs root to mount a small file system")
	}
	w := newWorld(t)
	small := filepath.Join(w.data(), "snapshots")
	if err := os.MkdirAll(small, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := unix.Mount("none", small, "tmpfs", 0, "size=128k"); err != nil {
		t.Skipf("mount a small file system: %v", err)
	}
	t.Cleanup(func() { _ = unix.Unmount(small, unix.MNT_DETACH) })
	d := w.start(t, options{})
	_, err := d.trySnapshot(t.Context(), "py", func(r *SnapshotRequest) { r.WarmUp = []WarmUp{{WarmUpExec, "dirty 200"}} })
	checkCode(t, "CreateSnapshot", err, CodeDiskFull)
	d.checkTidy(t, 0)
	d.stop(t)
}

func TestCreateSnapshotTagIsTaken(t *testing.T) {
	d := newWorld(t).start(t, options{})
	d.snapshot(t, "py", nil)
	_, err := d.trySnapshot(t.Context(), "py", nil)
	checkCode(t, "second CreateSnapshot", err, CodeSnapshotExists)

	var wg sync.WaitGroup
	errs := make([]error, 4)
	for i := range errs {
		wg.Go(func() { _, errs[i] = d.trySnapshot(t.Context(), "race", nil) })
	}
	wg.Wait()
	won := 0
	for _, err := range errs {
		if err == nil {
			won++
			continue
		}
		checkCode(t, "a loser", err, CodeSnapshotExists)
	}
	if won != 1 {
		t.Errorf("%d of the concurrent creates succeeded, want 1", won)
	}
	d.checkTidy(t, 0, "py", "race")
}

func TestCreateSnapshotTellsItsSteps(t *testing.T) {
	d := newWorld(t).start(t, options{})
	var steps []string
	req := SnapshotRequest{Tag: "py", Image: testImage, MemMiB: testMemMiB, Probe: "true", WarmUp: []WarmUp{{WarmUpExec, "true"}}}
	if _, err := d.CreateSnapshot(t.Context(), req, func(p Progress) { steps = append(steps, p.Step) }); err != nil {
		t.Fatal(err)
	}
	if got, want := strings.Join(steps, " "), "boot ready probe warm_up exercise freeze store"; got != want {
		t.Errorf("steps: got %q, want %q", got, want)
	}
}

func TestCreateSnapshotGivenUp(t *testing.T) {
	d := newWorld(t).start(t, options{})
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() {
		_, err := d.trySnapshot(ctx, "py", func(r *SnapshotRequest) { r.WarmUp = []WarmUp{{WarmUpExec, "hang"}} })
		done <- err
	}()
	eventually(t, "the parent to run", func() string {
		if live, err := d.fake.Live(); err != nil || len(live) != 1 {
			return fmt.Sprintf("%v, %v", live, err)
		}
		return ""
	})
	s, err := d.Snapshot(t.Context(), "py")
	if err != nil || s.Status != StatusWriting {
		t.Errorf("meanwhile: got %s, %v, want it listed as writing", s.Status, err)
	}
	_, err = d.Fork(t.Context(), ForkRequest{Tag: "py", N: 1})
	checkCode(t, "Fork meanwhile", err, CodeInvalidState)
	checkCode(t, "DeleteSnapshot meanwhile", d.DeleteSnapshot(t.Context(), "py", DeleteForce), CodeInvalidState)
	checkCode(t, "ImageInUse meanwhile", d.ImageInUse("img1"), CodeImageInUse)
	cancel()
	if err := <-done; !errors.Is(err, context.Canceled) {
		t.Errorf("got %v, want canceled", err)
	}
	d.checkTidy(t, 0)
	if err := d.ImageInUse("img1"); err != nil {
		t.Errorf("ImageInUse: %v", err)
	}
}

// TestSnapshotIsNeverWritten forks, dirties and kills children, and compares the snapshot's bytes before and after.
func TestSnapshotIsNeverWritten(t *testing.T) {
	d := newWorld(t).start(t, options{})
	s := d.snapshot(t, "py", nil)
	digest := func() string {
		ref, err := d.cache.Acquire(t.Context(), s.ID, func(context.Context) (*memory.Image, error) { return nil, errors.New("not resident") })
		if err != nil {
			t.Fatal(err)
		}
		defer ref.Release()
		b := make([]byte, testMemMiB<<20)
		if _, err := ref.Image().ReadAt(b, 0); err != nil {
			t.Fatal(err)
		}
		return fmt.Sprint(sum(b))
	}
	want := digest()
	for _, b := range d.fork(t, "py", 5, nil) {
		d.sh(t, b.ID, "dirty 100; echo x > /tmp/x")
	}
	if got := digest(); got != want {
		t.Error("the resident image has changed")
	}
	if err := d.VerifySnapshot(t.Context(), "py"); err != nil {
		t.Errorf("VerifySnapshot: %v", err)
	}
	if b := d.fork(t, "py", 1, nil)[0]; true {
		res, err := d.Exec(t.Context(), b.ID, ExecRequest{Args: []string{"cat", "/tmp/x"}})
		if err != nil || res.ExitCode == 0 {
			t.Errorf("a later fork sees a file of an earlier one: %+v, %v", res, err)
		}
	}
}

func sum(b []byte) (s uint64) {
	for i, c := range b {
		s = s*31 + uint64(c) + uint64(i)
	}
	return s
}
