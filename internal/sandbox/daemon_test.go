package sandbox

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/forkd/forkd/internal/failpoint"
)

// The test binary runs as a daemon when these are set. Their names must not begin with FORKD_: machines are found by such variables.
const (
	daemonWorldEnv    = "SANDBOX_TEST_WORLD"
	daemonPointsEnv   = "SANDBOX_TEST_POINTS"
	daemonScenarioEnv = "SANDBOX_TEST_SCENARIO"
)

func runDaemonIfAsked() {
	root := os.Getenv(daemonWorldEnv)
	if root == "" {
		return
	}
	err := runDaemon(&world{root})
	fmt.Fprintln(os.Stderr, "the daemon was not killed:", err)
	os.Exit(3)
}

func runDaemon(w *world) error {
	points, err := failpoint.Parse(os.Getenv(daemonPointsEnv))
	if err != nil {
		return err
	}
	if err := points.Check(Points()...); err != nil {
		return err
	}
	d, err := w.open(options{networks: &testNetworks{}, failpoints: points, log: slog.New(slog.NewTextHandler(os.Stderr, nil))})
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	if _, err := d.Recover(ctx); err != nil {
		return err
	}
	return scenarios()[os.Getenv(daemonScenarioEnv)](ctx, d)
}

// crash runs a daemon of its own through a scenario, which a failpoint ends with SIGKILL.
func (w *world) crash(t *testing.T, scenario, points string) {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), os.Args[0])
	cmd.Env = append(os.Environ(), daemonWorldEnv+"="+w.root, daemonPointsEnv+"="+points, daemonScenarioEnv+"="+scenario)
	out, err := cmd.CombinedOutput()
	var exit *exec.ExitError
	if !errors.As(err, &exit) || exit.Sys().(syscall.WaitStatus).Signal() != syscall.SIGKILL {
		t.Fatalf("daemon with failpoints %s: got %v, want it killed\n%s", points, err, out)
	}
}

// What scenarios work with.
const (
	oldTag = "old" // exists, with sandboxes that live
	newTag = "new" // is made by a scenario
)

// scenarios are what a daemon does when it is struck.
func scenarios() map[string]func(context.Context, *daemon) error {
	return map[string]func(context.Context, *daemon) error{
		"snapshot": func(ctx context.Context, d *daemon) error {
			_, err := d.trySnapshot(ctx, newTag, func(r *SnapshotRequest) { r.WarmUp = []WarmUp{{WarmUpExec, "echo warm > /tmp/w"}} })
			return err
		},
		"fork": func(ctx context.Context, d *daemon) error {
			return firstError(d.Fork(ctx, ForkRequest{Tag: oldTag, N: 1, Path: PathCold}))
		},
		"pool": func(ctx context.Context, d *daemon) error {
			return fillPool(ctx, d, 1)
		},
		"claim": func(ctx context.Context, d *daemon) error {
			if err := fillPool(ctx, d, 1); err != nil {
				return err
			}
			return firstError(d.Fork(ctx, ForkRequest{Tag: oldTag, N: 1, Path: PathPool}))
		},
		"kill": func(ctx context.Context, d *daemon) error {
			all, err := d.Sandboxes(ctx)
			if err != nil {
				return err
			}
			return d.Kill(ctx, all[0].ID)
		},
		"branch":  branchOne,
		"capture": branchOne, // what internal/memory does in it
		"diff": func(ctx context.Context, d *daemon) error {
			_, err := d.SnapshotDiff(ctx, DiffRequest{From: oldTag, Tag: newTag, Steps: []WarmUp{{WarmUpExec, "echo more > /tmp/w"}}}, nil)
			return err
		},
		"compact": func(ctx context.Context, d *daemon) error {
			_, err := d.Compact(ctx, oldTag, newTag)
			return err
		},
		"suspend": suspendOne,
		"resume": func(ctx context.Context, d *daemon) error {
			if err := suspendOne(ctx, d); err != nil {
				return err
			}
			all, err := d.Sandboxes(ctx)
			if err != nil {
				return err
			}
			_, err = d.Resume(ctx, all[0].ID)
			return err
		},
		"network": func(ctx context.Context, d *daemon) error {
			all, err := d.Sandboxes(ctx)
			if err != nil {
				return err
			}
			_, err = d.SetNetwork(ctx, all[0].ID, reachAll)
			return err
		},
		"delete": func(ctx context.Context, d *daemon) error {
			if _, err := d.trySnapshot(ctx, newTag, nil); err != nil {
				return err
			}
			return d.DeleteSnapshot(ctx, newTag, DeleteSafe)
		},
	}
}

func branchOne(ctx context.Context, d *daemon) error {
	all, err := d.Sandboxes(ctx)
	if err != nil {
		return err
	}
	_, err = d.Branch(ctx, all[0].ID, BranchRequest{Tag: newTag, Wait: true})
	return err
}

func suspendOne(ctx context.Context, d *daemon) error {
	all, err := d.Sandboxes(ctx)
	if err != nil {
		return err
	}
	_, err = d.Suspend(ctx, all[0].ID, false)
	return err
}

func firstError(results []ForkResult, err error) error {
	for _, r := range results {
		err = errors.Join(err, r.Err)
	}
	return err
}

// fillPool sets the size of the old snapshot's pool and waits until it is full, or can't be filled.
func fillPool(ctx context.Context, d *daemon, size int) error {
	if _, err := d.SetPool(ctx, oldTag, size); err != nil {
		return err
	}
	for pauseFor(ctx, time.Millisecond) {
		st, err := d.Pool(ctx, oldTag)
		if err != nil || st.Ready == size {
			return err
		}
		if st.Problem != "" {
			return errors.New(st.Problem)
		}
	}
	return ctx.Err()
}

// scenarioOf is the scenario in which a failpoint is passed.
func scenarioOf(point string) string {
	return strings.Split(point, ".")[1]
}
