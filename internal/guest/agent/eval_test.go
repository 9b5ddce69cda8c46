package agent

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/forkd/forkd/internal/guest/agentproto"
)

func TestEval(t *testing.T) {
	needPython(t)
	r := newRig(t, Options{})
	res := func(s string) agentproto.EvalResult { return agentproto.EvalResult{Result: s} }
	tests := []struct {
		name, code string
		want       agentproto.EvalResult
	}{
		{"expression", "1+1", res("2")},
		{"string", "'ä' + '\\n'", res(`'ä\n'`)},
		{"none", "None", res("")},
		{"nothing", "", res("")},
		{"only a comment", "# nothing", res("")},
		{"statement", "x = 5", res("")},
		{"the namespace stays", "x * 2", res("10")},
		{"last expression of a block", "y = 1\ny += 1\ny", res("2")},
		{"expression in the middle is silent", "7\nz = 1", res("")},
		{"functions see globals", "def f(n):\n    return n + x\n\nf(1)", res("6")},
		{"recursion", "def g(n):\n    return 1 if n == 0 else n * g(n - 1)\ng(5)", res("120")},
		{"class in main", "class C: pass\nC.__module__", res("'__main__'")},
		{"main", "__name__", res("'__main__'")},
		{"pickle of own classes", "import pickle\ntype(pickle.loads(pickle.dumps(C()))) is C", res("True")},
		{"indented", "  1 + 2", res("3")},
		{"indented block", "\n    a = 1\n    a + 1\n", res("2")},
		{"comprehension", "[n for n in range(3)]", res("[0, 1, 2]")},
		{"print", "print('hello')", agentproto.EvalResult{Stdout: []byte("hello\n")}},
		{"print without newline", "print('ö', end='')", agentproto.EvalResult{Stdout: []byte("ö")}},
		{"stderr", "import sys\nprint('oops', file=sys.stderr)", agentproto.EvalResult{Stderr: []byte("oops\n")}},
		{"both and a result", "print('a'); sys.stderr.write('b\\n'); 3", agentproto.EvalResult{Stdout: []byte("a\n"), Stderr: []byte("b\n"), Result: "3"}},
		{"output of a subprocess", "import os\nos.system('echo sub; echo err >&2')", agentproto.EvalResult{Stdout: []byte("sub\n"), Stderr: []byte("err\n"), Result: "0"}},
		{"written to the descriptor", "os.write(1, b'raw')", agentproto.EvalResult{Stdout: []byte("raw"), Result: "3"}},
		{"lone surrogate", "print('\\ud800'); '\\ud800'", agentproto.EvalResult{Stdout: []byte("\\ud800\n"), Result: `'\ud800'`}},
		{"stdin is empty", "sys.stdin.read()", res("''")},
		{"argv", "sys.argv", res("['']")},
		{"channel is not inherited", "import subprocess\nsubprocess.run(['sh', '-c', 'echo >&3'], close_fds=False, stderr=subprocess.DEVNULL).returncode != 0", res("True")},
		{"replaced stdout", "import io\nold = sys.stdout\nsys.stdout = io.StringIO()\nprint('lost')\nsys.stdout = old", res("")},
	}
	for _, tc := range tests {
		t.Run(tc.name, func(t *testing.T) {
			if diff := cmp.Diff(r.eval(tc.code), tc.want); diff != "" {
				t.Errorf("result (-got +want):\n%s", diff)
			}
		})
	}
}

