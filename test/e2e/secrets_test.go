package e2e

import (
	"bytes"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/forkd/forkd/api"
	"github.com/forkd/forkd/client"
)

// holding returns the files below a directory that have a text in them.
func holding(t *testing.T, dir, text string) (found []string) {
	t.Helper()
	err := filepath.WalkDir(dir, func(path string, e fs.DirEntry, err error) error {
		if err != nil || !e.Type().IsRegular() {
			return nil // it went meanwhile, or is a socket
		}
		data, err := os.ReadFile(path)
		if err == nil && bytes.Contains(data, []byte(text)) {
			found = append(found, path)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return found
}

// TestSecrets hands secrets to a cold child and to one of a pool: root in that guest can read them, nobody else, and no file of the host has them
// until a copy that may have them is asked for.
func TestSecrets(t *testing.T) {
	t.Parallel()
	d := ownDaemon(t, setup{})
	const value = "open-sesame-7f3c91"
	secret := func(r *client.ForkRequest) { r.Secrets = map[string]string{"API_KEY": value, "OTHER": "x\ny"} }
	d.fillPool(pyTag, 1)
	claimed := d.fork1(secret, func(r *client.ForkRequest) { r.Path = api.ForkRequestPathPool })
	d.fillPool(pyTag, 0)
	cold := d.fork1(secret, func(r *client.ForkRequest) { r.Path = api.ForkRequestPathCold })
	plain := d.fork1()
	told := d.listenToEvents()
	d.checkSecretEnv(value)
	for _, g := range []*guest{claimed, cold} {
		for command, want := range map[string]string{
			"cat /run/forkd/secrets/API_KEY":                                     value,
			"cat /run/forkd/secrets/OTHER":                                       "x\ny",
			"stat -c '%a %U' /run/forkd/secrets /run/forkd/secrets/API_KEY":      "700 root\n400 root",
			"stat -f -c %T /run/forkd/secrets":                                   "tmpfs",
			"su user -c 'cat /run/forkd/secrets/API_KEY' 2>/dev/null || echo no": "no",
			"env | grep -c open-sesame || true":                                  "0",
		} {
			if got := g.sh(command); got != want {
				t.Errorf("%v: %s: got %q, want %q", g, command, got, want)
			}
		}
	}
	if got := plain.sh("ls /run/forkd/secrets 2>/dev/null || echo none"); got != "none" {
		t.Errorf("a child without secrets has %q", got)
	}
	if _, err := d.tryBranch(cold, client.BranchRequest{Tag: "b"}); !client.IsCode(err, "holds_secrets") {
		t.Errorf("branch: got %v, want holds_secrets", err)
	}
	if err := d.trySuspend(cold); !client.IsCode(err, "holds_secrets") {
		t.Errorf("suspend: got %v, want holds_secrets", err)
	}
	// Guests that try to have it told: in an error, on the console.
	_, _ = cold.exec(client.ExecRequest{Args: []string{"sh", "-c", "cat /run/forkd/secrets/API_KEY >&2; exit 3"}})
	_, _ = cold.eval(client.EvalRequest{Code: "raise ValueError(open('/run/forkd/secrets/API_KEY').read())"})
	found := append(holding(t, d.data, value), holding(t, filepath.Dir(d.run), value)...)
	figures, err := d.client.Metrics(t.Context())
	if err != nil {
		t.Error(err)
	}
	if said := told() + string(figures); strings.Contains(said, value) {
		found = append(found, "events or metrics")
	}
	if len(found) > 0 {
		t.Errorf("the secret is in %v", found)
	}
	d.branch(cold, client.BranchRequest{Tag: "b", IncludeSecrets: true})
	if found := append(holding(t, d.data, value), holding(t, filepath.Dir(d.run), value)...); len(found) != 1 {
		t.Errorf("a copy that may have the secret: it is in %v, want the memory of one snapshot: is it looked for in the right place?", found)
	}
	child := d.fork1(of("b"))
	if got := child.sh("cat /run/forkd/secrets/API_KEY"); got != value {
		t.Errorf("a child of that copy has %q", got)
	}
	for _, g := range []*guest{claimed, cold, plain, child} {
		g.kill()
	}
	d.must("rmi", "b")
	d.checkTidy()
	if found := append(holding(t, d.data, value), holding(t, filepath.Dir(d.run), value)...); len(found) > 0 {
		t.Errorf("after the end of all that held it the secret is in %v", found)
	}
}

// checkSecretEnv has commands and code find secrets in their environment, whoever they run as, and after a suspension.
func (d *daemon) checkSecretEnv(value string) {
	t := d.t
	t.Helper()
	inEnv := d.fork1(func(r *client.ForkRequest) {
		r.Secrets, r.SecretEnv, r.Env = map[string]string{"API_KEY": value, "LANG": "from-secret"}, true, map[string]string{"LANG": "from-env"}
	})
	check := func(when string) {
		t.Helper()
		for command, want := range map[string]string{
			`printf %s "$API_KEY $LANG"`:                                               value + " from-secret",
			`su user -c 'printf %s "$API_KEY"'`:                                        value,
			"tr '\\0' '\n' </proc/1/environ | grep -c API_KEY || true":                 "0",
			"grep -l API_KEY /etc/environment /etc/profile.d/* 2>/dev/null || echo no": "no",
		} {
			if got := inEnv.sh(command); got != want {
				t.Errorf("%s: %s: got %q, want %q", when, command, got, want)
			}
		}
		if got := inEnv.py("os.environ['API_KEY']"); got != "'"+value+"'" {
			t.Errorf("%s: code finds %s", when, got)
		}
		if got := inEnv.py("__import__('subprocess').check_output(['printenv', 'API_KEY'], text=True)"); got != "'"+value+"\\n'" {
			t.Errorf("%s: what code starts finds %s", when, got)
		}
	}
	check("secret_env")
	ctx, cancel := d.limited()
	defer cancel()
	if _, err := d.client.Suspend(ctx, inEnv.ID, client.SuspendRequest{IncludeSecrets: true}); err != nil {
		t.Fatal(err)
	}
	d.suspended.Store(inEnv.ID, true)
	if found := holding(t, d.data, value); len(found) != 1 {
		t.Errorf("suspended with its secrets, they are in %v, want one file of its state", found)
	}
	d.resume(inEnv)
	check("suspended and resumed")
	inEnv.kill()
	d.checkTidy()
	res, err := inEnv.exec(client.ExecRequest{Args: []string{"true"}})
	if err == nil {
		t.Errorf("a sandbox that was killed answers %+v", res)
	}
}

// listenToEvents collects what the daemon tells until what it returns is called, which returns it.
func (d *daemon) listenToEvents() func() string {
	d.t.Helper()
	resp, err := d.client.HTTP().Get(strings.TrimSuffix(d.client.PortURL("x", 1), "/v1/sandboxes/x/ports/1/") + "/v1/events")
	if err != nil {
		d.t.Fatal(err)
	}
	var text strings.Builder
	var all sync.WaitGroup
	all.Go(func() { _, _ = io.Copy(&text, resp.Body) })
	return func() string {
		resp.Body.Close()
		all.Wait()
		return text.String()
	}
}
