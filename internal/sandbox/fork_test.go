package sandbox

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/forkd/forkd/internal/limits"
	"github.com/forkd/forkd/internal/vmm/vmmtest"
)

func TestForkIsolatesChildren(t *testing.T) {
	d := newWorld(t).start(t, options{})
	s := d.snapshot(t, "py", func(r *SnapshotRequest) {
		r.WarmUp = []WarmUp{{WarmUpExec, "echo warm > /tmp/w"}, {WarmUpEval, "x = 41"}}
	})
	if !s.Bootable || s.Status != StatusReady || !s.Python || !s.Resident || s.BootWarm <= 0 {
		t.Errorf("snapshot: got %+v, want it ready, bootable, with python, resident, with a boot time", s)
	}
	boxes := d.fork(t, "py", 5, func(r *ForkRequest) {
		r.Env = map[string]string{"A": "b=c", "BASE": "2"}
		r.Metadata = map[string]string{"k": "v"}
	})
	distinct := map[string]map[string]bool{"hostname": {}, "urandom": {}, "machine-id": {}}
	for i, b := range boxes {
		if b.State != StateRunning || b.PID == 0 || b.Path != StartedCold || b.ReadyIn <= 0 || b.Metadata["k"] != "v" {
			t.Errorf("sandbox %d: got %+v, want it running, cold, with a process and metadata", i, b)
		}
		if got := d.sh(t, b.ID, "cat /tmp/w"); got != "warm" {
			t.Errorf("warm-up file in child %d: got %q, want warm", i, got)
		}
		if got := d.sh(t, b.ID, "env"); got != "A=b=c\nBASE=2" {
			t.Errorf("env of child %d: got %q, want its own over the snapshot's", i, got)
		}
		res, err := d.Eval(t.Context(), b.ID, EvalRequest{Code: "x = x + 1; x"})
		if err != nil || res.Result != "42" {
			t.Errorf("eval in child %d: got %+v, %v, want 42", i, res, err)
		}
		d.sh(t, b.ID, "echo mine > /tmp/w")
		if got := d.sh(t, b.ID, "hostname"); got != b.ID {
			t.Errorf("hostname of child %d: got %q, want %q", i, got, b.ID)
		}
		distinct["hostname"][d.sh(t, b.ID, "hostname")] = true
		distinct["urandom"][d.sh(t, b.ID, "urandom")] = true
		distinct["machine-id"][d.sh(t, b.ID, "cat /etc/machine-id")] = true
	}
	for what, values := range distinct {
		if len(values) != len(boxes) {
			t.Errorf("distinct values of %s: got %d, want %d", what, len(values), len(boxes))
		}
	}
	list, err := d.Sandboxes(t.Context())
	if err != nil || len(list) != 5 {
		t.Errorf("Sandboxes: got %d, %v, want 5", len(list), err)
	}
	for _, b := range boxes {
		if err := d.Kill(t.Context(), b.ID); err != nil {
			t.Errorf("Kill: %v", err)
		}
	}
	d.checkTidy(t, 0, "py")
}