func TestEvalErrors(t *testing.T) {
	needPython(t)
	r := newRig(t, Options{})
	r.result("def inner():\n    raise KeyError('deep')\n\ndef outer():\n    inner()")
	tests := []struct {
		name, code string
		want       []string
		not        []string
	}{
		{"division", "print('before')\n1/0", []string{"ZeroDivisionError", "line 2", "1/0"}, nil},
		{"syntax", "x = = 1", []string{"SyntaxError", "x = = 1"}, []string{"During handling"}},
		{"syntax in the last expression", "1 +", []string{"SyntaxError"}, []string{"During handling"}},
		{"source of an earlier evaluation", "outer()", []string{"KeyError: 'deep'", "raise KeyError('deep')", "in outer"}, nil},
		{"chain", "try:\n    1/0\nexcept ZeroDivisionError as e:\n    raise ValueError('second') from e", []string{"ZeroDivisionError", "direct cause", "ValueError: second"}, nil},
		{"exit", "exit(3)", []string{"SystemExit: 3"}, nil},
		{"sys.exit", "import sys; sys.exit('bye')", []string{"SystemExit: bye"}, nil},
		{"keyboard interrupt of one's own", "raise KeyboardInterrupt", []string{"KeyboardInterrupt"}, nil},
		{"repr that fails", "class R:\n    def __repr__(self): raise RuntimeError('no repr')\nR()", []string{"RuntimeError: no repr"}, nil},
		{"exception that can't be shown", "class E(Exception):\n    def __str__(self): raise RuntimeError('x')\nraise E", []string{"E"}, nil},
		{"deep recursion", "def d(): return d()\nd()", []string{"RecursionError"}, nil},
		{"zero byte", "a\x00b", []string{"Error"}, nil},
		{"not utf-8", "'\xff'", []string{"UnicodeDecodeError"}, nil},
		{"exception group", "raise ExceptionGroup('g', [ValueError(1)])", []string{"Error"}, nil},
	}
	for _, tc := range tests {
		t.Run(tc.name, func(t *testing.T) {
			got := r.eval(tc.code)
			for _, want := range tc.want {
				if !strings.Contains(got.Error, want) {
					t.Errorf("error: got %q, want it to contain %q", got.Error, want)
				}
			}
			for _, not := range append(tc.not, "forkd-driver") {
				if strings.Contains(got.Error, not) {
					t.Errorf("error: got %q, want it without %q", got.Error, not)
				}
			}
			if got.Result != "" {
				t.Errorf("result of an error: got %q, want none", got.Result)
			}
		})
	}
	if got := r.result("outer.__name__"); got != "'outer'" {
		t.Errorf("state after errors: got %s, want it kept", got)
	}
}

func TestEvalBoundsOutput(t *testing.T) {
	needPython(t)
	r := newRig(t, Options{})
	tests := []struct {
		name, code string
		want       agentproto.EvalResult
	}{
		{"stdout", "print('x' * 1000000)", agentproto.EvalResult{Stdout: []byte("xxxxxxxx"), Truncated: true}},
		{"stderr", "import sys\nsys.stderr.write('y' * 200000)\nNone", agentproto.EvalResult{Stderr: []byte("yyyyyyyy"), Truncated: true}},
		{"result", "'z' * 100", agentproto.EvalResult{Result: "'zzzzzzz", Truncated: true}},
		{"result is cut between characters", "'aaaaaaäöü'", agentproto.EvalResult{Result: "'aaaaaa", Truncated: true}},
		{"exactly the limit", "print('1234567')", agentproto.EvalResult{Stdout: []byte("1234567\n")}},
	}
	for _, tc := range tests {
		t.Run(tc.name, func(t *testing.T) {
			got, err := r.Eval(testContext(t), agentproto.EvalRequest{Code: tc.code, MaxOutput: 8})
			if err != nil {
				t.Fatalf("Eval: %v", err)
			}
			if diff := cmp.Diff(got, tc.want); diff != "" {
				t.Errorf("result (-got +want):\n%s", diff)
			}
		})
	}
}

func TestEvalBigCodeAndResult(t *testing.T) {
	needPython(t)
	r := newRig(t, Options{})
	code := "s = '" + strings.Repeat("x", 3<<20) + "'\ns"
	got, err := r.Eval(testContext(t), agentproto.EvalRequest{Code: code, MaxOutput: 4 << 20})
	if err != nil {
		t.Fatalf("Eval: %v", err)
	}
	if got, want := len(got.Result), 3<<20+2; got != want {
		t.Errorf("result: got %d bytes, want %d", got, want)
	}
}

