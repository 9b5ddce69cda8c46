package e2e

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/forkd/forkd/client"
)

// TestCommandLine goes the way of somebody who reads the README: from an image to sandboxes and back to nothing.
func TestCommandLine(t *testing.T) {
	t.Parallel()
	d := ownDaemon(t, setup{})
	wantWords(t, "image ls", d.must("image", "ls", "-q"), pythonImage, bareImage)
	wantWords(t, "image build of what is there", d.must("image", "build", pythonImage, "--packages", "python3,python3-numpy"), pythonImage)
	wantWords(t, "snapshot", d.must("snapshot", "--tag", "mine", "--image", bareImage, "--mem-mib", "128", "--warm-up", "echo warm >/root/warm",
		"--env", "FROM=snapshot", "--probe", "true"), "mine", "bare", "ready")
	wantWords(t, "images", d.must("images"), "mine", pyTag, "ready", underTest().String())
	wantWords(t, "snapshot-info", d.must("snapshot-info", "mine"), "128 MiB, 1 vCPU", "ready")
	wantWords(t, "snapshot-verify", d.must("snapshot-verify", "mine", pyTag), "mine", pyTag)

	ids := strings.Fields(d.must("fork", "--tag", pyTag, "-n", "3", "-q", "--env", "COLOUR=red", "--metadata", "who=me", "--timeout", "1h"))
	if len(ids) != 3 {
		t.Fatalf("fork -n 3 -q printed %q", ids)
	}
	wantWords(t, "fork", d.must("fork", "--tag", "mine"), "mine", "running", "cold")
	wantWords(t, "ls", d.must("ls"), append(ids, "SNAPSHOT", "mine", "running")...)
	if got := strings.Fields(d.must("ls", "-q", "--tag", pyTag)); len(got) != 3 {
		t.Errorf("ls --tag %s -q: %q", pyTag, got)
	}
	id := ids[0]
	d.useByCommandLine(id)
	mine := d.must("ls", "-q", "--tag", "mine")
	if got := d.must("exec", mine, "--", "sh", "-c", "cat /root/warm; echo $FROM"); got != "warm\nsnapshot" {
		t.Errorf("what the warm-up and its environment left: %q", got)
	}

	if got := d.forkd("rmi", "mine"); got.code != 1 || !strings.Contains(got.stderr, mine) {
		t.Errorf("rmi of a snapshot in use: %v", got)
	}
	if got := d.must("kill", id); got != id {
		t.Errorf("kill printed %q", got)
	}
	if got := strings.Fields(d.must("kill", "--all")); len(got) != 3 {
		t.Errorf("kill --all printed %q", got)
	}
	if got := d.must("ls", "-q"); got != "" {
		t.Errorf("ls -q after kill --all: %q", got)
	}
	d.checkTidy()

	d.poolByCommandLine()
	d.must("fork", "--tag", "mine", "-n", "2")
	if got := d.must("rmi", "--force", "mine"); got != "mine" {
		t.Errorf("rmi --force printed %q", got)
	}
	if got := d.must("ls", "-q"); got != "" {
		t.Errorf("sandboxes of a snapshot that was removed by force: %q", got)
	}
	if got := d.must("rmi", pyTag); got != pyTag {
		t.Errorf("rmi printed %q", got)
	}
	names := d.must("image", "ls", "-q")
	if got := d.must(append([]string{"image", "rm"}, strings.Fields(names)...)...); got != names {
		t.Errorf("image rm printed %q, want %q", got, names)
	}
	if got := d.must("images", "-q") + d.must("image", "ls", "-q"); got != "" {
		t.Errorf("left: %q", got)
	}
	d.checkTidy()
	for _, command := range []string{"serve", "cleanup"} {
		if got := d.forkd(append([]string{command}, d.where()...)...); got.code != 1 || !strings.Contains(got.stderr, "in use by another daemon") {
			t.Errorf("%s beside a daemon that runs: %v", command, got)
		}
	}
	d.stop()
	if got := d.forkd("ls"); got.code != 3 || !strings.Contains(got.stderr, "forkd serve") {
		t.Errorf("ls without a daemon: %v", got)
	}
}

