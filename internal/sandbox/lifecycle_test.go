package sandbox

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/forkd/forkd/internal/vmm/vmmtest"
)

func TestMoves(t *testing.T) {
	all := []State{StateStarting, StateRunning, StateSuspended, StateStopped, StateFailed}
	legal := map[string]bool{
		"starting running": true, "starting failed": true,
		"running suspended": true, "running stopped": true, "running failed": true,
		"suspended running": true, "suspended stopped": true, "suspended failed": true,
	}
	for _, from := range all {
		for _, to := range all {
			if got, want := from.canBecome(to), legal[string(from+" "+to)]; got != want {
				t.Errorf("%s → %s: got legal %v, want %v", from, to, got, want)
			}
		}
	}
}

func TestKill(t *testing.T) {
	d := newWorld(t).start(t, options{})
	d.snapshot(t, "py", nil)
	checkCode(t, "unknown", d.Kill(t.Context(), "sbnope"), CodeSandboxNotFound)
	b := d.fork(t, "py", 1, nil)[0]
	if err := d.Kill(t.Context(), b.ID); err != nil {
		t.Fatal(err)
	}
	checkCode(t, "again", d.Kill(t.Context(), b.ID), CodeSandboxNotFound)
	_, err := d.Sandbox(t.Context(), b.ID)
	checkCode(t, "Sandbox", err, CodeSandboxNotFound)
	_, err = d.Ping(t.Context(), b.ID)
	checkCode(t, "Ping", err, CodeSandboxNotFound)
	if diff := cmp.Diff(d.events.of(b.ID), []State{StateRunning, StateStopped}); diff != "" {
		t.Errorf("events (-got +want):\n%s", diff)
	}

	b = d.fork(t, "py", 1, nil)[0]
	var wg sync.WaitGroup
	for range 8 { // all of them see it gone
		wg.Go(func() {
			if err := d.Kill(t.Context(), b.ID); err != nil && CodeOf(err) != CodeSandboxNotFound {
				t.Errorf("concurrent Kill: %v", err)
			}
			if _, ok := d.live(b.ID); ok {
				t.Error("Kill returned while the sandbox lives")
			}
		})
	}
	wg.Wait()
	d.checkTidy(t, 0, "py")
	if got := d.Stats().Kills; got != 2 {
		t.Errorf("Stats.Kills: got %d, want 2", got)
	}
}

// TestEnds has sandboxes end otherwise than by Kill: their records and consoles are kept, and say why.
func TestEnds(t *testing.T) {
	tests := []struct {
		name   string
		end    func(t *testing.T, d *daemon, b Sandbox)
		state  State
		reason string
	}{
		{"guest powers off", func(t *testing.T, d *daemon, b Sandbox) {
			_, _ = d.Exec(t.Context(), b.ID, ExecRequest{Args: []string{"poweroff"}})
		}, StateStopped, "the guest shut down"},
		{"monitor is killed from outside", func(t *testing.T, _ *daemon, b Sandbox) {
			if err := syscall.Kill(b.PID, syscall.SIGKILL); err != nil {
				t.Error(err)
			}
		}, StateFailed, "the monitor ended by itself"},
		{"deadline", func(t *testing.T, d *daemon, b Sandbox) {
			if _, err := d.Extend(t.Context(), b.ID, time.Millisecond); err != nil {
				t.Error(err)
			}
		}, StateStopped, "its deadline passed"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			d := newWorld(t).start(t, options{})
			d.snapshot(t, "py", nil)
			b := d.fork(t, "py", 1, nil)[0]
			d.sh(t, b.ID, "console last words")
			tt.end(t, d, b)
			eventually(t, "its end", func() string {
				if _, ok := d.live(b.ID); ok {
					return "it lives"
				}
				return ""
			})
			got, err := d.Sandbox(t.Context(), b.ID)
			if err != nil || got.State != tt.state || !strings.HasPrefix(got.Reason, tt.reason) || got.EndedAt.IsZero() || got.PID != 0 {
				t.Errorf("got %+v, %v, want %s: %s", got, err, tt.state, tt.reason)
			}
			_, err = d.Exec(t.Context(), b.ID, ExecRequest{Args: []string{"true"}})
			checkCode(t, "Exec", err, CodeSandboxGone)
			if !strings.Contains(fmt.Sprint(err), tt.reason) {
				t.Errorf("error %q does not say %q", err, tt.reason)
			}
			log, err := d.Logs(t.Context(), b.ID)
			if tt.state == StateStopped && !strings.Contains(string(log), "last words") || err != nil {
				t.Errorf("Logs: got %q, %v", log, err)
			}
			if list, _ := d.Sandboxes(t.Context()); len(list) != 0 {
				t.Errorf("it is listed among those that live: %+v", list)
			}
			if ended, err := d.Ended(t.Context()); err != nil || len(ended) != 1 || ended[0].ID != b.ID {
				t.Errorf("Ended: got %+v, %v", ended, err)
			}
			d.checkTidy(t, 0, "py")
			if err := d.Kill(t.Context(), b.ID); err != nil {
				t.Errorf("Kill of an ended sandbox: %v", err)
			}
			checkCode(t, "and again", d.Kill(t.Context(), b.ID), CodeSandboxNotFound)
		})
	}
}

