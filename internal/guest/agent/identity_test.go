package agent

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/forkd/forkd/internal/guest/agentproto"
)

// fakeMachine records what an identity does to the machine, and fails where it is told to.
type fakeMachine struct {
	mu    sync.Mutex
	calls []string
	fail  string
}

func (m *fakeMachine) call(name, arg string) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.calls = append(m.calls, name+" "+arg)
	if m.fail == name {
		return errors.New("injected " + name + " failure")
	}
	return nil
}

func (m *fakeMachine) SetClock(ns int64) error {
	return m.call("clock", time.Unix(0, ns).UTC().Format(time.RFC3339))
}
func (m *fakeMachine) AddEntropy(b []byte) error {
	return m.call("entropy", string(rune('0'+len(b)/64)))
}
func (m *fakeMachine) SetHostname(name string) error { return m.call("hostname", name) }

func writeHook(t *testing.T, root, name, script string, mode os.FileMode) {
	t.Helper()
	dir := filepath.Join(root, hookDir)
	if err := os.MkdirAll(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, name), []byte(script), mode); err != nil {
		t.Fatal(err)
	}
}

func readText(t *testing.T, root, path string) string {
	t.Helper()
	b, err := os.ReadFile(filepath.Join(root, path))
	if err != nil {
		t.Errorf("file of the identity: %v", err)
	}
	return string(b)
}

func TestIdentity(t *testing.T) {
	m := &fakeMachine{}
	r := newRig(t, Options{Machine: m})
	ack, err := r.Identify(testContext(t), sampleIdentity())
	if err != nil {
		t.Fatalf("Identify: %v", err)
	}
	if ack.UnixNano == 0 || ack.Hooks != 0 || ack.Python {
		t.Errorf("ack: got %+v, want a time, no hooks and no interpreter", ack)
	}
	want := []string{"entropy 1", "clock 2023-11-14T22:13:20Z", "hostname box-1"}
	m.mu.Lock()
	defer m.mu.Unlock()
	if diff := cmp.Diff(m.calls, want); diff != "" {
		t.Errorf("machine (-got +want):\n%s", diff)
	}
	for path, want := range map[string]string{
		"etc/hostname":          "box-1\n",
		"etc/machine-id":        "0123456789abcdef0123456789abcdef\n",
		"run/forkd/instance-id": "sb1\n",
		"etc/hosts":             defaultHosts + "127.0.1.1\tbox-1 # forkd\n",
	} {
		if got := readText(t, r.root, path); got != want {
			t.Errorf("%s: got %q, want %q", path, got, want)
		}
	}
	if got := string(r.sh("echo $COLOR $FORKD_INSTANCE_ID").Stdout); got != "red sb1\n" {
		t.Errorf("environment of a command: got %q, want the identity's", got)
	}
}

func TestIdentityReplacesTheLastOne(t *testing.T) {
	needPython(t)
	r := newRig(t, Options{})
	r.result("import os")
	first := sampleIdentity()
	first.Hostname, first.InstanceID = "a-much-longer-name", "a-much-longer-id"
	first.Env = []string{"COLOR=red", "SIZE=1"}
	second := sampleIdentity()
	second.Env = []string{"COLOR=blue=green"}
	for _, id := range []agentproto.Identity{first, second} {
		ack, err := r.Identify(testContext(t), id)
		if err != nil || !ack.Python {
			t.Fatalf("Identify: got %+v, %v, want the interpreter reseeded", ack, err)
		}
	}
	for path, want := range map[string]string{"etc/hostname": "box-1\n", "run/forkd/instance-id": "sb1\n", "etc/hosts": defaultHosts + "127.0.1.1\tbox-1 # forkd\n"} {
		if got := readText(t, r.root, path); got != want {
			t.Errorf("%s: got %q, want %q", path, got, want)
		}
	}
	const want = "blue=green - sb1"
	if got := string(r.sh("echo $COLOR ${SIZE:--} $FORKD_INSTANCE_ID").Stdout); got != want+"\n" {
		t.Errorf("environment of a command: got %q, want %q", got, want)
	}
	if got := r.result("' '.join(os.environ.get(k, '-') for k in ('COLOR', 'SIZE', 'FORKD_INSTANCE_ID'))"); got != "'"+want+"'" {
		t.Errorf("environment of the interpreter: got %s, want %q", got, want)
	}
}

