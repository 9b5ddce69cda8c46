package hostcheck

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os/exec"
	"slices"
	"strings"
	"testing"
	"testing/fstest"

	"github.com/forkd/forkd/internal/hostcpu"
)

// goodFiles are what a host that lacks nothing has.
func goodFiles() fstest.MapFS {
	files := fstest.MapFS{}
	for name, text := range map[string]string{
		"proc/cpuinfo":                      "vendor_id : GenuineIntel\nflags : vmx constant_tsc nonstop_tsc\n",
		"proc/meminfo":                      "MemTotal: 16000000 kB\nMemAvailable:    8000000 kB\n",
		"proc/self/status":                  "Name:\tforkd\nCapEff:\t000001ffffffffff\n",
		"proc/sys/kernel/osrelease":         "6.1.0-57-amd64\n",
		"proc/sys/kernel/yama/ptrace_scope": "1\n",
		"proc/sys/vm/overcommit_memory":     "0\n",
		"proc/sys/vm/max_map_count":         "65530\n",
		"sys/fs/cgroup/cgroup.controllers":  "cpuset cpu io memory pids\n",
		"dev/kvm":                           "",
		"dev/userfaultfd":                   "",
	} {
		files[name] = &fstest.MapFile{Data: []byte(text)}
	}
	return files
}

// goodHost is a host on which every check is ok.
func goodHost(files fstest.MapFS) Host {
	return Host{
		Root:     files,
		LookPath: func(p string) (string, error) { return "/usr/bin/" + p, nil },
		Output: func(context.Context, string, ...string) (string, error) {
			return "QEMU emulator version 7.2.22 (Debian 1:7.2+dfsg-7)\n", nil
		},
		OpenRW:   func(string) error { return nil },
		Memfd:    func() error { return nil },
		DiskFree: func(string) (int64, error) { return 100 << 30, nil },
		Files:    func() (uint64, error) { return 1 << 20, nil },
		TSC:      func() (hostcpu.TSC, error) { return hostcpu.TSC{KHz: 2_445_406, Source: "measured"}, nil },
	}
}

var goodOptions = Options{DataDir: "/data", KVM: func(context.Context) error { return nil }}

func TestGoodHost(t *testing.T) {
	checks := Run(t.Context(), goodHost(goodFiles()), goodOptions)
	for _, c := range checks {
		if c.Status != OK || c.Detail == "" || c.Fix != "" {
			t.Errorf("check %+v, want ok with a detail and nothing to fix", c)
		}
	}
	if got := Worst(checks); got != OK {
		t.Errorf("Worst() = %s, want ok", got)
	}
}