func TestForgetsEndedSandboxes(t *testing.T) {
	d := newWorld(t).start(t, options{limits: Limits{KeepEnded: 2}})
	d.snapshot(t, "py", nil)
	var last string
	for range 4 {
		b := d.fork(t, "py", 1, nil)[0]
		last = b.ID
		d.sh(t, b.ID, "console x")
		_, _ = d.Exec(t.Context(), b.ID, ExecRequest{Args: []string{"poweroff"}})
		eventually(t, "its end", func() string {
			if _, ok := d.live(b.ID); ok {
				return "it lives"
			}
			return ""
		})
	}
	if err := d.forgetOnce(t.Context()); err != nil {
		t.Fatal(err)
	}
	ended, err := d.Ended(t.Context())
	if err != nil || len(ended) != 2 || ended[0].ID != last {
		t.Errorf("Ended: got %+v, %v, want the last 2", ended, err)
	}
	if log, err := d.Logs(t.Context(), last); err != nil || len(log) == 0 {
		t.Errorf("Logs of one that is remembered: got %q, %v", log, err)
	}
}

func TestDeadlines(t *testing.T) {
	d := newWorld(t).start(t, options{})
	d.snapshot(t, "py", nil)
	b := d.fork(t, "py", 1, func(r *ForkRequest) { r.Timeout = time.Hour })[0]
	if left := time.Until(b.Deadline); left < 59*time.Minute || left > time.Hour {
		t.Errorf("deadline: got %v from now, want about an hour", left)
	}
	got, err := d.Extend(t.Context(), b.ID, 2*time.Hour)
	if left := time.Until(got.Deadline); err != nil || left < 119*time.Minute {
		t.Errorf("extended deadline: got %v from now, %v, want about two hours", left, err)
	}
	got, err = d.Extend(t.Context(), b.ID, 0)
	if err != nil || !got.Deadline.IsZero() {
		t.Errorf("removed deadline: got %v, %v", got.Deadline, err)
	}
	_, err = d.Extend(t.Context(), b.ID, -1)
	checkCode(t, "negative", err, CodeInvalidArgument)
	_, err = d.Extend(t.Context(), "sbnope", time.Hour)
	checkCode(t, "unknown", err, CodeSandboxNotFound)
}

// TestExtendRacesExpiry extends a deadline at the moment at which it passes: whoever says that it was extended finds it alive.
func TestExtendRacesExpiry(t *testing.T) {
	d := newWorld(t).start(t, options{})
	d.snapshot(t, "py", nil)
	for range 25 {
		b := d.fork(t, "py", 1, func(r *ForkRequest) { r.Timeout = 20 * time.Millisecond })[0]
		timer := time.NewTimer(time.Until(b.Deadline))
		<-timer.C
		_, err := d.Extend(t.Context(), b.ID, time.Hour)
		_, alive := d.Ping(t.Context(), b.ID)
		if err == nil && alive != nil {
			t.Errorf("extended, and yet: %v", alive)
		}
		if err != nil && CodeOf(err) != CodeSandboxGone {
			t.Errorf("Extend: %v, want sandbox_gone", err)
		}
	}
}

func TestExecAndEval(t *testing.T) {
	d := newWorld(t).start(t, options{})
	d.snapshot(t, "py", nil)
	id := d.fork(t, "py", 1, nil)[0].ID
	ctx := t.Context()

	res, err := d.Exec(ctx, id, ExecRequest{Args: []string{"sh", "-c", "echo out; stderr err; exit 7"}, Env: map[string]string{"X": "y"}})
	if err != nil || string(res.Stdout) != "out\n" || string(res.Stderr) != "err\n" || res.ExitCode != 7 || res.Duration <= 0 {
		t.Errorf("Exec: got %+v, %v", res, err)
	}
	res, err = d.Exec(ctx, id, ExecRequest{Args: []string{"cat"}, Stdin: []byte("in")})
	if err != nil || string(res.Stdout) != "in" {
		t.Errorf("Exec with stdin: got %+v, %v", res, err)
	}
	res, err = d.Exec(ctx, id, ExecRequest{Args: []string{"nope"}})
	if err != nil || res.ExitCode != 127 || !strings.Contains(string(res.Stderr), "nope") {
		t.Errorf("Exec of a missing command: got %+v, %v, want exit code 127", res, err)
	}
	res, err = d.Exec(ctx, id, ExecRequest{Args: []string{"hang"}, Timeout: 50 * time.Millisecond})
	if err != nil || !res.TimedOut {
		t.Errorf("Exec beyond its timeout: got %+v, %v, want it timed out", res, err)
	}
	res, err = d.Exec(ctx, id, ExecRequest{Args: []string{"spew", "5000"}, MaxOutput: 100})
	if err != nil || !res.Truncated || len(res.Stdout) != 100 {
		t.Errorf("Exec with much output: got %d bytes, truncated %v, %v", len(res.Stdout), res.Truncated, err)
	}
	for name, req := range map[string]ExecRequest{
		"no args": {}, "empty command": {Args: []string{""}}, "bad user": {Args: []string{"true"}, User: "nobody"},
		"bad cwd": {Args: []string{"true"}, Cwd: "/nope"}, "long timeout": {Args: []string{"true"}, Timeout: 48 * time.Hour},
		"negative output": {Args: []string{"true"}, MaxOutput: -1}, "bad env": {Args: []string{"true"}, Env: map[string]string{"": ""}},
		"huge stdin": {Args: []string{"true"}, Stdin: make([]byte, maxStdin+1)},
	} {
		_, err := d.Exec(ctx, id, req)
		checkCode(t, name, err, CodeInvalidArgument)
	}

	ev, err := d.Eval(ctx, id, EvalRequest{Code: "print('hi'); 40 + 2"})
	if err != nil || ev.Result != "42" || string(ev.Stdout) != "hi\n" || ev.Error != "" {
		t.Errorf("Eval: got %+v, %v", ev, err)
	}
	ev, err = d.Eval(ctx, id, EvalRequest{Code: "raise Oops"})
	if err != nil || !strings.Contains(ev.Error, "Oops") {
		t.Errorf("Eval that raises: got %+v, %v", ev, err)
	}
	ev, err = d.Eval(ctx, id, EvalRequest{Code: "hang()", Timeout: 50 * time.Millisecond})
	if err != nil || !ev.TimedOut {
		t.Errorf("Eval beyond its timeout: got %+v, %v", ev, err)
	}
	_, err = d.Eval(ctx, id, EvalRequest{Code: "1", Timeout: -1})
	checkCode(t, "negative timeout", err, CodeInvalidArgument)
}