func TestIdentityBeforeTheInterpreterStarts(t *testing.T) {
	needPython(t)
	r := newRig(t, Options{})
	if _, err := r.Identify(testContext(t), sampleIdentity()); err != nil {
		t.Fatalf("Identify: %v", err)
	}
	if got := r.result("import os; os.environ['COLOR']"); got != "'red'" {
		t.Errorf("environment of the interpreter: got %s, want 'red'", got)
	}
	id := sampleIdentity()
	id.Env = nil
	if _, err := r.Identify(testContext(t), id); err != nil {
		t.Fatalf("Identify: %v", err)
	}
	if got := r.result("os.environ.get('COLOR')"); got != "" {
		t.Errorf("environment after an identity without: got %s, want none", got)
	}
}

func TestIdentityKeepsHosts(t *testing.T) {
	r := newRig(t, Options{})
	hosts := filepath.Join(r.root, "etc/hosts")
	if err := os.MkdirAll(filepath.Dir(hosts), 0o755); err != nil {
		t.Fatal(err)
	}
	identify := func(name string) {
		t.Helper()
		id := sampleIdentity()
		id.Hostname = name
		if _, err := r.Identify(testContext(t), id); err != nil {
			t.Fatalf("Identify: %v", err)
		}
	}
	for _, step := range []struct{ name, before, host, want string }{
		{"lines of others stay", "10.0.0.1 db\n", "one", "10.0.0.1 db\n127.0.1.1\tone # forkd\n"},
		{"our line moves to the end", "127.0.1.1\tone # forkd\n10.0.0.2 web\n", "two", "10.0.0.2 web\n127.0.1.1\ttwo # forkd\n"},
		{"no newline at the end", "10.0.0.1 db", "x", "10.0.0.1 db\n127.0.1.1\tx # forkd\n"},
		{"emptied", "", "y", defaultHosts + "127.0.1.1\ty # forkd\n"},
	} {
		if err := os.WriteFile(hosts, []byte(step.before), 0o644); err != nil {
			t.Fatal(err)
		}
		identify(step.host)
		if got := readText(t, r.root, "etc/hosts"); got != step.want {
			t.Errorf("%s: got %q, want %q", step.name, got, step.want)
		}
	}
	// A file that was replaced by another one must be the one that is written.
	if err := os.Rename(hosts, hosts+".old"); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(hosts, []byte("10.0.0.9 new\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	identify("z")
	if got, want := readText(t, r.root, "etc/hosts"), "10.0.0.9 new\n127.0.1.1\tz # forkd\n"; got != want {
		t.Errorf("replaced file: got %q, want %q", got, want)
	}
}

func TestIdentityFailsClosed(t *testing.T) {
	bad := func(f func(*agentproto.Identity)) agentproto.Identity {
		id := sampleIdentity()
		f(&id)
		return id
	}
	tests := []struct {
		name string
		fail string
		id   agentproto.Identity
		want string
	}{
		{"clock", "clock", sampleIdentity(), "injected clock"},
		{"entropy", "entropy", sampleIdentity(), "injected entropy"},
		{"hostname", "hostname", sampleIdentity(), "injected hostname"},
		{"no entropy", "", bad(func(id *agentproto.Identity) { id.Entropy = nil }), "32 bytes"},
		{"no instance id", "", bad(func(id *agentproto.Identity) { id.InstanceID = "" }), "instance id"},
		{"instance id with a newline", "", bad(func(id *agentproto.Identity) { id.InstanceID = "a\nb" }), "instance id"},
		{"host name with a slash", "", bad(func(id *agentproto.Identity) { id.Hostname = "a/b" }), "host name"},
		{"long host name", "", bad(func(id *agentproto.Identity) { id.Hostname = strings.Repeat("a", 65) }), "host name"},
		{"short machine id", "", bad(func(id *agentproto.Identity) { id.MachineID = "abc" }), "machine id"},
		{"machine id in capitals", "", bad(func(id *agentproto.Identity) { id.MachineID = strings.Repeat("A", 32) }), "machine id"},
		{"bad env", "", bad(func(id *agentproto.Identity) { id.Env = []string{"=x"} }), "NAME=VALUE"},
	}
	for _, tc := range tests {
		t.Run(tc.name, func(t *testing.T) {
			m := &fakeMachine{fail: tc.fail}
			r := newRig(t, Options{Machine: m})
			_, err := r.Identify(testContext(t), tc.id)
			wantCode(t, err, agentproto.CodeIdentity)
			if err != nil && !strings.Contains(err.Error(), tc.want) {
				t.Errorf("error: got %q, want it to contain %q", err, tc.want)
			}
			m.mu.Lock()
			m.fail = ""
			m.mu.Unlock()
			if _, err := r.Identify(testContext(t), sampleIdentity()); err != nil {
				t.Errorf("Identify after a failure: %v", err)
			}
		})
	}
}

func TestIdentityFailsWhenAFileCantBeWritten(t *testing.T) {
	r := newRig(t, Options{})
	if err := os.MkdirAll(filepath.Join(r.root, "etc/machine-id"), 0o755); err != nil {
		t.Fatal(err)
	}
	_, err := r.Identify(testContext(t), sampleIdentity())
	wantCode(t, err, agentproto.CodeIdentity)
	if err != nil && !strings.Contains(err.Error(), "/etc/machine-id") {
		t.Errorf("error: got %q, want the file's name", err)
	}
}

func TestIdentityHooks(t *testing.T) {
	r := newRig(t, Options{})
	out := filepath.Join(r.root, "out")
	line := "#!/bin/sh\necho $(basename $0) $FORKD_INSTANCE_ID $FORKD_HOSTNAME $FORKD_MACHINE_ID $COLOR >> " + out + "\n"
	writeHook(t, r.root, "20-second", line, 0o755)
	writeHook(t, r.root, "10-first", line, 0o755)
	writeHook(t, r.root, "15-not-executable", line, 0o644)
	ack, err := r.Identify(testContext(t), sampleIdentity())
	if err != nil {
		t.Fatalf("Identify: %v", err)
	}
	if ack.Hooks != 2 {
		t.Errorf("hooks: got %d, want 2", ack.Hooks)
	}
	const rest = " sb1 box-1 0123456789abcdef0123456789abcdef red\n"
	if got, want := readText(t, r.root, "out"), "10-first"+rest+"20-second"+rest; got != want {
		t.Errorf("hooks wrote %q, want %q", got, want)
	}
	id := sampleIdentity()
	id.RunHooks = false
	if ack, err := r.Identify(testContext(t), id); err != nil || ack.Hooks != 0 {
		t.Errorf("Identify without hooks: got %+v, %v, want none run", ack, err)
	}
}

func TestIdentityHooksThatFail(t *testing.T) {
	tests := []struct{ name, script, want string }{
		{"status", "#!/bin/sh\necho broken >&2; exit 3\n", "status 3: broken"},
		{"signal", "#!/bin/sh\nkill -9 $$\n", "status 137"},
		{"no program", "nothing\x00", "#! line"},
		{"too slow", "#!/bin/sh\necho slow; sleep 300\n", "did not end within 500ms: slow"},
	}
	for _, tc := range tests {
		t.Run(tc.name, func(t *testing.T) {
			r := newRig(t, Options{}, func(a *Agent) { a.limits.hooks = 500 * time.Millisecond })
			writeHook(t, r.root, "50-bad", tc.script, 0o755)
			writeHook(t, r.root, "90-never", "#!/bin/sh\ntouch "+r.root+"/never\n", 0o755)
			_, err := r.Identify(testContext(t), sampleIdentity())
			wantCode(t, err, agentproto.CodeIdentity)
			if err != nil && (!strings.Contains(err.Error(), tc.want) || !strings.Contains(err.Error(), "50-bad")) {
				t.Errorf("error: got %q, want the hook and %q", err, tc.want)
			}
			if exists(r.root + "/never") {
				t.Error("the hook after the failed one ran")
			}
		})
	}
}

func TestIdentityOneAtATimeAndPingMeanwhile(t *testing.T) {
	r := newRig(t, Options{})
	fifo := filepath.Join(r.root, "fifo")
	writeHook(t, r.root, "hook", "#!/bin/sh\nmkfifo "+fifo+"; touch "+r.root+"/there; read x < "+fifo+"\n", 0o755)
	ctx := testContext(t)
	done := make(chan error, 1)
	go func() {
		_, err := r.Identify(ctx, sampleIdentity())
		done <- err
	}()
	for !exists(r.root + "/there") {
		if _, err := r.Ping(ctx); err != nil {
			t.Fatalf("Ping while a hook runs: %v", err)
		}
	}
	_, err := r.Identify(ctx, sampleIdentity())
	wantCode(t, err, agentproto.CodeBusy)
	wantCode(t, r.Quiesce(ctx), agentproto.CodeBusy)
	if err := os.WriteFile(fifo, []byte("go\n"), 0); err != nil {
		t.Fatal(err)
	}
	if err := <-done; err != nil {
		t.Errorf("Identify: %v", err)
	}
}

// Two machines with the same state: everything that an interpreter may have drawn before must differ after an identity.
func TestIdentityReseedsTheInterpreter(t *testing.T) {
	needPython(t)
	r := newRig(t, Options{})
	if got := r.result("import random, ssl, tempfile, uuid\nrandom.seed(1); first = random.random()\nnames = next(tempfile._get_candidate_names())\nfirst"); got == "" {
		t.Fatal("no number")
	}
	id := sampleIdentity()
	draw := func() string {
		t.Helper()
		r.result("random.seed(1)")
		if _, err := r.Identify(testContext(t), id); err != nil {
			t.Fatalf("Identify: %v", err)
		}
		return r.result("random.random()")
	}
	one := draw()
	if again := draw(); again != one {
		t.Errorf("the same entropy: got %s, then %s, want the same: the seed must come from the identity", one, again)
	}
	id.Entropy[0] ^= 1
	if other := draw(); other == one {
		t.Errorf("other entropy: got %s twice", other)
	}
	if got := r.result("tempfile._name_sequence is None"); got != "True" {
		t.Errorf("names of temporary files begin anew: got %s, want True", got)
	}
}

func TestIdentityReseedsNumpyAndTorch(t *testing.T) {
	needPython(t)
	r := newRig(t, Options{})
	if res := r.eval("import numpy"); res.Error != "" {
		t.Log("no numpy on this machine: a stand-in is used, the real one is tested in virtual machines")
		r.result(fakeNumpy)
	}
	r.result("import sys, types\ntorch = types.ModuleType('torch')\ntorch.seeds = []\ntorch.manual_seed = torch.seeds.append\nsys.modules['torch'] = torch")
	id := sampleIdentity()
	seen := map[string]bool{}
	for i := range 3 {
		id.Entropy[0] = byte(i)
		r.result("numpy.random.seed(1); numpy.random.randn()")
		if _, err := r.Identify(testContext(t), id); err != nil {
			t.Fatalf("Identify: %v", err)
		}
		seen[r.result("numpy.random.rand(), numpy.random.randn()")] = true
	}
	if len(seen) != 3 {
		t.Errorf("numbers of three identities: got %v, want three that differ", seen)
	}
	if got := r.result("len(set(torch.seeds)), all(0 <= s < 2**63 for s in torch.seeds)"); got != "(3, True)" {
		t.Errorf("seeds of torch: got %s, want (3, True)", got)
	}
}

// fakeNumpy has what the driver uses of numpy.random.
const fakeNumpy = `
import sys, types, random as _r
numpy = types.ModuleType('numpy')
numpy.random = types.ModuleType('numpy.random')
_state = _r.Random()
def _set(s):
    kind, key, pos, gauss, value = s
    _state.setstate((3, tuple(key[i] for i in range(624)) + (pos,), None))
numpy.random.set_state, numpy.random.seed = _set, _state.seed
numpy.random.rand, numpy.random.randn = _state.random, lambda: _state.gauss(0, 1)
class BitGenerator: pass
numpy.random.BitGenerator = BitGenerator
numpy.random.mtrand = types.SimpleNamespace(_rand=types.SimpleNamespace(_bit_generator=None))
sys.modules['numpy'], sys.modules['numpy.random'] = numpy, numpy.random
`

func TestIdentityReachesABusyInterpreter(t *testing.T) {
	needPython(t)
	r := newRig(t, Options{})
	r.result("import os, random, time")
	ctx := testContext(t)
	done := make(chan agentproto.EvalResult, 1)
	go func() {
		res, err := r.Eval(ctx, agentproto.EvalRequest{Code: "random.seed(1)\nopen('" + r.root + "/running', 'w').close()\nwhile 'COLOR' not in os.environ: time.sleep(0.001)\n'seeded', random.random()"})
		if err != nil {
			res.Error = err.Error()
		}
		done <- res
	}()
	for !exists(r.root + "/running") {
		if _, err := r.Ping(ctx); err != nil {
			t.Fatal(err)
		}
	}
	ack, err := r.Identify(ctx, sampleIdentity())
	if err != nil || !ack.Python {
		t.Fatalf("Identify: got %+v, %v, want the busy interpreter reseeded", ack, err)
	}
	res := <-done
	if res.Error != "" || !strings.HasPrefix(res.Result, "('seeded', ") {
		t.Fatalf("evaluation: got %+v, want it to see the new environment", res)
	}
	if got := r.result("random.seed(1); ('seeded', random.random())"); got == res.Result {
		t.Errorf("number after the identity: got %s, want another one than without", got)
	}
}

func TestIdentityFailsForAnInterpreterThatCantBeReached(t *testing.T) {
	needPython(t)
	r := newRig(t, Options{}, func(a *Agent) { a.limits.reseed = 200 * time.Millisecond })
	ctx, cancel := context.WithCancel(testContext(t))
	defer cancel()
	r.result("import signal")
	go r.Eval(ctx, agentproto.EvalRequest{Code: "signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))\nopen('" + r.root + "/running', 'w').close()\nwhile True: pass"})
	for !exists(r.root + "/running") {
		if _, err := r.Ping(ctx); err != nil {
			t.Fatal(err)
		}
	}
	_, err := r.Identify(ctx, sampleIdentity())
	wantCode(t, err, agentproto.CodeIdentity)
	if err != nil && !strings.Contains(err.Error(), "within 200ms") {
		t.Errorf("error: got %q, want the limit", err)
	}
}

func TestIdentityFailsWhenTheInterpreterCantReseed(t *testing.T) {
	needPython(t)
	r := newRig(t, Options{})
	r.result("import random\ndef seed(*a): raise RuntimeError('no seed today')\nrandom.seed = seed")
	_, err := r.Identify(testContext(t), sampleIdentity())
	wantCode(t, err, agentproto.CodeIdentity)
	if err != nil && !strings.Contains(err.Error(), "no seed today") {
		t.Errorf("error: got %q, want the reason", err)
	}
}

func TestQuiesce(t *testing.T) {
	r := newRig(t, Options{})
	needPython(t)
	r.result("import gc, hashlib, threading\nclass C: pass\na = C(); a.a = a; del a\nprint('x')")
	r.result("threading.Timer(0, print, ['of the parent']).start()")
	if err := r.Quiesce(testContext(t)); err != nil {
		t.Fatalf("Quiesce: %v", err)
	}
	if got := r.result("gc.get_freeze_count() > 0"); got != "True" {
		t.Errorf("objects are frozen: got %s, want True", got)
	}
	if got := r.result("import sys\n'_ssl' in sys.modules"); got != "True" {
		t.Errorf("OpenSSL can be reseeded: got %s, want True", got)
	}
}

func TestQuiesceStartsTheInterpreter(t *testing.T) {
	needPython(t)
	r := newRig(t, Options{})
	if err := r.Quiesce(testContext(t)); err != nil {
		t.Fatalf("Quiesce: %v", err)
	}
	if ack, err := r.Identify(testContext(t), sampleIdentity()); err != nil || !ack.Python {
		t.Errorf("Identify: got %+v, %v, want an interpreter reseeded", ack, err)
	}
}

func TestQuiesceNeedsNoInterpreter(t *testing.T) {
	for name, python := range map[string]string{"none": "/no/such/python3", "broken": "false"} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t, Options{Python: python})
			for range 2 {
				if err := r.Quiesce(testContext(t)); err != nil {
					t.Errorf("Quiesce: %v", err)
				}
			}
		})
	}
}

