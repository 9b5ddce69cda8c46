package e2e

import (
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/forkd/forkd/api"
	"github.com/forkd/forkd/client"
	"github.com/forkd/forkd/internal/limits"
)

// groupsOf finds the control groups of a daemon's machines: the directories of each by the machine's id.
func groupsOf(run string) map[string][]string {
	found := map[string][]string{}
	_ = filepath.WalkDir("/sys/fs/cgroup", func(path string, d fs.DirEntry, err error) error {
		if err == nil && d.IsDir() && filepath.Base(filepath.Dir(path)) == limits.Name(run) {
			found[d.Name()] = append(found[d.Name()], path)
			return fs.SkipDir
		}
		return nil
	})
	return found
}

// inGroup reads a file of a sandbox's control group, whichever hierarchy has it.
func (d *daemon) inGroup(id string, names ...string) string {
	for _, dir := range groupsOf(d.run)[id] {
		for _, name := range names {
			if b, err := os.ReadFile(filepath.Join(dir, name)); err == nil {
				return strings.TrimSpace(string(b))
			}
		}
	}
	return ""
}

// needLimits skips a test where the daemon can't keep limits.
func (d *daemon) needLimits() {
	d.t.Helper()
	if regexp.MustCompile(`can't be kept.*missing="?[a-z,]*(memory|cpu|pids)`).MatchString(d.logSince(0)) {
		d.t.Skip("this host can't keep all limits: see the daemon's log")
	}
}

func limitedTo(l client.Limits) func(*client.ForkRequest) {
	return func(r *client.ForkRequest) { r.Limits = &l }
}

// fill has a guest touch so many MiB of its memory. Its monitor may not live to answer.
func (g *guest) fill(mib int) error {
	_, err := g.tryPy(fmt.Sprintf("filled = bytearray(b'x') * (%d << 20)", mib))
	return err
}

// TestLimits has guests come to their limits. They end, with a state and a reason that say it, and nobody else is disturbed.
func TestLimits(t *testing.T) {
	d := sharedDaemon(t)
	d.needLimits()
	sibling := d.fork1()
	t.Run("memory", func(t *testing.T) {
		d := d.in(t)
		g := d.fork1(limitedTo(client.Limits{MemoryMiB: 96}))
		if s, err := g.now(); err != nil || s.Limits == nil || s.Limits.MemoryMiB != 96 || s.Limits.Pids == 0 || s.MemoryLimitMiB == nil || *s.MemoryLimitMiB != 96 {
			t.Errorf("the sandbox has the limits %+v, %v, want 96 MiB and the daemon's default of processes", s.Limits, err)
		}
		if err := g.fill(150); !client.IsCode(err, "sandbox_gone") && !client.IsCode(err, "guest_unreachable") {
			t.Errorf("filling 150 MiB: got %v, want the sandbox gone", err)
		}
		g.awaitEnd(api.SandboxInfoStateFailed, "out of memory: the sandbox came to its memory limit of 96 MiB")
		d.checkTidy()
	})
	t.Run("memory of a claim", func(t *testing.T) {
		d := d.in(t)
		d.fillPool(pyTag, 1)
		defer d.fillPool(pyTag, 0)
		g := d.fork1(fromPool, limitedTo(client.Limits{MemoryMiB: 96, Cpus: 0.5}))
		if got := d.inGroup(g.ID, "cpu.max", "cpu.cfs_quota_us"); got != "50000 100000" && got != "50000" {
			t.Errorf("half a CPU is %q", got)
		}
		_ = g.fill(150)
		g.awaitEnd(api.SandboxInfoStateFailed, "its memory limit of 96 MiB")
	})
	t.Run("enough memory", func(t *testing.T) {
		d := d.in(t)
		g := d.fork1(func(r *client.ForkRequest) { r.MemoryLimitMiB = client.Int(256) })
		if err := g.fill(60); err != nil {
			t.Errorf("filling 60 MiB of 256: %v", err)
		}
	})
	t.Run("what can't be kept", func(t *testing.T) {
		d.refuses("POST", "/v1/sandboxes", strings.NewReader(`{"snapshot_tag": "py", "limits": {"pids": 3}}`), refusal{400, "invalid_argument", "3 processes"})
	})
	if got := sibling.py("6 * 7"); got != "42" {
		t.Errorf("6 * 7 in a sibling: %s", got)
	}
}

// TestConfined looks at the monitors of real sandboxes, from the host.
func TestConfined(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("only root confines its machines")
	}
	d := sharedDaemon(t)
	var users []string
	for _, g := range d.fork(2) {
		s, err := g.now()
		if err != nil || s.Confinement != api.SandboxInfoConfinementFull {
			t.Errorf("%s is confined %q, %v, want fully", g, s.Confinement, err)
		}
		status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", s.PID))
		if err != nil {
			t.Fatal(err)
		}
		for line := range strings.Lines(string(status)) {
			f := strings.Fields(line)
			switch f[0] {
			case "Uid:":
				users = append(users, f[1])
			case "CapEff:", "CapBnd:":
				if f[1] != "0000000000000000" {
					t.Errorf("%s has capabilities: %s", g, line)
				}
			case "NoNewPrivs:":
				if f[1] != "1" {
					t.Errorf("%s may gain privileges", g)
				}
			case "Seccomp_filters:":
				// A Firecracker can be built without its own.
				if f[1] != "2" && (f[1] != "1" || underTest().name == "qemu") {
					t.Errorf("%s has %s seccomp filters, want ours and the monitor's own", g, f[1])
				}
			}
		}
		for _, ns := range []string{"mnt", "pid", "ipc", "uts", "net"} {
			theirs, _ := os.Readlink(fmt.Sprintf("/proc/%d/ns/%s", s.PID, ns))
			ours, _ := os.Readlink("/proc/self/ns/" + ns)
			if theirs == ours {
				t.Errorf("%s is in the host's %s namespace", g, ns)
			}
		}
		root := entries(fmt.Sprintf("/proc/%d/root", s.PID))
		if slices.Contains(root, "etc") || slices.Contains(root, "root") || len(root) == 0 {
			t.Errorf("%s sees %v", g, root)
		}
	}
	if len(users) != 2 || users[0] == users[1] || slices.Contains(users, "0") {
		t.Errorf("the monitors are the users %v, want two", users)
	}
}
