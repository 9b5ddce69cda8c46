package e2e

import (
	"strings"
	"testing"
	"time"

	"github.com/forkd/forkd/client"
)

// TestEval: the interpreter answers in every way code may end, and goes on.
func TestEval(t *testing.T) {
	d := sharedDaemon(t)
	g := d.fork1()
	g.py("kept = 'kept'")
	tests := []struct {
		name, code     string
		result         string // repr; "-" for none
		stdout, stderr string
		fails          []string // in the error
	}{
		{"expression", "6 * 7", "42", "", "", nil},
		{"text", "'a' + \"b'\"", `"ab'"`, "", "", nil},
		{"none", "None", "-", "", "", nil},
		{"statement", "x = 1", "-", "", "", nil},
		{"statements and an expression", "y = 20\ny += 1\ny * 2", "42", "", "", nil},
		{"indented", "  if True:\n    z = 5\n  z", "5", "", "", nil},
		{"imported by the warm-up", "float(numpy.ones(3).sum())", "3.0", "", "", nil},
		{"prints", "print('out'); import sys; print('err', file=sys.stderr); 1", "1", "out\n", "err\n", nil},
		{"prints from C", "os.system('echo from a shell')", "0", "from a shell\n", "", nil},
		{"raises", "def f():\n    return 1 / 0\nf()", "-", "", "", []string{"Traceback", "in f", "return 1 / 0", "ZeroDivisionError: division by zero"}},
		{"raises after printing", "print('before'); raise ValueError('so')", "-", "before\n", "", []string{"ValueError: so"}},
		{"syntax error", "def", "-", "", "", []string{"SyntaxError"}},
		{"unbalanced", "(1,", "-", "", "", []string{"SyntaxError"}},
		{"unknown name", "nosuchname", "-", "", "", []string{"NameError", "nosuchname"}},
		{"sys.exit", "sys.exit(3)", "-", "", "", []string{"SystemExit: 3"}},
		{"recursion", "def r(): return r()\nr()", "-", "", "", []string{"RecursionError"}},
		{"input", "input()", "-", "", "", []string{"EOFError"}},
		{"repr that raises", "class R:\n    def __repr__(self): raise RuntimeError('no repr')\nR()", "-", "", "", []string{"RuntimeError: no repr"}},
		{"unpaired surrogate", "'\\ud800'", `'\ud800'`, "", "", nil},
		{"fork in the code", "pid = os.fork()\nif pid == 0: os._exit(7)\nos.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])", "7", "", "", nil},
		{"closes descriptors", "os.close(3) if False else None", "-", "", "", nil},
		{"still there", "kept", "'kept'", "", "", nil},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			got, err := g.eval(client.EvalRequest{Code: tt.code})
			if err != nil {
				t.Fatal(err)
			}
			result, failure := "-", ""
			if got.Result != nil {
				result = *got.Result
			}
			if got.Error != nil {
				failure = *got.Error
			}
			if result != tt.result || got.Stdout != tt.stdout || got.Stderr != tt.stderr || (failure != "") != (len(tt.fails) > 0) || (got.ExitCode != 0) != (len(tt.fails) > 0) {
				t.Errorf("%q: got result %s, stdout %q, stderr %q, exit code %d, error %s\nwant %+v", tt.code, result, got.Stdout, got.Stderr, got.ExitCode, failure, tt)
			}
			for _, want := range tt.fails {
				if !strings.Contains(failure, want) {
					t.Errorf("%q: the error lacks %q:\n%s", tt.code, want, failure)
				}
			}
			if strings.Contains(failure, "forkd-driver") {
				t.Errorf("%q: the traceback shows the driver:\n%s", tt.code, failure)
			}
		})
	}
	d.checkSandboxes(g)
}

// TestEvalBounds: code without end, code that can't be interrupted, output without end, and the end of the interpreter itself.
func TestEvalBounds(t *testing.T) {
	d := sharedDaemon(t)
	g := d.fork1()
	g.py("kept = 'kept'")
	run := func(code string, limit time.Duration, most int) client.EvalResult {
		t.Helper()
		res, err := g.eval(client.EvalRequest{Code: code, Timeout: limit, MaxOutputBytes: most})
		if err != nil {
			t.Fatalf("%q: %v", code, err)
		}
		return res
	}
	wantFailure := func(what string, res client.EvalResult, timedOut bool, words ...string) {
		t.Helper()
		if res.Error == nil || res.TimedOut != timedOut {
			t.Errorf("%s: got %+v, want an error, timed out %v", what, res, timedOut)
			return
		}
		for _, word := range words {
			if !strings.Contains(*res.Error, word) {
				t.Errorf("%s: the error lacks %q: %s", what, word, *res.Error)
			}
		}
	}
	wantFailure("infinite loop", run("while True: pass", 2*time.Second, 0), true, "KeyboardInterrupt")
	if got := g.py("kept"); got != "'kept'" {
		t.Errorf("after an interrupt the interpreter has kept = %s", got)
	}
	wantFailure("sleep", run("time.sleep(600)", 2*time.Second, 0), true, "KeyboardInterrupt")

	res := run("print('x' * 5_000_000); 'y' * 1_000_000", guestLimit, 1000)
	if len(res.Stdout) != 1000 || !res.Truncated || res.Result == nil || len(*res.Result) != 1000 || res.Error != nil {
		t.Errorf("output without end: got %d bytes, truncated %v, result %v, error %v", len(res.Stdout), res.Truncated, res.Result, res.Error)
	}
	if got := g.py("kept"); got != "'kept'" {
		t.Errorf("after much output the interpreter has kept = %s", got)
	}

	stubborn := "import signal\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\nwhile True: pass"
	wantFailure("loop that can't be interrupted", run(stubborn, 2*time.Second, 0), true, "killed", "its state is lost")
	if got := g.py("'kept' in globals()"); got != "False" {
		t.Errorf("in the interpreter after the killed one 'kept' is there: %s", got)
	}
	wantFailure("os._exit", run("print('last words', flush=True); os = __import__('os'); os._exit(3)", guestLimit, 0), false, "status 3", "its state is lost")
	wantFailure("segmentation fault", run("import ctypes; ctypes.string_at(0)", guestLimit, 0), false, "SIGSEGV")
	wantFailure("out of memory", run("a = bytearray(2 << 30)", guestLimit, 0), false, "MemoryError")
	if got := g.py("6 * 7"); got != "42" {
		t.Errorf("6 * 7 after all that: %s", got)
	}
	d.checkSandboxes(g)
}