// gc.freeze hides objects from a second search.
func TestQuiesceTwiceKeepsGenerators(t *testing.T) {
	needPython(t)
	r := newRig(t, Options{})
	r.result(fakeNumpy)
	r.result(`
import types
class Seq:
    def __init__(self, entropy): self.entropy = entropy
    def spawn(self, n): return [Seq(self.entropy)]
class PCG(BitGenerator):
    def __init__(self, seq): self.seed_seq, self.state = seq, list(seq.entropy) if not isinstance(seq.entropy, int) else 'old'
numpy.random.SeedSequence = Seq
system, chosen, gone = PCG(Seq(1 << 127)), PCG(Seq(42)), PCG(Seq(1 << 127))
`)
	for range 2 {
		if err := r.Quiesce(testContext(t)); err != nil {
			t.Fatalf("Quiesce: %v", err)
		}
	}
	r.result("import weakref\nref = weakref.ref(gone)\ndel gone")
	if err := r.Quiesce(testContext(t)); err != nil {
		t.Fatalf("Quiesce: %v", err)
	}
	if _, err := r.Identify(testContext(t), sampleIdentity()); err != nil {
		t.Fatalf("Identify: %v", err)
	}
	if got, want := r.result("system.state != 'old', chosen.state, ref() is None"), "(True, 'old', True)"; got != want {
		t.Errorf("seeded by the system, seeded by someone, unused: got %s, want %s", got, want)
	}
}