func TestChecks(t *testing.T) {
	errTest := errors.New("permission denied")
	missing := func(names ...string) func(*Host) {
		return func(h *Host) {
			h.LookPath = func(p string) (string, error) {
				if slices.Contains(names, p) {
					return "", errTest
				}
				return "/usr/bin/" + p, nil
			}
		}
	}
	says := func(text string, err error) func(*Host) {
		return func(h *Host) {
			h.Output = func(context.Context, string, ...string) (string, error) { return text, err }
		}
	}
	noAccess := func(h *Host) { h.OpenRW = func(string) error { return errTest } }
	tests := []struct {
		name   string
		check  string
		files  map[string]string // "" removes one
		host   func(*Host)
		status Status
		detail string
		fix    string
	}{
		{name: "no QEMU", check: "qemu", host: missing("qemu-system-x86_64"), status: Fail, detail: "not installed", fix: "apt-get install -y --no-install-recommends qemu-system-x86"},
		{name: "QEMU does not start", check: "qemu", host: says("", errTest), status: Fail, detail: "does not run", fix: "qemu-system-x86"},
		{name: "old QEMU", check: "qemu", host: says("QEMU emulator version 6.2.0", nil), status: Warn, detail: "6.2.0 is older than 7.2", fix: "qemu-system-x86"},
		{name: "new QEMU", check: "qemu", host: says("QEMU emulator version 10.0.2 (Debian)", nil), status: OK, detail: "10.0.2"},
		{name: "QEMU without version", check: "qemu", host: says("hello", nil), status: Warn, detail: "version", fix: "qemu-system-x86"},

		{name: "no KVM, Intel", check: "kvm", files: map[string]string{"dev/kvm": ""}, status: Warn, detail: "emulated", fix: "modprobe kvm_intel"},
		{name: "no KVM, AMD", check: "kvm", files: map[string]string{"dev/kvm": "", "proc/cpuinfo": "flags : svm\n"}, status: Warn, detail: "emulated", fix: "modprobe kvm_amd"},
		{name: "no KVM, no virtualisation", check: "kvm", files: map[string]string{"dev/kvm": "", "proc/cpuinfo": "flags : hypervisor\n"}, status: Warn, detail: "offers no virtualisation"},
		{name: "KVM not ours", check: "kvm", host: noAccess, status: Warn, detail: "no access to /dev/kvm (permission denied)", fix: "usermod"},

		{name: "TSC not constant", check: "tsc", files: map[string]string{"proc/cpuinfo": "flags : tsc\n"}, status: Warn, detail: "drift"},
		{name: "TSC unknown", check: "tsc", host: func(h *Host) { h.TSC = func() (hostcpu.TSC, error) { return hostcpu.TSC{}, errTest } }, status: Fail, detail: "permission denied"},
		{name: "TSC, no cpuinfo", check: "tsc", files: map[string]string{"proc/cpuinfo": ""}, status: Warn, detail: "not known"},

		{name: "no sealing", check: "memfd", host: func(h *Host) { h.Memfd = func() error { return errTest } }, status: Fail, detail: "permission denied"},

		{name: "old kernel", check: "userfaultfd", files: map[string]string{"proc/sys/kernel/osrelease": "5.10.0-9-amd64"}, status: Warn, detail: "5.10.0-9-amd64 is older", fix: "linux-image-amd64"},
		{name: "no userfaultfd", check: "userfaultfd", files: map[string]string{"dev/userfaultfd": ""}, status: Warn, detail: "built without"},
		{name: "userfaultfd not ours", check: "userfaultfd", host: noAccess, status: Warn, detail: "no access", fix: "sudo"},

		{name: "no capabilities", check: "ptrace", files: map[string]string{"proc/self/status": "CapEff:\t0000000000000000\n"}, status: Warn, detail: "CAP_SYS_PTRACE and CAP_SYS_ADMIN", fix: "sudo"},
		{name: "one capability", check: "ptrace", files: map[string]string{"proc/self/status": "CapEff:\t0000000000080000\n"}, status: Warn, detail: "without CAP_SYS_ADMIN the", fix: "sudo"},
		{name: "ptrace forbidden", check: "ptrace", files: map[string]string{"proc/sys/kernel/yama/ptrace_scope": "3"}, status: Warn, detail: "forbids", fix: "kernel.yama.ptrace_scope"},
		{name: "no yama", check: "ptrace", files: map[string]string{"proc/sys/kernel/yama/ptrace_scope": ""}, status: OK},
		{name: "no status", check: "ptrace", files: map[string]string{"proc/self/status": ""}, status: Warn, detail: "not known"},

		{name: "live branches", check: "branch", status: OK, detail: "mode live"},
		{name: "branches without userfaultfd", check: "branch", files: map[string]string{"dev/userfaultfd": ""}, status: Warn, detail: "mode diff: a branch copies in its pause what was written last, for want of userfaultfd"},
		{name: "branches without capabilities", check: "branch", files: map[string]string{"proc/self/status": "CapEff:\t0000000000000000\n"}, status: Warn, detail: "for want of ptrace"},

		{name: "not root", check: "root", host: func(h *Host) { h.UID = 1000 }, status: Warn, detail: "not root", fix: "sudo"},

		{name: "no mkfs.erofs", check: "image tools", host: missing("mkfs.erofs"), status: Warn, detail: "without mkfs.erofs", fix: "apt-get install -y --no-install-recommends erofs-utils"},
		{name: "no Debian", check: "image tools", host: missing("apt-get", "apt-cache", "dpkg", "mmdebstrap"), status: Warn, detail: "no apt-get"},

		{name: "cgroup 2 without memory", check: "cgroup", files: map[string]string{"sys/fs/cgroup/cgroup.controllers": "cpu pids"}, status: Warn, detail: "version 2 without memory", fix: "echo '+memory' > /sys/fs/cgroup/cgroup.subtree_control"},
		{name: "cgroup 1", check: "cgroup", files: map[string]string{"sys/fs/cgroup/cgroup.controllers": "", "sys/fs/cgroup/cpu/tasks": "1", "sys/fs/cgroup/memory/tasks": "1", "sys/fs/cgroup/pids/tasks": "1"}, status: OK, detail: "version 1"},
		{name: "cgroup 1 without pids", check: "cgroup", files: map[string]string{"sys/fs/cgroup/cgroup.controllers": "", "sys/fs/cgroup/cpu/tasks": "1", "sys/fs/cgroup/memory/tasks": "1"}, status: Warn, detail: "version 1 without pids", fix: "mount -t cgroup -o pids"},
		{name: "no cgroups", check: "cgroup", files: map[string]string{"sys/fs/cgroup/cgroup.controllers": ""}, status: Warn, detail: "no control groups", fix: "mount -t cgroup2"},

		{name: "little memory", check: "memory", files: map[string]string{"proc/meminfo": "MemAvailable: 600000 kB\n"}, status: Warn, detail: "585 MiB", fix: "forkd kill --all"},
		{name: "no memory", check: "memory", files: map[string]string{"proc/meminfo": "MemAvailable: 100000 kB\n"}, status: Fail, detail: "97 MiB", fix: "forkd kill --all"},
		{name: "memory unknown", check: "memory", files: map[string]string{"proc/meminfo": "x"}, status: Warn, detail: "not known"},

		{name: "strict overcommit", check: "overcommit", files: map[string]string{"proc/sys/vm/overcommit_memory": "2"}, status: Warn, detail: "full memory", fix: "sysctl -w vm.overcommit_memory=0"},
		{name: "generous overcommit", check: "overcommit", files: map[string]string{"proc/sys/vm/overcommit_memory": "1"}, status: OK},

		{name: "little disk", check: "disk", host: func(h *Host) { h.DiskFree = func(string) (int64, error) { return 2 << 30, nil } }, status: Warn, detail: "2.0 GiB free in /data", fix: "forkd cleanup"},
		{name: "no disk", check: "disk", host: func(h *Host) { h.DiskFree = func(string) (int64, error) { return 1 << 20, nil } }, status: Fail, detail: "1 MiB", fix: "forkd cleanup"},
		{name: "disk unknown", check: "disk", host: func(h *Host) { h.DiskFree = func(string) (int64, error) { return 0, errTest } }, status: Warn, detail: "not known"},

		{name: "few files", check: "open files", host: func(h *Host) { h.Files = func() (uint64, error) { return 1024, nil } }, status: Warn, detail: "1024", fix: "ulimit -n 16384"},
		{name: "few maps", check: "memory maps", files: map[string]string{"proc/sys/vm/max_map_count": "1000"}, status: Warn, detail: "1000", fix: "sysctl -w vm.max_map_count=65530"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			files := goodFiles()
			for name, text := range tt.files {
				if files[name] = (&fstest.MapFile{Data: []byte(text)}); text == "" {
					delete(files, name)
				}
			}
			h := goodHost(files)
			if tt.host != nil {
				tt.host(&h)
			}
			checks := Run(t.Context(), h, goodOptions)
			i := slices.IndexFunc(checks, func(c Check) bool { return c.Name == tt.check })
			if i < 0 {
				t.Fatalf("no check %q", tt.check)
			}
			got := checks[i]
			if got.Status != tt.status || !strings.Contains(got.Detail, tt.detail) {
				t.Errorf("%s = %s, %q, want %s about %q", tt.check, got.Status, got.Detail, tt.status, tt.detail)
			}
			if (got.Fix == "") != (tt.fix == "") || !strings.Contains(got.Fix, tt.fix) {
				t.Errorf("%s: fix %q, want %q", tt.check, got.Fix, tt.fix)
			}
			if worst := Worst(checks); worst == OK && tt.status != OK || tt.status == Fail && worst != Fail {
				t.Errorf("Worst() = %s with a check that is %s", worst, tt.status)
			}
		})
	}
}