func TestEvalTimeout(t *testing.T) {
	needPython(t)
	r := newRig(t, Options{})
	r.result("x = 5")
	tests := []struct{ name, code string }{
		{"loop", "print('in')\nwhile True: pass"},
		{"sleep", "print('in')\nimport time; time.sleep(300)"},
		{"subprocess", "print('in')\nimport subprocess; subprocess.run(['sleep', '300'])"},
		{"system", "print('in')\nimport os; os.system('sleep 300'); import time; time.sleep(300)"},
	}
	for _, tc := range tests {
		t.Run(tc.name, func(t *testing.T) {
			got, err := r.Eval(testContext(t), agentproto.EvalRequest{Code: tc.code, TimeoutMS: 300})
			if err != nil {
				t.Fatalf("Eval: %v", err)
			}
			if !got.TimedOut || !strings.Contains(got.Error, "KeyboardInterrupt") || string(got.Stdout) != "in\n" {
				t.Errorf("got %+v, want an interrupt and the output", got)
			}
			if got := r.result("x"); got != "5" {
				t.Errorf("state after an interrupt: got %s, want 5", got)
			}
		})
	}
}

func TestEvalThatIgnoresTheInterruptIsKilled(t *testing.T) {
	needPython(t)
	r := newRig(t, Options{}, func(a *Agent) { a.limits.grace = 200 * time.Millisecond })
	got, err := r.Eval(testContext(t), agentproto.EvalRequest{TimeoutMS: 200, Code: "x = 1\nimport signal, time\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\nprint('deaf')\nwhile True: time.sleep(1)"})
	if err != nil {
		t.Fatalf("Eval: %v", err)
	}
	if !got.TimedOut || !strings.Contains(got.Error, "state is lost") || string(got.Stdout) != "deaf\n" {
		t.Errorf("got %+v, want timed out, the loss of state and the output", got)
	}
	if got := r.result("'x' in globals()"); got != "False" {
		t.Errorf("namespace of the new interpreter: x there is %s, want False", got)
	}
}

func TestEvalInterpreterThatDies(t *testing.T) {
	needPython(t)
	tests := []struct{ name, code, want string }{
		{"os._exit", "print('last words', flush=True)\nimport os; os._exit(7)", "exited with status 7"},
		{"segmentation fault", "print('last words', flush=True)\nimport ctypes; ctypes.string_at(0)", "SIGSEGV"},
		{"kill", "print('last words', flush=True)\nimport os; os.kill(os.getpid(), 9)", "SIGKILL"},
		{"exec", "print('last words', flush=True)\nimport os; os.execvp('sh', ['sh', '-c', 'exit 9'])", "exited with status 9"},
		{"channel closed", "print('last words', flush=True)\nimport os, time; os.closerange(3, 5); time.sleep(300)", "closed its channel"},
		{"nonsense on the channel", "print('last words', flush=True)\nimport os, time; os.write(4, b'\\xff' * 64); time.sleep(300)", "malformed answer"},
		{"answer nobody asked for", "print('last words', flush=True)\nimport os, time; os.write(4, b'\\x02\\0\\0\\0I\\0'); time.sleep(300)", "nobody asked for"},
	}
	for _, tc := range tests {
		t.Run(tc.name, func(t *testing.T) {
			r := newRig(t, Options{}, func(a *Agent) { a.limits.grace = 200 * time.Millisecond })
			r.result("x = 1")
			got := r.eval(tc.code)
			if !strings.Contains(got.Error, tc.want) || !strings.Contains(got.Error, "state is lost") {
				t.Errorf("error: got %q, want %q and the loss of state", got.Error, tc.want)
			}
			if string(got.Stdout) != "last words\n" {
				t.Errorf("stdout: got %q, want the last words", got.Stdout)
			}
			if got := r.result("1+1"); got != "2" {
				t.Errorf("new interpreter: got %s, want 2", got)
			}
		})
	}
}