// A quiet interpreter is reseeded before its next step, not at the identity: nothing may tell the difference.
func TestIdentityOwedToAQuietInterpreter(t *testing.T) {
	needPython(t)
	r := newRig(t, Options{})
	r.result("import os, random")
	id := sampleIdentity()
	draw := func(env ...string) string {
		t.Helper()
		r.result("random.seed(1)")
		if err := r.Quiesce(testContext(t)); err != nil {
			t.Fatalf("Quiesce: %v", err)
		}
		for _, last := range []string{"first", "second"} { // the first one is never taken
			id.InstanceID, id.Env = last, append([]string{"ONLY_" + last + "=1"}, env...)
			if ack, err := r.Identify(testContext(t), id); err != nil || !ack.Python {
				t.Fatalf("Identify: got %+v, %v, want an interpreter that counts as reseeded", ack, err)
			}
		}
		return r.result("random.random()")
	}
	one := draw("A=1")
	if got, want := r.result("os.environ.get('A'), os.environ.get('ONLY_first'), os.environ.get('ONLY_second')"), "('1', None, '1')"; got != want {
		t.Errorf("environment: got %s, want %s", got, want)
	}
	if again := draw("B=2"); again != one {
		t.Errorf("the same entropy: got %s, then %s, want the same: the seed must come from the identity", one, again)
	}
	if got, want := r.result("os.environ.get('A'), os.environ.get('B')"), "(None, '2')"; got != want {
		t.Errorf("environment of the identity before is gone: got %s, want %s", got, want)
	}
	id.Entropy[0] ^= 1
	if other := draw(); other == one {
		t.Errorf("other entropy: got %s twice", other)
	}
}

