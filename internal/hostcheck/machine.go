package hostcheck

import (
	"errors"
	"fmt"
	"io/fs"
	"os/exec"
	"regexp"
	"runtime"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// Versions that forkd was made for.
var (
	oldestQEMU   = [2]int{7, 2}
	oldestKernel = [2]int{6, 1} // the first with /dev/userfaultfd
)

var versionRE = regexp.MustCompile(`(\d+)\.(\d+)[0-9A-Za-z.+~-]*`)

// version finds the first "major.minor…" in a text.
func version(text string) (full string, v [2]int, ok bool) {
	m := versionRE.FindStringSubmatch(text)
	if m == nil {
		return "", v, false
	}
	v[0], _ = strconv.Atoi(m[1]) // digits
	v[1], _ = strconv.Atoi(m[2])
	return m[0], v, true
}

func older(a, b [2]int) bool { return a[0] < b[0] || a[0] == b[0] && a[1] < b[1] }

func (r *run) qemu() verdict {
	const program = "qemu-system-x86_64"
	fix := install("qemu-system-x86")
	path, err := r.h.LookPath(program)
	if err != nil {
		return fail(fix, "%s is not installed", program)
	}
	out, err := r.h.Output(r.ctx, path, "--version")
	if err != nil {
		return fail(fix, "%s does not run: %v", path, err)
	}
	full, v, found := version(out)
	if !found {
		return warn(fix, "%s does not say its version", path)
	}
	if older(v, oldestQEMU) {
		return warn(fix, "QEMU %s is older than %d.%d, which forkd was made for", full, oldestQEMU[0], oldestQEMU[1])
	}
	return ok("QEMU %s (%s)", full, path)
}

func (r *run) kvm() verdict {
	const device = "/dev/kvm"
	if _, err := fs.Stat(r.h.Root, device[1:]); err != nil {
		module := map[bool]string{true: "kvm_intel", false: "kvm_amd"}[r.cpu.Flags["vmx"]]
		if r.cpu.Flags["vmx"] || r.cpu.Flags["svm"] {
			return warn("modprobe "+module, "no %s, though the processor can: guests are emulated, which is slower", device)
		}
		return warn("", "no %s, and the processor offers no virtualisation here: guests are emulated, which is slower", device)
	}
	if err := r.h.OpenRW(device); err != nil {
		return warn("usermod -aG kvm $(id -un)", "no access to %s (%v): guests are emulated, which is slower", device, err)
	}
	if r.opt.KVM == nil {
		return ok("%s can be opened; whether it runs a guest was not tried", device)
	}
	if err := r.opt.KVM(r.ctx); err != nil {
		return warn("", "%s is there, but does not serve: %v: guests are emulated, which is slower", device, err)
	}
	return ok("%s runs a test guest", device)
}

// firecracker is no failure: QEMU runs machines too.
func (r *run) firecracker() verdict {
	if r.opt.Firecracker == nil {
		return ok("not looked for")
	}
	says, err := r.opt.Firecracker(r.ctx)
	switch {
	case errors.Is(err, exec.ErrNotFound) || errors.Is(err, fs.ErrNotExist):
		return ok("not installed: QEMU runs the machines (with Firecracker and KVM forks are faster)")
	case err != nil:
		return warn("", "%v: QEMU runs the machines", err)
	}
	return ok("%s", says)
}

func (r *run) tsc() verdict {
	if runtime.GOARCH != "amd64" {
		return fail("", "forkd runs on amd64, this is %s", runtime.GOARCH)
	}
	tsc, err := r.h.TSC()
	if err != nil {
		return fail("", "%v", err)
	}
	detail := fmt.Sprintf("%d kHz (%s)", tsc.KHz, tsc.Source)
	if r.cpuErr != nil {
		return warn("", "%s; whether it is constant is not known: %v", detail, r.cpuErr)
	}
	if !r.cpu.StableTSC() {
		return warn("", "%s, but not at one rate in all power states: guests' clocks may drift", detail)
	}
	return ok("%s, constant", detail)
}

func (r *run) memfd() verdict {
	if err := r.h.Memfd(); err != nil {
		return fail("", "memory files can't be made and sealed (%v): forkd keeps snapshots in them", err)
	}
	return ok("memory files can be sealed")
}

// withoutLive is what the host lacks when a live branch can't be made.
const withoutLive = "a branch stops its source for longer"

func (r *run) userfaultfd() verdict {
	const device = "/dev/userfaultfd"
	release, _ := r.read("proc/sys/kernel/osrelease")
	_, v, found := version(release)
	if found && older(v, oldestKernel) {
		return warn(install("linux-image-amd64")+" && reboot", "kernel %s is older than %d.%d and has no %s: %s",
			release, oldestKernel[0], oldestKernel[1], device, withoutLive)
	}
	if _, err := fs.Stat(r.h.Root, device[1:]); err != nil {
		return warn("", "kernel %s was built without %s: %s", release, device, withoutLive)
	}
	if err := r.h.OpenRW(device); err != nil {
		return warn("sudo forkd serve", "no access to %s (%v): %s", device, err, withoutLive)
	}
	return ok("%s on kernel %s", device, release)
}

// neededCaps are what a live branch needs, as bits of CapEff in /proc/self/status.
var neededCaps = []struct {
	bit  int
	name string
}{{unix.CAP_SYS_PTRACE, "CAP_SYS_PTRACE"}, {unix.CAP_SYS_ADMIN, "CAP_SYS_ADMIN"}}

func (r *run) ptrace() verdict {
	text, _ := r.field("proc/self/status", "CapEff")
	caps, err := strconv.ParseUint(text, 16, 64)
	if err != nil {
		return warn("", "the capabilities of this process are not known: %v", err)
	}
	var missing []string
	for _, c := range neededCaps {
		if caps&(1<<c.bit) == 0 {
			missing = append(missing, c.name)
		}
	}
	if len(missing) > 0 {
		return warn("sudo forkd serve", "without %s the memory of monitors can't be worked on while they run: %s", strings.Join(missing, " and "), withoutLive)
	}
	if scope, _ := r.read("proc/sys/kernel/yama/ptrace_scope"); scope == "3" {
		return warn("echo kernel.yama.ptrace_scope=2 > /etc/sysctl.d/60-forkd.conf && reboot", "kernel.yama.ptrace_scope is 3, which forbids ptrace: %s", withoutLive)
	}
	return ok("monitors can be traced")
}

// branch names the best mode of a branch that this host allows, and what keeps it from a better one.
func (r *run) branch() verdict {
	for _, needed := range []struct {
		name  string
		check func() verdict
	}{{"userfaultfd", r.userfaultfd}, {"ptrace", r.ptrace}} {
		if v := needed.check(); v.status != OK {
			return warn("", "mode diff: a branch copies in its pause what was written last, for want of %s (see there)", needed.name)
		}
	}
	return ok("mode live: a branch pauses its source for milliseconds, whatever its size")
}
