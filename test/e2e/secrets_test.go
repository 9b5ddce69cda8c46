package e2e

import (
	"bytes"
	"io/fs"
	"os"
	"path/filepath"
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
	if found := append(holding(t, d.data, value), holding(t, filepath.Dir(d.run), value)...); len(found) > 0 {
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
}