func TestIdentityOwedThatFailsLetsNothingRun(t *testing.T) {
	needPython(t)
	r := newRig(t, Options{})
	r.result("import random\nx = 1\ndef seed(*a): raise RuntimeError('no seed today')\nrandom.seed = seed")
	if err := r.Quiesce(testContext(t)); err != nil {
		t.Fatalf("Quiesce: %v", err)
	}
	if _, err := r.Identify(testContext(t), sampleIdentity()); err != nil {
		t.Fatalf("Identify: %v", err)
	}
	_, err := r.Eval(testContext(t), agentproto.EvalRequest{Code: "x"})
	wantCode(t, err, agentproto.CodeIdentity)
	if err != nil && !strings.Contains(err.Error(), "no seed today") {
		t.Errorf("error: got %q, want the reason", err)
	}
	res, err := r.Eval(testContext(t), agentproto.EvalRequest{Code: "x"})
	if err != nil || !strings.Contains(res.Error, "NameError") {
		t.Errorf("evaluation after that: got %+v, %v, want a new interpreter", res, err)
	}
}

// What can run by itself must be reseeded at once.
func TestIdentityOwesNothingToAnInterpreterThatCanRun(t *testing.T) {
	needPython(t)
	for name, code := range map[string]string{
		"thread":         "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()",
		"signal handler": "import signal\nsignal.signal(signal.SIGALRM, lambda *a: None)",
	} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t, Options{})
			r.result(code + "\nimport random\ndef seed(*a): raise RuntimeError('asked')\nrandom.seed = seed")
			if err := r.Quiesce(testContext(t)); err != nil {
				t.Fatalf("Quiesce: %v", err)
			}
			_, err := r.Identify(testContext(t), sampleIdentity())
			wantCode(t, err, agentproto.CodeIdentity)
		})
	}
}
