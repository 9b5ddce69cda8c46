package vmmtest

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/forkd/forkd/internal/guest/agentproto"
	"github.com/forkd/forkd/internal/vmm"
)

// newSuite returns a suite over a fake engine, with a frozen template to make children of.
func newSuite(t *testing.T, opts FakeOptions) (*suite, *Fake) {
	t.Helper()
	engine := NewFake(t.TempDir(), opts)
	t.Cleanup(func() {
		if live, err := engine.Live(); err != nil || len(live) > 0 {
			t.Errorf("machines that were left: %+v (%v)", live, err)
		}
		if err := engine.Close(); err != nil {
			t.Errorf("Close: %v", err)
		}
	})
	h := Harness{Engine: engine, Shape: vmm.Shape{MemMiB: 2, VCPUs: 1}, Timeout: 10 * time.Second, Silence: 50 * time.Millisecond}
	s := &suite{h: h.withDefaults()}
	info, err := engine.Probe(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	s.info = info
	if !t.Run("Freeze", s.testFreeze) {
		t.FailNow()
	}
	t.Cleanup(s.template.close)
	return s, engine
}

func checkCode(t *testing.T, err error, want agentproto.Code) {
	t.Helper()
	var refusal *agentproto.Error
	if !errors.As(err, &refusal) || refusal.Code != want {
		t.Errorf("got error %v, want code %q", err, want)
	}
}

func TestGuestCommands(t *testing.T) {
	s, _ := newSuite(t, FakeOptions{})
	child := s.fork(t, "worker")
	tests := []struct {
		name string
		req  agentproto.ExecRequest
		want agentproto.ExecResult
	}{
		{"words", agentproto.ExecRequest{Args: []string{"echo", "a  b", "c"}}, agentproto.ExecResult{Stdout: []byte("a  b c\n")}},
		{"standard input", agentproto.ExecRequest{Args: []string{"cat"}, Stdin: []byte("in")}, agentproto.ExecResult{Stdout: []byte("in")}},
		{"exit code", agentproto.ExecRequest{Args: []string{"sh", "-c", "exit 3"}}, agentproto.ExecResult{ExitCode: 3}},
		{"a list stops at a failure", agentproto.ExecRequest{Args: []string{"sh", "-c", "false && echo no"}}, agentproto.ExecResult{ExitCode: 1}},
		{"a sequence goes on", agentproto.ExecRequest{Args: []string{"bash", "-lc", "false; echo yes"}}, agentproto.ExecResult{Stdout: []byte("yes\n")}},
		{"quotes", agentproto.ExecRequest{Args: []string{"sh", "-c", `echo 'a  b' "c>d"`}}, agentproto.ExecResult{Stdout: []byte("a  b c>d\n")}},
		{"files", agentproto.ExecRequest{Args: []string{"sh", "-c", "echo hi > /f && cat /f && rm /f && cat /f"}}, agentproto.ExecResult{
			Stdout: []byte("hi\n"), Stderr: []byte("cat: /f: No such file or directory\n"), ExitCode: 1,
		}},
		{"unknown command in a script", agentproto.ExecRequest{Args: []string{"sh", "-c", "nosuch"}}, agentproto.ExecResult{
			Stderr: []byte("nosuch: not found\n"), ExitCode: 127,
		}},
		{"environment", agentproto.ExecRequest{Args: []string{"env"}, Env: []string{"A=1"}}, agentproto.ExecResult{Stdout: []byte("A=1\n")}},
		{"bounded output", agentproto.ExecRequest{Args: []string{"spew", "100"}, MaxOutput: 3}, agentproto.ExecResult{Stdout: []byte("xxx"), Truncated: true}},
		{"timeout", agentproto.ExecRequest{Args: []string{"sleep", "60"}, TimeoutMS: 20}, agentproto.ExecResult{ExitCode: 137, Signal: "KILL", TimedOut: true}},
		{"memory", agentproto.ExecRequest{Args: []string{"sh", "-c", "poke 300000 xyz; peek 300000 3"}}, agentproto.ExecResult{Stdout: []byte("xyz")}},
		{"memory of its own", agentproto.ExecRequest{Args: []string{"peek", "0", "16"}}, agentproto.ExecResult{
			Stderr: []byte("memory can be reached from 262144 to 2097152, not at \"0\" for 16 bytes\n"), ExitCode: 2,
		}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			got, err := child.agent.Exec(s.step(t), tt.req)
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(tt.want, got); diff != "" {
				t.Errorf("%q (-want +got):\n%s", tt.req.Args, diff)
			}
		})
	}
}

