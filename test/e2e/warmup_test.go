package e2e

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/forkd/forkd/client"
)

// TestFailedSnapshots: warm-ups that fail or never end, and clients that leave. Each says why, and leaves nothing.
func TestFailedSnapshots(t *testing.T) {
	t.Parallel()
	d := ownDaemon(t, setup{})
	// What a boot takes at the moment decides how long what never ends is waited for.
	first := d.snapshot(client.SnapshotRequest{Tag: "good", WarmUp: []client.WarmUp{{Kind: "exec", Code: "echo warm >/root/warm"}}})
	patience := 5*time.Second + 4*time.Duration(first.BootWarmMS)*time.Millisecond
	if got := d.fork1(of("good")).sh("cat /root/warm"); got != "warm" {
		t.Errorf("the warm-up left %q in the child", got)
	}
	exec := func(code string) []client.WarmUp { return []client.WarmUp{{Kind: "exec", Code: code}} }
	tests := []struct {
		name string
		req  client.SnapshotRequest
		code string
		says []string
	}{
		{"command that fails", client.SnapshotRequest{WarmUp: exec("echo so it is >&2; exit 3")}, "warm_up_failed", []string{"status 3", "so it is"}},
		{"code that raises", client.SnapshotRequest{Image: pythonImage, MemMiB: memMiB, WarmUp: []client.WarmUp{{Kind: "eval", Code: "import nosuchmodule"}}},
			"warm_up_failed", []string{"ModuleNotFoundError", "nosuchmodule"}},
		{"command that never ends", client.SnapshotRequest{TimeoutSecs: patience.Seconds(), WarmUp: exec("sleep 3600")}, "warm_up_failed", []string{"sleep 3600", "not done within"}},
		{"probe that never succeeds", client.SnapshotRequest{TimeoutSecs: patience.Seconds(), Probe: "echo not yet; false"}, "warm_up_failed", []string{"not yet", "not done within"}},
		{"guest that ends", client.SnapshotRequest{WarmUp: exec("echo o >/proc/sysrq-trigger; sleep 3600")}, "warm_up_failed", []string{"the parent ended"}},
	}
	var wg sync.WaitGroup
	errs := make([]error, len(tests))
	for i, tt := range tests {
		tt.req.Tag = "bad"
		tt.req.Tag += fmt.Sprint(i)
		wg.Go(func() { _, errs[i] = d.trySnapshot(tt.req) })
	}
	wg.Wait()
	for i, tt := range tests {
		wantError(t, tt.name, errs[i], 200, tt.code, tt.says...) // progress was on its way already
	}
	d.checkTidy()

	ctx, leave := context.WithCancel(t.Context())
	_, err := d.client.CreateSnapshot(ctx, client.SnapshotRequest{Tag: "left", Image: bareImage, MemMiB: 128}, func(p client.Progress) {
		if p.Step == "boot" {
			leave()
		}
	})
	if !errors.Is(err, context.Canceled) {
		t.Errorf("snapshot whose client left: %v", err)
	}
	eventually(t, tidyLimit, func() error {
		if tags := d.must("images", "-q"); strings.Contains(tags, "left") {
			return fmt.Errorf("snapshots: %q", tags)
		}
		return d.untidy()
	})
}

// TestDiskFull fills the disk while the parent is being frozen.
func TestDiskFull(t *testing.T) {
	t.Parallel()
	store := ""
	d := ownDaemon(t, setup{prepare: func(data string) error {
		store = filepath.Join(data, "snapshots")
		if err := os.RemoveAll(store); err != nil {
			return err
		}
		if err := os.Mkdir(store, 0o700); err != nil {
			return err
		}
		return mountTmpfs(store, "size=4m")
	}})
	// The seed's snapshot is gone with its directory: that is told, and can be cleaned up.
	if got := d.forkd("fork", "--tag", pyTag); got.code != 1 || !strings.Contains(got.stderr, pyTag) {
		t.Errorf("fork of a snapshot whose directory is gone: %v", got)
	}
	d.must("rmi", pyTag)

	body := `{"tag": "big", "image": "bare", "mem_mib": 128}`
	d.refuses("POST", "/v1/snapshots", strings.NewReader(body), refusal{507, "disk_full", "big"})
	d.checkTidy()
	if got := d.must("images", "-q"); got != "" {
		t.Errorf("snapshots after the disk was full: %q", got)
	}
	if err := unix.Mount("tmpfs", store, "tmpfs", unix.MS_REMOUNT, "size=512m"); err != nil {
		t.Fatalf("make the disk larger: %v", err)
	}
	d.snapshot(client.SnapshotRequest{Tag: "big"})
	if got := d.fork1(of("big")).sh("echo ok"); got != "ok" {
		t.Errorf("a child of the snapshot that found room printed %q", got)
	}
	d.checkTidy()
}

func mountTmpfs(dir, options string) error {
	if err := unix.Mount("tmpfs", dir, "tmpfs", 0, options); err != nil {
		return fmt.Errorf("mount a small tmpfs on %s: %w", dir, err)
	}
	return nil
}

// TestMemoryForSome has memory for three of ten children.
func TestMemoryForSome(t *testing.T) {
	t.Parallel()
	budget := func(mib int) setup { return setup{args: []string{"--memory-budget-mib", fmt.Sprint(mib)}} }
	d := ownDaemon(t, budget(1000))
	d.fork1()
	each := int(d.metrics()["forkd_memory_reserved_bytes"]) >> 20 // what a child counts with
	d.killGuests()
	d.stop()
	d.start(budget(3*each + each/2))
	guests, err := d.tryFork(10)
	var partial *client.PartialError
	if !errors.As(err, &partial) || len(guests) != 3 || len(partial.Failures) != 7 {
		t.Fatalf("fork of 10: got %d sandboxes and %v, want 3 and 7 errors", len(guests), err)
	}
	for i, f := range partial.Failures {
		if f.Index != 3+i || f.Code != "insufficient_memory" || f.RetryAfterSecs < 1 || f.Hint == "" {
			t.Errorf("error of child %d: %+v", 3+i, f)
		}
	}
	d.checkSandboxes(guests...)
	for range 2 {
		got, err := d.rest("POST", "/v1/sandboxes", strings.NewReader(`{"snapshot_tag": "py"}`))
		if err != nil || got.status != 503 || got.err.Code != "insufficient_memory" || got.header.Get("Retry-After") == "" {
			t.Errorf("one more: got %v, %v, Retry-After %q, want 503 insufficient_memory", got, err, got.header.Get("Retry-After"))
		}
	}
	if got := d.forkd("fork", "--tag", pyTag, "-n", "10"); got.code != 1 {
		t.Errorf("fork without any memory left: %v", got)
	}
	guests[0].kill()
	d.checkTidy()
	got := d.forkd("fork", "--tag", pyTag, "-n", "2", "-q")
	if ids := strings.Fields(got.stdout); got.code != 4 || len(ids) != 1 || !strings.Contains(got.stderr, "memory") {
		t.Errorf("fork of 2 with memory for 1: got %v, want exit code 4 and one id", got)
	}
	d.must("kill", "--all")
	d.killGuests()
	guests, err = d.tryFork(3)
	if err != nil || len(guests) != 3 {
		t.Errorf("fork of 3 when the memory was given back: %v, %v", guests, err)
	}
	d.checkTidy()
	if !slices.Equal(zombies(d.cmd.Process.Pid), nil) {
		t.Error("zombies are left")
	}
}