// useByCommandLine does with a sandbox what commands can do.
func (d *daemon) useByCommandLine(id string) {
	t := d.t
	t.Helper()
	if got := d.must("exec", id, "--", "sh", "-c", "echo $COLOUR; hostname"); got != "red\n"+id {
		t.Errorf("exec: %q", got)
	}
	if got := d.forkdWith("some input", "exec", "-i", "-u", "user", "--cwd", "/tmp", id, "--", "sh", "-c", "cat; pwd; id -un; exit 9"); got.code != 9 || got.stdout != "some input/tmp\nuser\n" {
		t.Errorf("exec with input, user and directory: %v", got)
	}
	if got := d.must("eval", id, "numpy.arange(4).sum() + 36"); got != "42" {
		t.Errorf("eval: %q", got)
	}
	if got := d.forkdWith("x = 20\nprint('hello')\nx + 1", "eval", id, "-"); got.code != 0 || got.stdout != "hello\n21\n" {
		t.Errorf("eval of standard input: %v", got)
	}
	wantWords(t, "get", d.must("get", id), id, "running", "COLOUR=red", "who=me", "in 59 min")
	wantWords(t, "extend", d.must("extend", id, "--timeout", "24h"), id, "in 23 h")
	wantWords(t, "ping", d.must("ping", id), "pong from "+id)
	wantWords(t, "stats", d.must("stats", id), id, "OWN MEMORY", "MiB")
	d.must("exec", id, "--", "sh", "-c", "echo written on the console >/dev/console")
	wantWords(t, "logs", d.must("logs", id), "written on the console")
	wantWords(t, "version", d.must("version"), "API v1")
	var got client.Sandbox
	d.mustJSON(&got, "get", id)
	if got.ID != id || got.Env["COLOUR"] != "red" || got.Metadata["who"] != "me" || got.PID == 0 {
		t.Errorf("get --json: %+v", got)
	}
	var stats []client.Stats
	d.mustJSON(&stats, "stats")
	if len(stats) != 4 || stats[0].GuestAnonKiB == 0 || stats[0].PSSKiB == 0 {
		t.Errorf("stats --json: %+v", stats)
	}
	var res struct {
		Stdout   string `json:"stdout"`
		ExitCode int    `json:"exit_code"`
	}
	d.mustJSON(&res, "exec", id, "--", "echo", "hello")
	if res.Stdout != "hello\n" || res.ExitCode != 0 {
		t.Errorf("exec --json: %+v", res)
	}
	// One that ends at its deadline says so.
	short := d.must("fork", "--tag", pyTag, "-q", "--timeout", "1s")
	eventually(t, tidyLimit, func() error {
		if text := d.must("get", short); !strings.Contains(text, "its deadline passed") {
			return fmt.Errorf("%s", text)
		}
		return nil
	})
	d.must("kill", short)
}

func (d *daemon) poolByCommandLine() {
	t := d.t
	t.Helper()
	wantWords(t, "pool --size 2", d.must("pool", pyTag, "--size", "2"), pyTag, "2")
	d.awaitPool(pyTag, 2)
	var pool client.Pool
	d.mustJSON(&pool, "pool", pyTag)
	if pool.Size != 2 || pool.Ready != 2 || pool.Problem != "" {
		t.Errorf("pool --json: %+v", pool)
	}
	wantWords(t, "fork from the pool", d.must("fork", "--tag", pyTag, "--pool", "-n", "2", "--env", "A=b"), "claim")
	for _, id := range strings.Fields(d.must("ls", "-q")) {
		if got := d.must("eval", id, "os.environ['A'] + socket.gethostname()"); got != "'b"+id+"'" {
			t.Errorf("eval in a claimed sandbox: %s", got)
		}
	}
	d.awaitPool(pyTag, 2)
	d.must("kill", "--tag", pyTag)
	d.must("pool", pyTag, "--size", "0")
	d.checkTidy()
}

// wantWords checks that a text has all the words.
func wantWords(t *testing.T, what, text string, words ...string) {
	t.Helper()
	for _, word := range words {
		if !strings.Contains(text, word) {
			t.Errorf("%s: %q is missing in\n%s", what, word, text)
		}
	}
}