func TestForkRefusesBadRequests(t *testing.T) {
	d := newWorld(t).start(t, options{})
	d.snapshot(t, "py", nil)
	tests := []struct {
		name string
		req  ForkRequest
		want Code
	}{
		{"unknown tag", ForkRequest{Tag: "nope", N: 1}, CodeSnapshotNotFound},
		{"slash", ForkRequest{Tag: "a/b", N: 1}, CodeInvalidTag},
		{"dots", ForkRequest{Tag: "..", N: 1}, CodeInvalidTag},
		{"empty tag", ForkRequest{N: 1}, CodeInvalidTag},
		{"65 characters", ForkRequest{Tag: strings.Repeat("a", 65), N: 1}, CodeInvalidTag},
		{"n of 0", ForkRequest{Tag: "py"}, CodeInvalidArgument},
		{"negative n", ForkRequest{Tag: "py", N: -1}, CodeInvalidArgument},
		{"too many", ForkRequest{Tag: "py", N: 1001}, CodeInvalidArgument},
		{"negative timeout", ForkRequest{Tag: "py", N: 1, Timeout: -1}, CodeInvalidArgument},
		{"unknown path", ForkRequest{Tag: "py", N: 1, Path: "magic"}, CodeInvalidArgument},
		{"env name with =", ForkRequest{Tag: "py", N: 1, Env: map[string]string{"A=": "x"}}, CodeInvalidArgument},
		{"env value with NUL", ForkRequest{Tag: "py", N: 1, Env: map[string]string{"A": "x\x00"}}, CodeInvalidArgument},
		{"huge env", ForkRequest{Tag: "py", N: 1, Env: map[string]string{"A": strings.Repeat("x", maxEnvBytes)}}, CodeInvalidArgument},
		{"huge metadata", ForkRequest{Tag: "py", N: 1, Metadata: map[string]string{"A": strings.Repeat("x", maxMetadataBytes)}}, CodeInvalidArgument},
		{"limit that is too small", ForkRequest{Tag: "py", N: 1, Limits: limits.Limits{MemoryMiB: 16}}, CodeInvalidArgument},
		{"limit that can't be kept", ForkRequest{Tag: "py", N: 1, Limits: limits.Limits{MemoryMiB: leastMemoryMiB}}, CodeLimitsUnavailable},
		{"negative limit", ForkRequest{Tag: "py", N: 1, Limits: limits.Limits{PIDs: -1}}, CodeInvalidArgument},
		{"too few processes", ForkRequest{Tag: "py", N: 1, Limits: limits.Limits{PIDs: 3}}, CodeInvalidArgument},
		{"empty pool asked for", ForkRequest{Tag: "py", N: 1, Path: PathPool}, CodeQueueFull},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			results, err := d.Fork(t.Context(), tt.req)
			checkCode(t, "Fork", err, tt.want)
			if results != nil {
				t.Errorf("got results beside the error: %v", results)
			}
		})
	}
	d.checkTidy(t, 0, "py")
	if b := d.fork(t, "py", 1, func(r *ForkRequest) { r.Limits.MemoryMiB = testMemMiB + monitorAtMost }); b[0].MemoryLimitMiB != testMemMiB+monitorAtMost {
		t.Errorf("a limit that is met anyway: got %+v", b[0])
	}
}

func TestForkWithMemoryForThreeOfTen(t *testing.T) {
	l := Limits{MonitorOverhead: 10 << 20, GuestPrivate: 1 << 20, MemoryBudget: 3 * 11 << 20}
	d := newWorld(t).start(t, options{limits: l})
	d.snapshot(t, "py", nil)
	results, err := d.Fork(t.Context(), ForkRequest{Tag: "py", N: 10})
	if err != nil {
		t.Fatalf("Fork: %v", err)
	}
	var ready []string
	for i, r := range results {
		if r.Err == nil {
			ready = append(ready, r.Sandbox.ID)
			continue
		}
		checkCode(t, fmt.Sprintf("child %d", i), r.Err, CodeInsufficientMemory)
		var e *Error
		if !errors.As(r.Err, &e) || e.RetryAfter <= 0 {
			t.Errorf("child %d: got no time to retry after", i)
		}
	}
	if len(ready) != 3 {
		t.Errorf("got %d sandboxes, want 3", len(ready))
	}
	_, err = d.Fork(t.Context(), ForkRequest{Tag: "py", N: 1})
	checkCode(t, "with no room at all", err, CodeInsufficientMemory)
	if err := d.Kill(t.Context(), ready[0]); err != nil {
		t.Fatal(err)
	}
	d.fork(t, "py", 1, nil) // there is room again
	d.checkTidy(t, 3, "py")
}