func TestEvalFork(t *testing.T) {
	needPython(t)
	r := newRig(t, Options{})
	// The child comes back from the evaluation like the parent: only one of them may answer.
	got := r.eval("import os\npid = os.fork()\nif pid: os.waitpid(pid, 0)\n'parent' if pid else 'child'")
	if got.Result != "'parent'" || got.Error != "" {
		t.Errorf("fork: got %+v, want the parent's answer", got)
	}
	got = r.eval("pid = os.fork()\nif pid == 0: raise SystemExit(5)\nos.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])")
	if got.Result != "5" {
		t.Errorf("exit status of a child: got %+v, want 5", got)
	}
	got = r.eval("pid = os.fork()\nif pid == 0: raise ValueError('in the child')\nos.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])")
	if got.Result != "1" || !strings.Contains(string(got.Stderr), "ValueError: in the child") {
		t.Errorf("child that fails: got %+v, want status 1 and its traceback on stderr", got)
	}
	got = r.eval("import multiprocessing as mp\nwith mp.get_context('fork').Pool(2) as p: print(p.map(abs, [-1, -2]))")
	if string(got.Stdout) != "[1, 2]\n" || got.Error != "" {
		t.Errorf("pool: got %+v, want [1, 2]", got)
	}
	if got := r.result("1+1"); got != "2" {
		t.Errorf("after forks: got %s, want 2", got)
	}
}

func TestEvalDeathIsSeenThoughAForkLives(t *testing.T) {
	needPython(t)
	r := newRig(t, Options{})
	got := r.eval("import os, time\npid = os.fork()\nif pid == 0:\n    time.sleep(300)\nprint(pid, flush=True)\nos._exit(1)")
	if !strings.Contains(got.Error, "exited with status 1") {
		t.Errorf("error: got %q, want the status", got.Error)
	}
	if pid, err := strconv.Atoi(strings.TrimSpace(string(got.Stdout))); err == nil {
		_ = unix.Kill(pid, unix.SIGKILL)
	}
}

func TestEvalsRunOneAfterTheOther(t *testing.T) {
	needPython(t)
	r := newRig(t, Options{})
	r.result("n = 0")
	ctx := testContext(t)
	done := make(chan error, 20)
	for range 20 {
		go func() {
			res, err := r.Eval(ctx, agentproto.EvalRequest{Code: "m = n\nimport time; time.sleep(0.001)\nn = m + 1"})
			if err == nil && res.Error != "" {
				err = errors.New(res.Error)
			}
			done <- err
		}()
	}
	for range 20 {
		if err := <-done; err != nil {
			t.Error(err)
		}
	}
	if got := r.result("n"); got != "20" {
		t.Errorf("counter: got %s, want 20", got)
	}
}

func TestEvalCancel(t *testing.T) {
	needPython(t)
	r := newRig(t, Options{})
	r.result("x = 5")
	ctx, cancel := context.WithCancel(testContext(t))
	done := make(chan error, 2)
	for range 2 { // one runs, one waits
		go func() {
			_, err := r.Eval(ctx, agentproto.EvalRequest{Code: "x += 1\nimport time; time.sleep(300)"})
			done <- err
		}()
	}
	for r.Quiesce(ctx) == nil { // until one of them is there
	}
	cancel()
	for range 2 {
		if err := <-done; !errors.Is(err, context.Canceled) {
			t.Errorf("Eval: got %v, want %v", err, context.Canceled)
		}
	}
	// The interrupt may have come before the first statement, and the second evaluation never started.
	if got := r.result("x"); got != "5" && got != "6" {
		t.Errorf("state after a cancel: got %s, want 5 or 6", got)
	}
}

// An evaluation has its time from when it was asked for, not from when its turn comes.
func TestEvalGivesUpWaiting(t *testing.T) {
	needPython(t)
	r := newRig(t, Options{})
	r.result("x = 5")
	ctx, cancel := context.WithCancel(testContext(t))
	done := make(chan error, 1)
	go func() {
		_, err := r.Eval(ctx, agentproto.EvalRequest{Code: "import time; time.sleep(300)"})
		done <- err
	}()
	for r.Quiesce(ctx) == nil { // until it is there
	}
	_, err := r.Eval(ctx, agentproto.EvalRequest{Code: "x = 6", TimeoutMS: 50})
	wantCode(t, err, agentproto.CodeBusy)
	cancel()
	if err := <-done; !errors.Is(err, context.Canceled) {
		t.Errorf("Eval: got %v, want %v", err, context.Canceled)
	}
	if got := r.result("x"); got != "5" {
		t.Errorf("x = %s: the evaluation that was given up ran all the same", got)
	}
}

