// Package hostcheck finds out whether a machine can run forkd, and says for each thing that is missing which command mends it. It is
// what `forkd doctor` prints. It changes nothing, and the checks see the machine through Host alone, so that tests can describe one.
package hostcheck

import (
	"context"
	"fmt"
	"io/fs"
	"strings"

	"github.com/forkd/forkd/internal/hostcpu"
)

// Status is the verdict of a check.
type Status string

// Verdicts.
const (
	OK   Status = "ok"
	Warn Status = "warn" // forkd works, but something it can do is not to be had here, or not as well
	Fail Status = "fail" // forkd does not work
)

// Check is the result of one.
type Check struct {
	Name   string `json:"name"`
	Status Status `json:"status"`
	Detail string `json:"detail"`
	Fix    string `json:"fix,omitempty"` // a command; empty when all is well or no command can help
}

// Host is how the checks see the machine.
type Host struct {
	Root     fs.FS // the root file system
	UID      int
	LookPath func(program string) (string, error)
	Output   func(ctx context.Context, program string, args ...string) (string, error)
	OpenRW   func(path string) error                  // whether a device can be opened for reading and writing
	Memfd    func() error                             // whether memory files can be made and sealed
	DiskFree func(path string) (bytes int64, _ error) // of the nearest directory that exists
	Files    func() (most uint64, _ error)            // how many descriptors a process may have
	TSC      func() (hostcpu.TSC, error)
}

// Options are what the checks can't see for themselves.
type Options struct {
	DataDir string
	// KVM runs a test guest under KVM; nil leaves that out. An engine provides it.
	KVM func(context.Context) error
	// Firecracker tries the Firecracker that forkd would use and describes it; it wraps fs.ErrNotExist or exec.ErrNotFound where there is
	// none. Nil leaves that out. An engine provides it.
	Firecracker func(context.Context) (string, error)
	// Network says why machines can have no networks here. Nil leaves that out.
	Network func() error
	// Closed names what drops packets that this host passes on. Nil leaves that out.
	Closed func() ([]string, error)
	// Confinement says how far monitors are confined, having tried it: full, user or none. Nil leaves that out.
	Confinement func() (level string, problem error)
	// Limits says where control groups are made, having tried it. Nil: it is guessed from what is mounted.
	Limits func() (Limits, error)
}

// Limits are what keeps sandboxes to their limits.
type Limits struct {
	Version int      // of control groups
	Dir     string   // below which they are made; "": nowhere
	Missing []string // kinds of limits that can't be kept: memory, cpu, pids, io
	Why     error
}

// Run does all checks. Those that run programs end with ctx.
func Run(ctx context.Context, h Host, opt Options) []Check {
	r := &run{ctx: ctx, h: h, opt: opt}
	r.cpu, r.cpuErr = hostcpu.Read(h.Root)
	checks := []struct {
		name  string
		check func() verdict
	}{
		{"qemu", r.qemu},
		{"kvm", r.kvm},
		{"firecracker", r.firecracker},
		{"tsc", r.tsc},
		{"memfd", r.memfd},
		{"userfaultfd", r.userfaultfd},
		{"ptrace", r.ptrace},
		{"branch", r.branch},
		{"root", r.root},
		{"image tools", r.imageTools},
		{"confinement", r.confinement},
		{"cgroup", r.limits},
		{"network", r.network},
		{"firewall", r.firewall},
		{"memory", r.memory},
		{"overcommit", r.overcommit},
		{"disk", r.disk},
		{"open files", r.openFiles},
		{"memory maps", r.memoryMaps},
	}
	results := make([]Check, 0, len(checks))
	for _, c := range checks {
		v := c.check()
		results = append(results, Check{Name: c.name, Status: v.status, Detail: v.detail, Fix: v.fix})
	}
	return results
}

// Worst is the worst status of the checks.
func Worst(checks []Check) Status {
	worst := OK
	for _, c := range checks {
		if c.Status == Fail || worst == OK {
			worst = c.Status
		}
		if worst == Fail {
			break
		}
	}
	return worst
}

type run struct {
	ctx    context.Context
	h      Host
	opt    Options
	cpu    hostcpu.Info
	cpuErr error
}

type verdict struct {
	status Status
	detail string
	fix    string
}

func ok(format string, args ...any) verdict { return verdict{OK, fmt.Sprintf(format, args...), ""} }

func warn(fix, format string, args ...any) verdict {
	return verdict{Warn, fmt.Sprintf(format, args...), fix}
}

func fail(fix, format string, args ...any) verdict {
	return verdict{Fail, fmt.Sprintf(format, args...), fix}
}

// read returns a small file without the space around it; ok is false when it can't be read.
func (r *run) read(path string) (text string, ok bool) {
	raw, err := fs.ReadFile(r.h.Root, path)
	return strings.TrimSpace(string(raw)), err == nil
}

// field returns what follows "key:" in a file such as /proc/meminfo.
func (r *run) field(path, key string) (value string, ok bool) {
	text, _ := r.read(path)
	for line := range strings.Lines(text) {
		if k, v, found := strings.Cut(line, ":"); found && strings.TrimSpace(k) == key {
			return strings.TrimSpace(v), true
		}
	}
	return "", false
}

// install is the command that installs Debian packages.
func install(packages ...string) string {
	return "apt-get install -y --no-install-recommends " + strings.Join(packages, " ")
}

// size prints bytes for people.
func size(bytes int64) string {
	if bytes < 1<<30 {
		return fmt.Sprintf("%d MiB", bytes>>20)
	}
	return fmt.Sprintf("%.1f GiB", float64(bytes)/(1<<30))
}