// TestDoctor: a machine that runs these tests can run forkd, and the doctor says so.
func TestDoctor(t *testing.T) {
	t.Parallel()
	d := ownDaemon(t, setup{empty: true})
	out := d.forkd("doctor", "--json", "--data", d.data)
	var report struct {
		Status string `json:"status"`
		Checks []struct{ Name, Status, Detail, Fix string }
	}
	if err := json.Unmarshal([]byte(out.stdout), &report); err != nil {
		t.Fatalf("doctor --json printed no JSON: %v\n%v", err, out)
	}
	if (out.code != 0) != (report.Status == "fail") || len(report.Checks) < 5 {
		t.Errorf("doctor --json: %v", out)
	}
	for _, c := range report.Checks {
		if slices.Contains([]string{"qemu", "tsc", "memfd", "root", "image tools"}, c.Name) && c.Status == "fail" {
			t.Errorf("the doctor says that what runs here can't: %+v", c)
		}
		if c.Detail == "" || !slices.Contains([]string{"ok", "warn", "fail"}, c.Status) {
			t.Errorf("check without a verdict: %+v", c)
		}
	}
	wantWords(t, "doctor", d.forkd("doctor", "--data", d.data).stdout, "STATUS", "qemu", "kvm")
}

// TestDemo runs the demo as `make demo` does, on a cache of its own with the same downloads in it.
func TestDemo(t *testing.T) {
	t.Parallel()
	d := ownDaemon(t, setup{empty: true})
	cache := filepath.Join(d.data, "cache")
	for _, kept := range []string{"kernels", "roots"} {
		if err := linkTree(filepath.Join(cache, kept), filepath.Join(cacheDir(), kept)); err != nil {
			t.Fatal(err)
		}
	}
	const n = 3
	out := d.forkd("demo", "--json", "-n", fmt.Sprint(n), "--cache", cache, "--accel", accel())
	var report struct {
		Engine string `json:"engine"`
		Cold   struct{ N, Failed int }
		Claim  struct{ N, Failed int }

		BootWarmMS   float64        `json:"boot_warm_ms"`
		AnonKiB      int            `json:"anon_kib_p50"`
		PSSKiB       int            `json:"pss_kib_p50"`
		Distinct     map[string]int `json:"distinct"`
		DistinctCold map[string]int `json:"distinct_cold"`
		Skew         *float64       `json:"clock_skew_ms_max"`
		Leftovers    *int           `json:"leftovers"`
		Detail       any            `json:"leftovers_detail"`
	}
	if err := json.Unmarshal([]byte(out.stdout), &report); err != nil {
		t.Fatalf("demo --json printed no JSON: %v\n%v", err, out)
	}
	if out.code != 0 || report.Engine != "qemu" || report.BootWarmMS <= 0 || report.AnonKiB <= 0 || report.PSSKiB <= 0 {
		t.Errorf("demo: %v", out)
	}
	if report.Cold.N != n || report.Cold.Failed != 0 || report.Claim.N != n || report.Claim.Failed != 0 {
		t.Errorf("demo: cold %+v, claim %+v, want %d of each and none failed", report.Cold, report.Claim, n)
	}
	for _, distinct := range []map[string]int{report.Distinct, report.DistinctCold} {
		if len(distinct) != 7 {
			t.Errorf("demo: distinct %v, want 7 things counted", distinct)
		}
		for what, count := range distinct {
			if count != n {
				t.Errorf("demo: %d distinct %s, want %d", count, what, n)
			}
		}
	}
	if report.Skew == nil || *report.Skew >= 1000 {
		t.Errorf("demo: the clock was off by %v ms", report.Skew)
	}
	if report.Leftovers == nil || *report.Leftovers != 0 {
		t.Errorf("demo: leftovers: %+v", report.Detail)
	}
	if found := regexp.MustCompile(`(?m)^panic|goroutine \d`).FindString(out.stderr); found != "" {
		t.Errorf("demo: %v", out)
	}
}

// linkTree makes a copy of a tree whose files are links.
func linkTree(to, from string) error {
	return filepath.WalkDir(from, func(path string, e os.DirEntry, err error) error {
		if err != nil {
			return err
		}
		rel, err := filepath.Rel(from, path)
		if err != nil {
			return err
		}
		if e.IsDir() {
			return os.MkdirAll(filepath.Join(to, rel), 0o755)
		}
		if e.Type()&os.ModeSymlink != 0 {
			target, err := os.Readlink(path)
			if err != nil {
				return err
			}
			return os.Symlink(target, filepath.Join(to, rel))
		}
		err = os.Link(path, filepath.Join(to, rel))
		if errors.Is(err, unix.EXDEV) { // it is on a disk of its own, as in the KVM lab
			err = os.Symlink(path, filepath.Join(to, rel))
		}
		return err
	})
}