func TestForkReportsEachFailure(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	d := w.start(t, options{limits: Limits{Launches: 1, LaunchTimeout: 4 * time.Second}})
	d.snapshot(t, "py", nil)
	tests := []struct {
		name  string
		fault vmmtest.Fault
		want  Code
	}{
		{"monitor does not start", vmmtest.Fault{Step: vmmtest.StepPrepare, Call: 2, Action: vmmtest.Fail}, CodeInternal},
		{"state does not load", vmmtest.Fault{Step: vmmtest.StepLoad, Call: 2, Action: vmmtest.Fail}, CodeInternal},
		{"monitor dies while it loads", vmmtest.Fault{Step: vmmtest.StepLoad, Call: 2, Action: vmmtest.Die}, CodeInternal},
		{"guest does not resume", vmmtest.Fault{Step: vmmtest.StepResume, Call: 2, Action: vmmtest.Fail}, CodeInternal},
		{"resumes and fails", vmmtest.Fault{Step: vmmtest.StepResume, Call: 2, Action: vmmtest.FailLate}, CodeInternal},
		{"port can't be reached", vmmtest.Fault{Step: vmmtest.StepDial, Call: 2, Action: vmmtest.Fail}, CodeIdentityFailed},
		{"identity is refused", vmmtest.Fault{Step: vmmtest.StepIdentify, Call: 2, Action: vmmtest.Fail}, CodeIdentityFailed},
		{"identity is not acknowledged", vmmtest.Fault{Step: vmmtest.StepIdentify, Call: 2, Action: vmmtest.Stall}, CodeIdentityFailed},
		{"guest dies of its identity", vmmtest.Fault{Step: vmmtest.StepIdentify, Call: 2, Action: vmmtest.Die}, CodeIdentityFailed},
		{"guest is deaf", vmmtest.Fault{Step: vmmtest.StepGuest, Call: 2, Action: vmmtest.Stall}, CodeIdentityFailed},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			d.fake.Inject(tt.fault)
			results, err := d.Fork(t.Context(), ForkRequest{Tag: "py", N: 3})
			d.fake.Inject()
			if err != nil {
				t.Fatalf("Fork: %v", err)
			}
			failed := 0
			for _, r := range results {
				if r.Err != nil {
					failed++
					checkCode(t, "child", r.Err, tt.want)
					continue
				}
				if _, err := d.Ping(t.Context(), r.Sandbox.ID); err != nil {
					t.Errorf("Ping of a child that succeeded: %v", err)
				}
			}
			if failed != 1 {
				t.Errorf("got %d failures, want 1: %v", failed, results)
			}
			d.checkTidy(t, 2, "py")
			if err := d.killAll("test"); err != nil {
				t.Fatal(err)
			}
			d.checkTidy(t, 0, "py")
		})
	}
}

func TestForkGivenUp(t *testing.T) {
	d := newWorld(t).start(t, options{limits: Limits{Launches: 2}})
	d.snapshot(t, "py", nil)
	d.fake.Inject(vmmtest.Fault{Step: vmmtest.StepLoad, Call: 3, Action: vmmtest.Stall})
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() {
		_, err := d.Fork(ctx, ForkRequest{Tag: "py", N: 4})
		done <- err
	}()
	eventually(t, "the others to be ready", func() string {
		if n := d.Stats().Running; n != 3 {
			return fmt.Sprintf("%d run, want 3", n)
		}
		return ""
	})
	cancel()
	if err := <-done; !errors.Is(err, context.Canceled) {
		t.Errorf("got %v, want canceled", err)
	}
	d.checkTidy(t, 0, "py")
}

func TestForkQueueFull(t *testing.T) {
	d := newWorld(t).start(t, options{limits: Limits{Launches: 1, MaxQueue: 2}})
	d.snapshot(t, "py", nil)
	d.fake.Inject(vmmtest.Fault{Step: vmmtest.StepLoad, Call: 1, Action: vmmtest.Stall})
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	wg.Go(func() { _, _ = d.Fork(ctx, ForkRequest{Tag: "py", N: 3}) })
	eventually(t, "the queue to fill", func() string {
		if n := d.Stats().LaunchesQueued; n != 2 {
			return fmt.Sprintf("%d wait, want 2", n)
		}
		return ""
	})
	_, err := d.Fork(t.Context(), ForkRequest{Tag: "py", N: 1})
	checkCode(t, "Fork behind a full queue", err, CodeQueueFull)
	cancel()
	wg.Wait()
	d.fake.Inject()
	d.fork(t, "py", 1, nil)
	d.checkTidy(t, 1, "py")
}

func TestForkResultsAreInOrderAndIDsAreNew(t *testing.T) {
	d := newWorld(t).start(t, options{})
	d.snapshot(t, "py", nil)
	var ids []string
	for range 2 {
		for _, b := range d.fork(t, "py", 3, nil) {
			ids = append(ids, b.ID)
		}
	}
	slices.Sort(ids)
	if got := len(slices.Compact(ids)); got != 6 {
		t.Errorf("got %d distinct ids, want 6", got)
	}
	for _, id := range ids {
		if strings.Trim(id, "abcdefghijklmnopqrstuvwxyz0123456789") != "" {
			t.Errorf("id %q has other characters than a-z0-9", id)
		}
	}
}

func TestEnviron(t *testing.T) {
	got := environ([]string{"A=1", "B=2", "C"}, map[string]string{"B": "x=y", "D": ""})
	if diff := cmp.Diff(got, []string{"A=1", "B=x=y", "C", "D="}); diff != "" {
		t.Errorf("environ (-got +want):\n%s", diff)
	}
}
