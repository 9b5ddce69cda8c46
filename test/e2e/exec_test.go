package e2e

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/forkd/forkd/client"
)

// TestExec: what a command is given, what comes back of it, and every way in which it may end.
func TestExec(t *testing.T) {
	d := sharedDaemon(t)
	g := d.fork1()
	sh := func(script string) []string { return []string{"sh", "-c", script} }
	binary := make([]byte, 256)
	for i := range binary {
		binary[i] = byte(i)
	}
	tests := []struct {
		name string
		req  client.ExecRequest
		want client.ExecResult
	}{
		{"both outputs and a code", client.ExecRequest{Args: sh("echo out; echo err >&2; exit 3")}, client.ExecResult{Stdout: []byte("out\n"), Stderr: []byte("err\n"), ExitCode: 3}},
		{"nothing", client.ExecRequest{Args: []string{"true"}}, client.ExecResult{}},
		{"input and output of all bytes", client.ExecRequest{Args: []string{"cat"}, Stdin: binary}, client.ExecResult{Stdout: binary}},
		{"input larger than a pipe", client.ExecRequest{Args: []string{"wc", "-c"}, Stdin: make([]byte, 1<<20)}, client.ExecResult{Stdout: []byte("1048576\n")}},
		{"input that nobody reads", client.ExecRequest{Args: []string{"true"}, Stdin: make([]byte, 1<<20)}, client.ExecResult{}},
		{"directory", client.ExecRequest{Args: []string{"pwd"}, Cwd: "/usr/share"}, client.ExecResult{Stdout: []byte("/usr/share\n")}},
		{"environment", client.ExecRequest{Args: sh(`printf '%s' "$A"`), Env: map[string]string{"A": "a\nb"}}, client.ExecResult{Stdout: []byte("a\nb")}},
		{"user", client.ExecRequest{Args: sh("id -un; pwd; sudo -n id -un"), User: "user"}, client.ExecResult{Stdout: []byte("user\n/home/user\nroot\n")}},
		{"no shell in between", client.ExecRequest{Args: []string{"echo", "$HOME", "*", ";", "a  b"}}, client.ExecResult{Stdout: []byte("$HOME * ; a  b\n")}},
		{"ended by a signal", client.ExecRequest{Args: sh("kill -TERM $$")}, client.ExecResult{ExitCode: 143, Signal: "SIGTERM"}},
		{"output cut", client.ExecRequest{Args: sh("echo 0123456789; echo 0123456789 >&2"), MaxOutputBytes: 4}, client.ExecResult{Stdout: []byte("0123"), Stderr: []byte("0123"), Truncated: true}},
		{"unknown command", client.ExecRequest{Args: []string{"nosuch"}}, client.ExecResult{ExitCode: 127, Stderr: []byte("forkd: nosuch: no such command\n")}},
		{"child that keeps the output open", client.ExecRequest{Args: sh("sleep 300 & echo here")}, client.ExecResult{Stdout: []byte("here\n")}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			got, err := g.exec(tt.req)
			if err != nil {
				t.Fatal(err)
			}
			got.Duration = 0
			got.Stdout, got.Stderr = nonNil(got.Stdout), nonNil(got.Stderr)
			tt.want.Stdout, tt.want.Stderr = nonNil(tt.want.Stdout), nonNil(tt.want.Stderr)
			if diff := cmp.Diff(got, tt.want); diff != "" {
				t.Errorf("result (-got +want):\n%s", diff)
			}
		})
	}
	g.sh("pkill sleep; true")
	d.checkSandboxes(g)
}

func nonNil(b []byte) []byte { return append([]byte{}, b...) }

