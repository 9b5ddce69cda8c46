package agent

import (
	"bytes"
	"context"
	"errors"
	"os"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/forkd/forkd/internal/guest/agentproto"
)

func TestExec(t *testing.T) {
	r := newRig(t, Options{})
	dir := t.TempDir()
	if err := os.WriteFile(dir+"/script", []byte("#!/bin/sh\necho script $1\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	out := func(s string) agentproto.ExecResult { return agentproto.ExecResult{Stdout: []byte(s)} }
	tests := []struct {
		name string
		req  agentproto.ExecRequest
		want agentproto.ExecResult
	}{
		{"stdout", agentproto.ExecRequest{Args: []string{"echo", "hi", "there"}}, out("hi there\n")},
		{"stderr and status", agentproto.ExecRequest{Args: []string{"sh", "-c", "echo no >&2; exit 3"}}, agentproto.ExecResult{Stderr: []byte("no\n"), ExitCode: 3}},
		{"signal", agentproto.ExecRequest{Args: []string{"sh", "-c", "kill -TERM $$"}}, agentproto.ExecResult{ExitCode: 143, Signal: "SIGTERM"}},
		{"stdin", agentproto.ExecRequest{Args: []string{"tr", "a-z", "A-Z"}, Stdin: []byte("loud")}, out("LOUD")},
		{"no stdin is empty", agentproto.ExecRequest{Args: []string{"wc", "-c"}}, out("0\n")},
		{"stdin that is not read", agentproto.ExecRequest{Args: []string{"true"}, Stdin: make([]byte, 1<<20)}, agentproto.ExecResult{}},
		{"cwd", agentproto.ExecRequest{Args: []string{"pwd"}, Cwd: dir}, out(dir + "\n")},
		{"relative command", agentproto.ExecRequest{Args: []string{"./script", "one"}, Cwd: dir}, out("script one\n")},
		{"command on the request's path", agentproto.ExecRequest{Args: []string{"script", "two"}, Env: []string{"PATH=" + dir + ":/bin"}}, out("script two\n")},
		{"env", agentproto.ExecRequest{Args: []string{"sh", "-c", "echo $A $LANG"}, Env: []string{"A=1", "A=2"}}, out("2 C.UTF-8\n")},
		{"own uid", agentproto.ExecRequest{Args: []string{"id", "-u"}, User: strconv.Itoa(os.Getuid())}, out(strconv.Itoa(os.Getuid()) + "\n")},
		{"session of its own", agentproto.ExecRequest{Args: []string{"sh", "-c", "test $(ps -o sid= -p $$) = $$ && echo leader"}}, out("leader\n")},
		{"truncated", agentproto.ExecRequest{Args: []string{"sh", "-c", "head -c 300000 /dev/zero | tr '\\0' x; echo end >&2"}, MaxOutput: 4},
			agentproto.ExecResult{Stdout: []byte("xxxx"), Stderr: []byte("end\n"), Truncated: true}},
		{"exactly the limit", agentproto.ExecRequest{Args: []string{"printf", "abcd"}, MaxOutput: 4}, out("abcd")},
	}
	for _, tc := range tests {
		t.Run(tc.name, func(t *testing.T) {
			if tc.name == "session of its own" {
				if _, err := lookPath("ps", "/", defaultPath); err != nil {
					t.Skip("no ps on this machine")
				}
			}
			got, err := r.Exec(testContext(t), tc.req)
			if err != nil {
				t.Fatalf("Exec: %v", err)
			}
			if diff := cmp.Diff(got, tc.want); diff != "" {
				t.Errorf("result (-got +want):\n%s", diff)
			}
		})
	}
}

func TestExecTruncatesAtTheLimitEvenOfStderr(t *testing.T) {
	r := newRig(t, Options{})
	got, err := r.Exec(testContext(t), agentproto.ExecRequest{Args: []string{"sh", "-c", "printf abcdef >&2"}, MaxOutput: 4})
	if err != nil {
		t.Fatalf("Exec: %v", err)
	}
	if diff := cmp.Diff(got, agentproto.ExecResult{Stderr: []byte("abcd"), Truncated: true}); diff != "" {
		t.Errorf("result (-got +want):\n%s", diff)
	}
}

func TestExecErrors(t *testing.T) {
	r := newRig(t, Options{})
	dir := t.TempDir()
	for name, mode := range map[string]os.FileMode{"plain": 0o644, "nonsense": 0o755} {
		if err := os.WriteFile(dir+"/"+name, []byte("\x00\x01\x02"), mode); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.WriteFile(dir+"/lost", []byte("#!/no/such/interpreter\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	tests := []struct {
		name string
		req  agentproto.ExecRequest
		code agentproto.Code
		text string
	}{
		{"no args", agentproto.ExecRequest{}, agentproto.CodeBadRequest, "no command"},
		{"empty command", agentproto.ExecRequest{Args: []string{""}}, agentproto.CodeBadRequest, "no command"},
		{"zero byte", agentproto.ExecRequest{Args: []string{"a\x00b"}}, agentproto.CodeBadRequest, "zero byte"},
		{"unknown command", agentproto.ExecRequest{Args: []string{"no-such-command"}}, agentproto.CodeNotFound, "no-such-command"},
		{"unknown path", agentproto.ExecRequest{Args: []string{"/no/such/command"}}, agentproto.CodeNotFound, "/no/such/command"},
		{"not executable", agentproto.ExecRequest{Args: []string{dir + "/plain"}}, agentproto.CodeNotFound, "permission denied"},
		{"a directory", agentproto.ExecRequest{Args: []string{dir}}, agentproto.CodeNotFound, "permission denied"},
		{"no program", agentproto.ExecRequest{Args: []string{dir + "/nonsense"}}, agentproto.CodeNotFound, "#! line"},
		{"lost interpreter", agentproto.ExecRequest{Args: []string{dir + "/lost"}}, agentproto.CodeNotFound, "interpreter"},
		{"unknown user", agentproto.ExecRequest{Args: []string{"true"}, User: "no-such-user"}, agentproto.CodeBadUser, "no-such-user"},
		{"unknown group", agentproto.ExecRequest{Args: []string{"true"}, User: "0:no-such-group"}, agentproto.CodeBadUser, "no-such-group"},
		{"no directory", agentproto.ExecRequest{Args: []string{"true"}, Cwd: "/no/such/dir"}, agentproto.CodeBadCwd, "/no/such/dir"},
		{"cwd is a file", agentproto.ExecRequest{Args: []string{"true"}, Cwd: dir + "/plain"}, agentproto.CodeBadCwd, "not a directory"},
		{"bad env", agentproto.ExecRequest{Args: []string{"true"}, Env: []string{"A=1", "novalue"}}, agentproto.CodeBadRequest, "novalue"},
		{"too long", agentproto.ExecRequest{Args: []string{"true", strings.Repeat("x", 4<<20)}}, agentproto.CodeBadRequest, "too long"},
	}
	for _, tc := range tests {
		t.Run(tc.name, func(t *testing.T) {
			_, err := r.Exec(testContext(t), tc.req)
			wantCode(t, err, tc.code)
			if err != nil && !strings.Contains(err.Error(), tc.text) {
				t.Errorf("error: got %q, want it to contain %q", err, tc.text)
			}
		})
	}
	if got := r.agent.execs.len(); got != 0 {
		t.Errorf("commands left: got %d, want 0", got)
	}
}

func TestExecAsAnotherUser(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("needs root to become another user")
	}
	r := newRig(t, Options{})
	got, err := r.Exec(testContext(t), agentproto.ExecRequest{Args: []string{"sh", "-c", "id -u; id -g; id -G; echo $HOME $USER"}, User: "54321"})
	if err != nil {
		t.Fatalf("Exec: %v", err)
	}
	if want := "54321\n54321\n54321\n/ 54321\n"; string(got.Stdout) != want {
		t.Errorf("stdout: got %q, want %q", got.Stdout, want)
	}
}

func TestExecTimeoutKillsTheWholeSession(t *testing.T) {
	r := newRig(t, Options{})
	dir := t.TempDir()
	// A child in the background, and one in a process group of its own.
	script := `sleep 300 & echo $! > "$D/a"; perl -e 'setpgrp(0,0); exec "sleep", "300"' & echo $! > "$D/b"; echo started; wait`
	if _, err := lookPath("perl", "/", defaultPath); err != nil {
		script = `sleep 300 & echo $! > "$D/a"; cp "$D/a" "$D/b"; echo started; wait`
	}
	start := time.Now()
	got, err := r.Exec(testContext(t), agentproto.ExecRequest{Args: []string{"sh", "-c", script}, Env: []string{"D=" + dir}, TimeoutMS: 500})
	if err != nil {
		t.Fatalf("Exec: %v", err)
	}
	want := agentproto.ExecResult{Stdout: []byte("started\n"), ExitCode: 137, Signal: "SIGKILL", TimedOut: true}
	if diff := cmp.Diff(got, want); diff != "" {
		t.Errorf("result (-got +want):\n%s", diff)
	}
	if took := time.Since(start); took > 20*time.Second {
		t.Errorf("took %v, want about 0.5 s", took)
	}
	for _, name := range []string{"a", "b"} {
		b, err := os.ReadFile(dir + "/" + name)
		if err != nil {
			t.Fatal(err)
		}
		pid, _ := strconv.Atoi(strings.TrimSpace(string(b)))
		waitGone(t, pid)
	}
}

// waitGone waits until a process has ended; one that nobody has reaped yet counts.
func waitGone(t *testing.T, pid int) {
	t.Helper()
	fd, err := unix.PidfdOpen(pid, 0)
	if err != nil {
		return
	}
	defer unix.Close(fd)
	fds := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}
	for {
		n, err := unix.Poll(fds, 10000)
		if err == unix.EINTR {
			continue
		}
		if err != nil || n == 0 {
			t.Errorf("process %d still lives: %v", pid, err)
			_ = unix.Kill(pid, unix.SIGKILL)
		}
		return
	}
}

func TestExecIsNotHeldUpByABackgroundProcess(t *testing.T) {
	r := newRig(t, Options{}, func(a *Agent) { a.limits.linger = 50 * time.Millisecond })
	start := time.Now()
	got := r.sh("sleep 300 & echo $!")
	if took := time.Since(start); took > 10*time.Second {
		t.Errorf("took %v, want no wait for the background process", took)
	}
	pid, err := strconv.Atoi(strings.TrimSpace(string(got.Stdout)))
	if err != nil {
		t.Fatalf("stdout: got %q, want a pid", got.Stdout)
	}
	if err := unix.Kill(pid, 0); err != nil {
		t.Errorf("background process: %v, want it alive", err)
	}
	_ = unix.Kill(pid, unix.SIGKILL)
}

// TestExecEndsWhoWritesWithoutRest: there is always something to read of four writers, when the time is over and when the command has ended.
func TestExecEndsWhoWritesWithoutRest(t *testing.T) {
	r := newRig(t, Options{}, func(a *Agent) { a.limits.linger = 50 * time.Millisecond })
	dir := t.TempDir()
	const writers = `for i in 1 2 3 4; do cat /dev/zero & echo $! >>"$D/pids"; done`
	for end, timedOut := range map[string]bool{"wait": true, "exit 0": false} {
		ctx, cancel := context.WithTimeout(testContext(t), 15*time.Second)
		got, err := r.Exec(ctx, agentproto.ExecRequest{Args: []string{"sh", "-c", writers + "; " + end}, Env: []string{"D=" + dir}, TimeoutMS: 300, MaxOutput: 100})
		cancel()
		if err != nil || got.TimedOut != timedOut || !got.Truncated || len(got.Stdout) != 100 {
			t.Errorf("%s: got %d bytes, timed out %v, truncated %v, %v; want 100, %v, true", end, len(got.Stdout), got.TimedOut, got.Truncated, err, timedOut)
		}
	}
	pids, _ := os.ReadFile(dir + "/pids")
	for _, text := range strings.Fields(string(pids)) {
		pid, _ := strconv.Atoi(text)
		_ = unix.Kill(pid, unix.SIGKILL)
	}
}

func TestExecReadsOutputThatComesJustAfterTheEnd(t *testing.T) {
	r := newRig(t, Options{}, func(a *Agent) { a.limits.linger = 20 * time.Second })
	if got := string(r.sh("(sleep 0.2; echo late) & echo early").Stdout); got != "early\nlate\n" {
		t.Errorf("stdout: got %q, want both lines", got)
	}
}

func TestExecCancelKillsTheCommand(t *testing.T) {
	r := newRig(t, Options{})
	dir := t.TempDir()
	ctx, cancel := context.WithCancelCause(testContext(t))
	started := dir + "/pid"
	if err := unix.Mkfifo(started, 0o600); err != nil {
		t.Fatal(err)
	}
	done := make(chan error, 1)
	go func() {
		_, err := r.Exec(ctx, agentproto.ExecRequest{Args: []string{"sh", "-c", "echo $$ > " + started + "; exec sleep 300"}})
		done <- err
	}()
	b, err := os.ReadFile(started)
	if err != nil {
		t.Fatal(err)
	}
	pid, _ := strconv.Atoi(strings.TrimSpace(string(b)))
	stop := errors.New("enough")
	cancel(stop)
	if err := <-done; !errors.Is(err, stop) {
		t.Errorf("Exec: got %v, want %v", err, stop)
	}
	waitGone(t, pid)
	if _, err := r.Ping(testContext(t)); err != nil {
		t.Errorf("Ping after a cancel: %v", err)
	}
}

func TestPingDoesNotWaitForExec(t *testing.T) {
	r := newRig(t, Options{})
	ctx, cancel := context.WithCancel(testContext(t))
	defer cancel()
	const n = 5
	done := make(chan error, n)
	for range n {
		go func() {
			_, err := r.Exec(ctx, agentproto.ExecRequest{Args: []string{"sleep", "300"}})
			done <- err
		}()
	}
	for r.agent.execs.len() < n {
		if _, err := r.Ping(ctx); err != nil {
			t.Fatalf("Ping: %v", err)
		}
	}
	if _, err := r.Identify(ctx, sampleIdentity()); err != nil {
		t.Errorf("Identify while commands run: %v", err)
	}
	wantCode(t, r.Quiesce(ctx), agentproto.CodeBusy)
	cancel()
	for range n {
		if err := <-done; !errors.Is(err, context.Canceled) {
			t.Errorf("Exec: got %v, want %v", err, context.Canceled)
		}
	}
}

func TestExecLimitsHowManyRun(t *testing.T) {
	r := newRig(t, Options{})
	var held []*command
	for range agentproto.MaxCommands {
		held = append(held, &command{})
		r.agent.execs.add(held[len(held)-1])
	}
	_, err := r.Exec(testContext(t), agentproto.ExecRequest{Args: []string{"true"}})
	wantCode(t, err, agentproto.CodeBusy)
	for _, c := range held {
		r.agent.execs.remove(c)
	}
}

func TestExecBigInputAndOutput(t *testing.T) {
	r := newRig(t, Options{})
	in := bytes.Repeat([]byte("0123456789abcde\n"), 3<<20/16)
	got, err := r.Exec(testContext(t), agentproto.ExecRequest{Args: []string{"cat"}, Stdin: in, MaxOutput: 4 << 20})
	if err != nil {
		t.Fatalf("Exec: %v", err)
	}
	if !bytes.Equal(got.Stdout, in) || got.Truncated {
		t.Errorf("stdout: got %d bytes, truncated %v, want the %d bytes of stdin", len(got.Stdout), got.Truncated, len(in))
	}
}

func TestExecMany(t *testing.T) {
	r := newRig(t, Options{})
	ctx := testContext(t)
	done := make(chan error, 40)
	for i := range 40 {
		go func() {
			want := strconv.Itoa(i)
			got, err := r.Exec(ctx, agentproto.ExecRequest{Args: []string{"echo", "-n", want}})
			if err == nil && string(got.Stdout) != want {
				err = errors.New("got " + string(got.Stdout) + ", want " + want)
			}
			done <- err
		}()
	}
	for range 40 {
		if err := <-done; err != nil {
			t.Error(err)
		}
	}
}
