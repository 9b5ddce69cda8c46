package e2e

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strings"
)

// ran is a command line that was run.
type ran struct {
	args           []string
	stdout, stderr string
	code           int
}

func (r ran) String() string {
	return fmt.Sprintf("forkd %s: exit code %d\nstdout: %s\nstderr: %s", strings.Join(r.args, " "), r.code, r.stdout, r.stderr)
}

// forkd runs the command line against the daemon.
func (d *daemon) forkd(args ...string) ran {
	d.t.Helper()
	return d.forkdWith("", args...)
}

func (d *daemon) forkdWith(stdin string, args ...string) ran {
	d.t.Helper()
	ctx, cancel := d.limited()
	defer cancel()
	cmd := exec.CommandContext(ctx, d.lab.bin, args...)
	cmd.Env = append(os.Environ(), "FORKD_URL="+d.socket())
	var stdout, stderr bytes.Buffer
	cmd.Stdin, cmd.Stdout, cmd.Stderr = strings.NewReader(stdin), &stdout, &stderr
	err := cmd.Run()
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		d.t.Fatalf("forkd %v: %v", args, err)
	}
	return ran{args, stdout.String(), stderr.String(), cmd.ProcessState.ExitCode()}
}

// must runs a command line that has to succeed and returns what it printed to stdout.
func (d *daemon) must(args ...string) string {
	d.t.Helper()
	r := d.forkd(args...)
	if r.code != 0 {
		d.t.Fatalf("%v", r)
	}
	return strings.TrimSuffix(r.stdout, "\n")
}

// mustJSON runs a command line with --json and decodes what it printed.
func (d *daemon) mustJSON(into any, args ...string) {
	d.t.Helper()
	out := d.must(append([]string{"--json"}, args...)...)
	if err := json.Unmarshal([]byte(out), into); err != nil {
		d.t.Fatalf("forkd --json %v printed no JSON: %v\n%s", args, err, out)
	}
}
