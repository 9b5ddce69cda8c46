package hostcheck

import (
	"strings"
)

// confinement says what monitors will be locked into: the daemon's own words, which are tried.
func (r *run) confinement() verdict {
	if r.opt.Confinement == nil {
		return ok("not looked at")
	}
	level, problem := r.opt.Confinement()
	switch {
	case problem != nil:
		return fail("forkd serve --confine off", "monitors can't be confined, so none is started: %v", problem)
	case level == "full":
		return ok("full: each monitor has a user id, namespaces, a read-only root and a seccomp filter of its own, and no capabilities")
	case level == "none":
		return warn("forkd serve --confine require", "none: monitors run as root, and a guest that breaks out of one has the host")
	}
	return warn("sudo forkd serve", "%s: monitors run as the daemon's user and can do what that can; only a daemon that is root confines them", level)
}

// limits says where the control groups are made that keep sandboxes to their limits, and which limits that can't be.
func (r *run) limits() verdict {
	if r.opt.Limits == nil {
		return r.cgroup()
	}
	l, err := r.opt.Limits()
	if err != nil {
		return warn("", "control groups can't be looked at: %v", err)
	}
	if len(l.Missing) == 0 {
		return ok("version %d, in %s: memory, processor, processes and disk can be limited", l.Version, l.Dir)
	}
	fix := r.cgroup().fix
	if l.Version == 2 && fix == "" {
		fix = "systemd-run --scope -p Delegate=yes forkd serve"
	}
	missing := strings.Join(l.Missing, ", ")
	if l.Dir == "" {
		return warn(fix, "no control group can be made here (%v): a request that asks for a limit is refused", l.Why)
	}
	if missing == "io" {
		return warn("", "version %d, in %s: all but the disk can be limited (%v)", l.Version, l.Dir, l.Why)
	}
	return warn(fix, "version %d, in %s: without %s (%v); a request that asks for such a limit is refused", l.Version, l.Dir, missing, l.Why)
}