func TestGuestRefusals(t *testing.T) {
	s, _ := newSuite(t, FakeOptions{})
	child := s.fork(t, "worker")
	tests := []struct {
		name string
		req  agentproto.ExecRequest
		want agentproto.Code
	}{
		{"no command", agentproto.ExecRequest{}, agentproto.CodeBadRequest},
		{"unknown command", agentproto.ExecRequest{Args: []string{"nosuch"}}, agentproto.CodeNotFound},
		{"unknown user", agentproto.ExecRequest{Args: []string{"true"}, User: "nobody-here"}, agentproto.CodeBadUser},
		{"unknown directory", agentproto.ExecRequest{Args: []string{"true"}, Cwd: "/nowhere"}, agentproto.CodeBadCwd},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			_, err := child.agent.Exec(s.step(t), tt.req)
			checkCode(t, err, tt.want)
		})
	}
}

func TestGuestInterpreter(t *testing.T) {
	s, _ := newSuite(t, FakeOptions{})
	child := s.fork(t, "worker")
	tests := []struct {
		name, code string
		want       agentproto.EvalResult
	}{
		{"sum", "1 + 2", agentproto.EvalResult{Result: "3"}},
		{"repr of a string", `"a" + 'b'`, agentproto.EvalResult{Result: "'ab'"}},
		{"variables", "import numpy\nx = 40\nx + 2", agentproto.EvalResult{Result: "42"}},
		{"variables last", "x", agentproto.EvalResult{Result: "40"}},
		{"no expression last", "y = 1", agentproto.EvalResult{}},
		{"print", "print('hi')", agentproto.EvalResult{Stdout: []byte("hi\n")}},
		{"unknown name", "nosuch", agentproto.EvalResult{Error: "Traceback (most recent call last):\nNameError: name 'nosuch' is not defined"}},
		{"raise", "raise ValueError('no')", agentproto.EvalResult{Error: "Traceback (most recent call last):\nValueError('no')"}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			got, err := child.agent.Eval(s.step(t), agentproto.EvalRequest{Code: tt.code})
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(tt.want, got); diff != "" {
				t.Errorf("eval %q (-want +got):\n%s", tt.code, diff)
			}
		})
	}
	t.Run("timeout", func(t *testing.T) {
		got, err := child.agent.Eval(s.step(t), agentproto.EvalRequest{Code: "hang()", TimeoutMS: 20})
		if err != nil || !got.TimedOut || got.Error == "" {
			t.Errorf("eval of what never ends: got %+v (%v), want a timeout", got, err)
		}
	})
}

func TestGuestWithoutInterpreter(t *testing.T) {
	s, _ := newSuite(t, FakeOptions{NoPython: true})
	child := s.fork(t, "worker")
	_, err := child.agent.Eval(s.step(t), agentproto.EvalRequest{Code: "1"})
	checkCode(t, err, agentproto.CodeNoInterpreter)
}

// TestGuestRandomness checks that siblings are as alike as those of a real engine until an identity makes them different.
func TestGuestRandomness(t *testing.T) {
	s, _ := newSuite(t, FakeOptions{})
	draw := func(v *vm) string {
		t.Helper()
		bytes, err := v.agent.exec(s.step(t), []string{"urandom"})
		if err != nil {
			t.Fatal(err)
		}
		number, err := v.agent.Eval(s.step(t), agentproto.EvalRequest{Code: "random()"})
		if err != nil {
			t.Fatal(err)
		}
		return bytes + " " + number.Result
	}
	var anonymous []*vm
	for range 2 {
		m := s.load(t, s.template.state)
		if err := m.Resume(s.step(t)); err != nil {
			t.Fatal(err)
		}
		v := s.withAgent(m, false)
		t.Cleanup(v.agent.close)
		anonymous = append(anonymous, v)
	}
	a, b := draw(anonymous[0]), draw(anonymous[1])
	if a != b {
		t.Errorf("random numbers of siblings without identity: got %q and %q, want the same", a, b)
	}
	c, d := draw(s.fork(t, "c")), draw(s.fork(t, "d"))
	if strings.Fields(c)[0] == strings.Fields(d)[0] || strings.Fields(c)[1] == strings.Fields(d)[1] {
		t.Errorf("random numbers of siblings with identities: got %q and %q, want different ones", c, d)
	}
}