// TestExecBounds: output without end and time without end are cut, with all that the command started.
func TestExecBounds(t *testing.T) {
	d := sharedDaemon(t)
	g := d.fork1()
	res, err := g.exec(client.ExecRequest{Args: []string{"sh", "-c", "yes | head -c 3000000; yes | head -c 3000000 >&2"}})
	if err != nil || !res.Truncated || len(res.Stdout) != 1<<20 || len(res.Stderr) != 1<<20 {
		t.Errorf("too much output: got %d and %d bytes, truncated %v, %v", len(res.Stdout), len(res.Stderr), res.Truncated, err)
	}
	if want := bytes.Repeat([]byte("y\n"), 1<<19); !bytes.Equal(res.Stdout, want) {
		t.Error("too much output: its beginning is not what the command wrote")
	}
	res, err = g.exec(client.ExecRequest{Args: []string{"yes"}, Timeout: 2 * time.Second, MaxOutputBytes: 100})
	if err != nil || !res.TimedOut || !res.Truncated || len(res.Stdout) != 100 {
		t.Errorf("output without end: got %d bytes, timed out %v, truncated %v, %v", len(res.Stdout), res.TimedOut, res.Truncated, err)
	}
	res, err = g.exec(client.ExecRequest{Args: []string{"sh", "-c", "head -c 8388608 /dev/zero"}, MaxOutputBytes: 8 << 20})
	if err != nil || res.Truncated || len(res.Stdout) != 8<<20 {
		t.Errorf("as much output as can be had: got %d bytes, truncated %v, %v", len(res.Stdout), res.Truncated, err)
	}
	res, err = g.exec(client.ExecRequest{Args: []string{"sh", "-c", "trap '' TERM INT HUP; (sleep 1111 & sleep 1112) & sleep 1113"}, Timeout: 2 * time.Second})
	if err != nil || !res.TimedOut || res.ExitCode != 137 || res.Signal != "SIGKILL" {
		t.Errorf("time without end: got %+v, %v", res, err)
	}
	g.checkNoSleep("111")

	// A client that leaves takes its command with it.
	ctx, leave := context.WithCancel(t.Context())
	left := make(chan error, 1)
	go func() {
		_, err := d.client.Exec(ctx, g.ID, client.ExecRequest{Args: []string{"sh", "-c", "echo >/root/there; sleep 2222"}, Timeout: guestLimit})
		left <- err
	}()
	eventually(t, callLimit, func() error { _, err := g.trySh("test -e /root/there"); return err })
	leave()
	if err := <-left; !errors.Is(err, context.Canceled) {
		t.Errorf("exec whose client left: %v", err)
	}
	g.checkNoSleep("2222")
	d.checkSandboxes(g)
}

// checkNoSleep waits until no sleep of that many seconds runs in the guest.
func (g *guest) checkNoSleep(seconds string) {
	t := g.d.t
	t.Helper()
	eventually(t, tidyLimit, func() error {
		out, err := g.trySh("cat /proc/[0-9]*/cmdline 2>/dev/null; true")
		if err == nil && strings.Contains(out, "sleep\x00"+seconds) {
			err = fmt.Errorf("a command that was to end runs in %v", g)
		}
		return err
	})
}

// TestManyAtOnce: one guest's agent answers many at a time, refuses what is too many, and is well afterwards.
func TestManyAtOnce(t *testing.T) {
	d := sharedDaemon(t)
	g := d.fork1()
	const n = 68 // more than an agent runs at a time
	results := make(chan error, n)
	for i := range n {
		go func() {
			out, err := g.trySh(fmt.Sprintf("echo %d; exec sleep 2", i))
			if err == nil && out != fmt.Sprint(i) {
				err = fmt.Errorf("command %d got the output %q", i, out)
			}
			results <- err
		}()
	}
	done := 0
	for range n {
		switch err := <-results; {
		case err == nil:
			done++
		case !client.IsCode(err, "invalid_state"):
			t.Errorf("one of many commands: %v", err)
		default:
			var e *client.Error
			if errors.As(err, &e); e.RetryAfter == 0 {
				t.Errorf("a command that was one too many: no Retry-After: %v", err)
			}
		}
	}
	if done < 30 {
		t.Errorf("%d of %d commands ran, want most", done, n)
	}
	t.Logf("%d of %d commands ran, the others were told to wait", done, n)
	if got := g.py("6 * 7"); got != "42" {
		t.Errorf("6 * 7: %s", got)
	}
}