func TestEvalWithoutPython(t *testing.T) {
	r := newRig(t, Options{Python: "/no/such/python3"})
	_, err := r.Eval(testContext(t), agentproto.EvalRequest{Code: "1"})
	wantCode(t, err, agentproto.CodeNoInterpreter)
	if p, err := r.Ping(testContext(t)); err != nil || p.Python {
		t.Errorf("Ping: got python %v, %v, want false", p.Python, err)
	}
}

func TestEvalInterpreterThatDoesNotStart(t *testing.T) {
	r := newRig(t, Options{Python: "false"})
	for range 2 {
		_, err := r.Eval(testContext(t), agentproto.EvalRequest{Code: "1"})
		wantCode(t, err, agentproto.CodeInternal)
		if err != nil && !strings.Contains(err.Error(), "exited with status 1 while it started") {
			t.Errorf("error: got %q, want what happened", err)
		}
	}
}

func TestEvalInterpreterThatHangsAtStart(t *testing.T) {
	script := t.TempDir() + "/python3"
	if err := os.WriteFile(script, []byte("#!/bin/sh\nsleep 300\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	r := newRig(t, Options{Python: script}, func(a *Agent) { a.limits.start = 200 * time.Millisecond })
	_, err := r.Eval(testContext(t), agentproto.EvalRequest{Code: "1"})
	wantCode(t, err, agentproto.CodeInternal)
	if err != nil && !strings.Contains(err.Error(), "did not start within 200ms") {
		t.Errorf("error: got %q, want the limit", err)
	}
}

func TestEvalQueueIsBounded(t *testing.T) {
	needPython(t)
	r := newRig(t, Options{})
	ctx, cancel := context.WithCancel(testContext(t))
	defer cancel()
	r.result("import time")
	const n = maxQueue + 10
	done := make(chan error, n)
	for range n {
		go func() {
			_, err := r.Eval(ctx, agentproto.EvalRequest{Code: "time.sleep(300)"})
			done <- err
		}()
	}
	busy := 0
	for range 9 { // one runs and maxQueue wait: at least nine are refused
		err := <-done
		wantCode(t, err, agentproto.CodeBusy)
		busy++
	}
	cancel()
	for range n - busy {
		<-done
	}
	if got := r.result("1"); got != "1" {
		t.Errorf("after the queue: got %s, want 1", got)
	}
}

func TestEvalOutputOfABackgroundThread(t *testing.T) {
	needPython(t)
	r := newRig(t, Options{})
	// More than a pipe holds: the thread must not hang while nobody evaluates.
	r.result("import threading, sys\nended = threading.Event()\ndef talk():\n    for _ in range(20000): sys.stderr.write('0123456789')\n    ended.set()\nthreading.Thread(target=talk).start()")
	if got := r.result("ended.wait(30)"); got != "True" {
		t.Errorf("background thread: got %s, want it to end", got)
	}
}

func TestEvalStateOutlivesTheConnection(t *testing.T) {
	needPython(t)
	r := newRig(t, Options{})
	r.result("x = 'kept'")
	r.Client.Close()
	r.Client = r.newClient(true)
	if got := r.result("x"); got != "'kept'" {
		t.Errorf("state after a reconnect: got %s, want 'kept'", got)
	}
}

func TestEvalKeepsSourceOfRecentEvaluationsOnly(t *testing.T) {
	needPython(t)
	r := newRig(t, Options{})
	for i := range 300 {
		r.result(fmt.Sprintf("%d", i))
	}
	if got := r.result("import linecache\nsum(n.startswith('<eval-') for n in linecache.cache) <= 256"); got != "True" {
		t.Errorf("sources are bounded: got %s, want True", got)
	}
}