func TestGuestIdentity(t *testing.T) {
	s, _ := newSuite(t, FakeOptions{})
	child := s.fork(t, "first")
	identify := func(id agentproto.Identity) (agentproto.IdentityAck, error) {
		return child.agent.Identify(s.step(t), id)
	}
	t.Run("too little entropy", func(t *testing.T) {
		_, err := identify(agentproto.Identity{InstanceID: "x"})
		checkCode(t, err, agentproto.CodeIdentity)
	})
	t.Run("everything", func(t *testing.T) {
		const then = int64(1_700_000_000_000_000_000)
		ack, err := identify(agentproto.Identity{
			InstanceID: "i", Hostname: "h", MachineID: "m", UnixNano: then, Entropy: entropy(), Env: []string{"K=V"},
		})
		if err != nil {
			t.Fatal(err)
		}
		if !ack.Python || ack.UnixNano < then || ack.UnixNano > then+int64(time.Minute) {
			t.Errorf("acknowledgement: got %+v, want a clock just after %d and an interpreter", ack, then)
		}
		got, err := child.agent.exec(s.step(t), []string{"sh", "-c", "instance; cat /etc/hostname /etc/machine-id; env"})
		if want := "i\nh\nm\nK=V"; err != nil || got != want {
			t.Errorf("identity in the guest: got %q (%v), want %q", got, err, want)
		}
	})
	t.Run("hooks", func(t *testing.T) {
		if _, err := child.agent.exec(s.step(t), []string{"sh", "-c", "echo 'echo ran > /ran' > /etc/forkd/on-fork.d/10-a"}); err != nil {
			t.Fatal(err)
		}
		ack, err := identify(agentproto.Identity{Entropy: entropy(), RunHooks: true})
		if err != nil || ack.Hooks != 1 {
			t.Fatalf("identity with a hook: got %+v (%v), want 1 hook", ack, err)
		}
		if got, err := child.agent.exec(s.step(t), []string{"cat", "/ran"}); err != nil || got != "ran" {
			t.Errorf("what the hook wrote: got %q (%v), want %q", got, err, "ran")
		}
	})
	t.Run("a hook that fails", func(t *testing.T) {
		if _, err := child.agent.exec(s.step(t), []string{"sh", "-c", "echo false > /etc/forkd/on-fork.d/20-b"}); err != nil {
			t.Fatal(err)
		}
		_, err := identify(agentproto.Identity{Entropy: entropy(), RunHooks: true})
		checkCode(t, err, agentproto.CodeIdentity)
	})
}

// TestGuestAnswersWhileBusy checks that a ping doesn't wait behind a command, and that giving a command up ends it.
func TestGuestAnswersWhileBusy(t *testing.T) {
	s, _ := newSuite(t, FakeOptions{})
	child := s.fork(t, "worker")
	ctx, cancel := context.WithCancel(s.step(t))
	ended := make(chan error, 1)
	go func() {
		_, err := child.agent.Exec(ctx, agentproto.ExecRequest{Args: []string{"hang"}})
		ended <- err
	}()
	eventually(t, s.h.Timeout, func() string {
		var refusal *agentproto.Error
		if err := child.agent.Quiesce(s.step(t)); !errors.As(err, &refusal) || refusal.Code != agentproto.CodeBusy {
			return fmt.Sprintf("Quiesce while a command runs: got %v, want code %q", err, agentproto.CodeBusy)
		}
		return ""
	})
	s.ping(t, child)
	cancel()
	if err := <-ended; !errors.Is(err, context.Canceled) {
		t.Errorf("a command that was given up: got %v, want context.Canceled", err)
	}
	eventually(t, s.h.Timeout, func() string {
		if err := child.agent.Quiesce(s.step(t)); err != nil {
			return fmt.Sprintf("Quiesce after the command was given up: %v", err)
		}
		return ""
	})
}

func TestConsoleKeepsTheNewest(t *testing.T) {
	s, _ := newSuite(t, FakeOptions{})
	child := s.fork(t, "printer")
	long := strings.Repeat("y", 200<<10)
	for _, text := range []string{long, long, long, long, "the end"} {
		if _, err := child.agent.exec(s.step(t), []string{"console", text}); err != nil {
			t.Fatal(err)
		}
	}
	got, err := child.Machine.(vmm.Console).Console(context.Background())
	if err != nil {
		t.Fatal(err)
	}
	if len(got) != vmm.ConsoleLimit || !strings.HasSuffix(string(got), "yy\nthe end\n") {
		t.Errorf("console: got %d bytes that end with %q, want %d with the newest last", len(got), got[max(0, len(got)-20):], vmm.ConsoleLimit)
	}
}