func TestKVM(t *testing.T) {
	find := func(opt Options) Check {
		checks := Run(t.Context(), goodHost(goodFiles()), opt)
		return checks[slices.IndexFunc(checks, func(c Check) bool { return c.Name == "kvm" })]
	}
	if got := find(Options{}); got.Status != OK || !strings.Contains(got.Detail, "not tried") {
		t.Errorf("without a test guest: %+v", got)
	}
	got := find(Options{KVM: func(context.Context) error { return errors.New("failed to run iretq") }})
	if got.Status != Warn || !strings.Contains(got.Detail, "iretq") || !strings.Contains(got.Detail, "emulated") {
		t.Errorf("a KVM that runs no guest: %+v, want a warning that says why", got)
	}
}

func TestFirecracker(t *testing.T) {
	for _, tt := range []struct {
		name   string
		says   string
		err    error
		status Status
		detail string
	}{
		{"works", "Firecracker 1.16.1", nil, OK, "Firecracker 1.16.1"},
		{"missing", "", fmt.Errorf("firecracker: %w", exec.ErrNotFound), OK, "not installed"},
		{"broken", "", errors.New("KVM can't run a stock kernel"), Warn, "stock kernel: QEMU runs the machines"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			opt := goodOptions
			opt.Firecracker = func(context.Context) (string, error) { return tt.says, tt.err }
			checks := Run(t.Context(), goodHost(goodFiles()), opt)
			got := checks[slices.IndexFunc(checks, func(c Check) bool { return c.Name == "firecracker" })]
			if got.Status != tt.status || !strings.Contains(got.Detail, tt.detail) {
				t.Errorf("got %+v, want %s about %q", got, tt.status, tt.detail)
			}
		})
	}
}

// TestLocal runs the checks on this machine: they must all end and say something.
func TestLocal(t *testing.T) {
	for _, c := range Run(t.Context(), Local(), Options{DataDir: t.TempDir() + "/not/there/yet"}) {
		t.Logf("%-12s %-4s %s | %s", c.Name, c.Status, c.Detail, c.Fix)
		if c.Name == "" || c.Detail == "" || !slices.Contains([]Status{OK, Warn, Fail}, c.Status) {
			t.Errorf("check %+v is incomplete", c)
		}
	}
	if _, err := diskFree("/proc/self/no/such"); err != nil && !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("diskFree() error = %v", err)
	}
}