func TestEvalWithoutPython(t *testing.T) {
	d := newWorld(t).start(t, options{fake: vmmtest.FakeOptions{NoPython: true}})
	if s := d.snapshot(t, "sh", func(r *SnapshotRequest) { r.PoolSize = 1 }); s.Python {
		t.Error("snapshot says it has python")
	}
	waitPool(t, d, "sh", 1)
	b := d.fork(t, "sh", 1, nil)[0]
	_, err := d.Eval(t.Context(), b.ID, EvalRequest{Code: "1"})
	checkCode(t, "Eval", err, CodeNoInterpreter)
}

func TestCallsEndWithTheSandbox(t *testing.T) {
	d := newWorld(t).start(t, options{})
	d.snapshot(t, "py", nil)
	for name, end := range map[string]func(b Sandbox) error{
		"killed":  func(b Sandbox) error { return d.Kill(t.Context(), b.ID) },
		"crashed": func(b Sandbox) error { return syscall.Kill(b.PID, syscall.SIGKILL) },
	} {
		t.Run(name, func(t *testing.T) {
			b := d.fork(t, "py", 1, nil)[0]
			done := make(chan error, 1)
			go func() {
				_, err := d.Exec(t.Context(), b.ID, ExecRequest{Args: []string{"hang"}, Timeout: time.Minute})
				done <- err
			}()
			if _, err := d.Ping(t.Context(), b.ID); err != nil { // does not wait behind the command
				t.Errorf("Ping: %v", err)
			}
			if err := end(b); err != nil {
				t.Fatal(err)
			}
			checkCode(t, "Exec", <-done, CodeSandboxGone)
		})
	}
}

func TestDeafGuest(t *testing.T) {
	d := newWorld(t).start(t, options{})
	d.snapshot(t, "py", nil)
	d.fake.Inject(vmmtest.Fault{Step: vmmtest.StepExec, Action: vmmtest.Stall})
	b := d.fork(t, "py", 1, nil)[0]
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	if _, err := d.Exec(ctx, b.ID, ExecRequest{Args: []string{"true"}}); err == nil {
		t.Error("Exec in a deaf guest: got no error")
	}
	err := d.call(t.Context(), b.ID, 100*time.Millisecond, func(ctx context.Context, c *child) error {
		<-ctx.Done()
		return ctx.Err()
	})
	checkCode(t, "a call without an answer", err, CodeGuestUnreachable)
}

func TestUsageAndStats(t *testing.T) {
	d := newWorld(t).start(t, options{})
	d.snapshot(t, "py", nil)
	b := d.fork(t, "py", 2, nil)[0]
	d.sh(t, b.ID, "dirty 50")
	u, err := d.Usage(t.Context(), b.ID)
	if err != nil || u.GuestAnonKiB < 200 || u.PSSKiB <= 0 || u.RSSKiB < u.PSSKiB {
		t.Errorf("Usage: got %+v, %v, want 200 KiB of private guest memory at least", u, err)
	}
	s := d.Stats()
	if s.Running != 2 || s.Snapshots != 1 || s.ForksCold != 2 || s.ResidentImages != 1 || s.MemoryReservedBytes <= 0 {
		t.Errorf("Stats: got %+v", s)
	}
	_, err = d.Usage(t.Context(), "sbnope")
	checkCode(t, "Usage of an unknown sandbox", err, CodeSandboxNotFound)
	_, err = d.Logs(t.Context(), "sbnope")
	checkCode(t, "Logs of an unknown sandbox", err, CodeSandboxNotFound)
}
