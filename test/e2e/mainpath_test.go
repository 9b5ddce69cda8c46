package e2e

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/forkd/forkd/api"
	"github.com/forkd/forkd/client"
)

// TestMainPath goes the way that a user goes, on the command line: from the doctor over an image, a snapshot and 20 forks, through a crash
// of the daemon, branches, a suspend and a pack, to a second daemon that takes the pack in.
func TestMainPath(t *testing.T) {
	ready := os.Getenv(imagesEnv)
	d := ownDaemon(t, setup{empty: true, prepare: func(data string) error {
		if ready == "" {
			return nil
		}
		return linkTree(filepath.Join(data, "images"), ready)
	}})
	d.checkDoctor()
	if ready == "" {
		d.must("image", "build", pythonImage, "--packages", "python3,python3-numpy", "-q")
	}
	wantWords(t, "image ls", d.must("image", "ls"), pythonImage)
	d.must("snapshot", "--tag", "main", "--image", pythonImage, "--mem-mib", fmt.Sprint(memMiB), "--warm-up", "echo warm >/root/warm",
		"--warm-up-eval", "import numpy; base = 40", "-q")
	wantWords(t, "images", d.must("images"), "main", "ready", underTest().String())

	n := few(20, 6)
	ids := strings.Fields(d.must("fork", "--tag", "main", "-n", fmt.Sprint(n), "-q"))
	if len(ids) != n {
		t.Fatalf("fork -n %d -q printed %d ids: %v", n, len(ids), ids)
	}
	d.checkSiblings(ids)
	d.kill9()
	d.start(setup{})
	if left := strings.Fields(d.must("ls", "-q")); !sameIDs(left, ids) {
		t.Fatalf("after the crash: sandboxes %v, want %v", left, ids)
	}
	for _, id := range ids[:5] {
		wantWords(t, "exec after the crash", d.speaks(false).sh(id, "cat /root/mine"), id)
	}
	d.must(append([]string{"kill"}, ids[2:]...)...)
	d.checkBranches(ids[0])
	d.checkSuspend(ids[0])
	d.checkPack(t)
	d.must("kill", "--all")
	d.checkTidy()
}

func sameIDs(a, b []string) bool {
	a, b = slices.Sorted(slices.Values(a)), slices.Sorted(slices.Values(b))
	return slices.Equal(a, b)
}

// checkDoctor looks for what the tests are run for: where they are to run on KVM the doctor has tried a guest on it, and there is cgroup v2.
func (d *daemon) checkDoctor() {
	d.t.Helper()
	out := d.forkd("doctor", "--json", "--data", d.data)
	var report struct {
		Checks []struct{ Name, Status, Detail string }
	}
	if err := json.Unmarshal([]byte(out.stdout), &report); err != nil {
		d.t.Fatalf("doctor --json printed no JSON: %v\n%v", err, out)
	}
	for _, c := range report.Checks {
		if c.Status == "fail" || c.Name == "kvm" && accel() == "kvm" && c.Status != "ok" {
			d.t.Errorf("doctor: %+v", c)
		}
		d.t.Logf("doctor: %s: %s: %s", c.Name, c.Status, c.Detail)
	}
}

// speaker runs shell commands and code in sandboxes.
type speaker struct {
	sh func(id, command string) string
	py func(id, code string) string
}

// speaks is on the command line at first, and then by the API, which does the same for less: a program that starts is no small thing in the lab.
func (d *daemon) speaks(first bool) speaker {
	if first {
		return speaker{
			sh: func(id, command string) string { d.t.Helper(); return d.must("exec", id, "--", "sh", "-c", command) },
			py: func(id, code string) string { d.t.Helper(); return d.must("eval", id, code) },
		}
	}
	known := func(id string) *guest { return &guest{client.Sandbox{ID: id}, d} }
	return speaker{
		sh: func(id, command string) string { d.t.Helper(); return known(id).sh(command) },
		py: func(id, code string) string { d.t.Helper(); return known(id).py(code) },
	}
}

// checkSiblings runs commands and code in each sandbox, and checks that they are different machines.
func (d *daemon) checkSiblings(ids []string) {
	d.t.Helper()
	seen := map[string]string{}
	for i, id := range ids {
		in := d.speaks(i == 0)
		info, err := (&guest{client.Sandbox{ID: id}, d}).now()
		if err != nil || os.Geteuid() == 0 && info.Confinement != api.SandboxInfoConfinementFull {
			d.t.Errorf("the monitor of %s is confined %q, %v, want fully", id, info.Confinement, err)
		}
		if got := in.sh(id, "hostname >/root/mine; cat /root/warm /root/mine"); got != "warm\n"+id {
			d.t.Errorf("exec in %s: got %q, want its own name", id, got)
		}
		in.py(id, "mine = numpy.arange(base + 2)")
		random := in.py(id, "(int(mine.sum()), numpy.random.rand())")
		if !strings.HasPrefix(random, "(861, ") {
			d.t.Errorf("eval in %s: got %q, want the sum 861", id, random)
		}
		if other, twice := seen[random]; twice {
			d.t.Errorf("%s and %s drew the same: %s", other, id, random)
		}
		seen[random] = id
	}
}

// checkBranches branches a sandbox in each mode, and a branch once more, and looks into a child of each.
func (d *daemon) checkBranches(id string) {
	d.t.Helper()
	for i, mode := range []string{"--live", "--diff", "--full"} {
		tag, in := "branch"+mode, d.speaks(i == 0)
		in.sh(id, fmt.Sprintf("echo %d >/root/step", i))
		d.must("branch", id, mode, "--tag", tag, "-q")
		var snap client.Snapshot
		d.mustJSON(&snap, "snapshot-info", tag)
		d.t.Logf("branch %s: the sandbox stood still for %.1f ms", mode, snap.PauseMS)
		if snap.Warning != "" {
			d.t.Errorf("branch %s: %s", mode, snap.Warning)
		}
		child := d.must("fork", "--tag", tag, "-q")
		if got := in.sh(child, "cat /root/mine /root/step"); got != fmt.Sprintf("%s\n%d", id, i) {
			d.t.Errorf("child of branch %s: got %q, want what the source %s had in step %d", mode, got, id, i)
		}
		in.sh(child, "echo deeper >/root/step")
		d.must("branch", child, "--tag", tag+"-2", "-q")
		grandchild := d.must("fork", "--tag", tag+"-2", "-q")
		if got := in.py(grandchild, "(len(mine), open('/root/step').read())"); got != `(42, 'deeper\n')` {
			d.t.Errorf("grandchild of branch %s: got %s", mode, got)
		}
		d.must("kill", child, grandchild)
	}
}

func (d *daemon) checkSuspend(id string) {
	d.t.Helper()
	d.must("suspend", id)
	d.stop()
	d.start(setup{})
	d.must("resume", id)
	if got := d.must("eval", id, "int(mine.sum())"); got != "861" {
		d.t.Errorf("after suspend and resume: got %s, want 861", got)
	}
}

// checkPack moves a branch to a daemon that has nothing.
func (d *daemon) checkPack(t *testing.T) {
	t.Helper()
	file := filepath.Join(d.data, "main.forkd")
	d.must("pack", "--tag", "branch--live-2", "--out", file)
	defer os.Remove(file)
	other := ownDaemon(t, setup{empty: true})
	other.must("unpack", file, "--tag", "moved", "-q")
	id := other.must("fork", "--tag", "moved", "-q")
	if got := other.must("eval", id, "(int(mine.sum()), open('/root/step').read())"); got != `(861, 'deeper\n')` {
		t.Errorf("child of what was unpacked: got %s", got)
	}
	other.must("kill", "--all")
	other.checkTidy()
}
