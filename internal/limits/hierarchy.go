package limits

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sys/unix"
)

// mount is where a hierarchy is mounted, and which of its groups is there.
type mount struct{ dir, root string }

// below is the directory of a group.
func (m mount) below(group string) string {
	if rel, err := filepath.Rel(m.root, group); err == nil && rel != ".." && !strings.HasPrefix(rel, "../") {
		return filepath.Join(m.dir, rel)
	}
	return m.dir // of a container that sees its own group only
}

// mounts are the hierarchies that are mounted.
type mounts struct {
	v1     map[string]mount // by controller
	v2     string           // directory; "" for none
	v2Root string
}

func (m mounts) v2Has(c controller) bool {
	return slices.Contains(strings.Fields(read(m.v2, "cgroup.controllers")), string(c))
}

// readMounts reads /proc/self/mountinfo (proc(5)): "36 35 0:31 /root /dir options shared:1 - type source options".
func readMounts() (mounts, error) {
	b, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return mounts{}, err
	}
	m := mounts{v1: map[string]mount{}}
	for line := range strings.Lines(string(b)) {
		before, after, _ := strings.Cut(line, " - ")
		f, s := strings.Fields(before), strings.Fields(after)
		if len(f) < 5 || len(s) < 3 {
			continue
		}
		switch s[0] {
		case "cgroup":
			for name := range strings.SplitSeq(s[2], ",") {
				m.v1[name] = mount{dir: f[4], root: f[3]}
			}
		case "cgroup2":
			m.v2, m.v2Root = f[4], f[3]
		}
	}
	return m, nil
}

// ownGroups reads /proc/self/cgroup: "4:memory:/path" for each hierarchy; "0::/path" for version 2, whose name here is "".
func ownGroups() (map[string]string, error) {
	b, err := os.ReadFile("/proc/self/cgroup")
	if err != nil {
		return nil, err
	}
	own := map[string]string{}
	for line := range strings.Lines(string(b)) {
		f := strings.SplitN(strings.TrimSpace(line), ":", 3)
		if len(f) != 3 {
			continue
		}
		for name := range strings.SplitSeq(f[1], ",") {
			own[name] = f[2]
		}
	}
	return own, nil
}

// daemonLeaf is where the daemon goes when its own group has to be one without processes.
const daemonLeaf = "forkd-daemon"

// openV2 makes the group in the nearest slice that we are in, or the top. There systemd leaves it alone, and machines outlive the service: a
// service can't be started again in a group that has groups with limits of its own. Where that is not ours to do, it is made in our own
// group, which the daemon leaves for a leaf, as the rules of version 2 want it.
func (r *Root) openV2(m mounts, own map[string]string, under string) error {
	group := filepath.Clean("/" + own[""])
	if filepath.Base(group) == daemonLeaf {
		group = filepath.Dir(group)
	}
	slice := group
	for slice != "/" && !strings.HasSuffix(slice, ".slice") {
		slice = filepath.Dir(slice)
	}
	candidates := []string{slice, group}
	if under != "" {
		candidates = []string{under}
	}
	top := mount{dir: m.v2, root: m.v2Root}
	var errs []error
	for _, c := range slices.Compact(candidates) {
		err := r.makeV2(m.v2, top.below(c))
		if err == nil {
			return nil
		}
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

// makeV2 makes the group in base with all controllers that can be had.
func (r *Root) makeV2(top, base string) error {
	rel, err := filepath.Rel(top, base)
	if err != nil {
		return err
	}
	dir := top
	enable(dir)
	for part := range strings.SplitSeq(rel, "/") {
		if part != "." {
			dir = filepath.Join(dir, part)
			enable(dir)
		}
	}
	if !enabled(base, memory, pids, cpu) && movable(base) {
		leaf := filepath.Join(base, daemonLeaf)
		if err := errors.Join(mkdir(leaf), write(leaf, "cgroup.procs", fmt.Sprint(os.Getpid()))); err != nil {
			return fmt.Errorf("move the daemon to a group of its own: %w", err)
		}
		enable(base)
	}
	dir = filepath.Join(base, r.name)
	if err := mkdir(dir); err != nil {
		return err
	}
	enable(dir)
	var missing []string
	for _, c := range controllers() {
		if enabled(dir, c) {
			r.dirs[c] = dir
		} else {
			missing = append(missing, string(c))
		}
	}
	if len(missing) > 0 {
		err := fmt.Errorf("%s: no %s there", dir, strings.Join(missing, ", "))
		if len(missing) == len(controllers()) {
			return errors.Join(err, unix.Rmdir(dir))
		}
		r.problem = err
	}
	return nil
}

// enable gives the groups in dir all controllers that can be had. What can't be is found out by who looks afterwards.
func enable(dir string) {
	for _, c := range controllers() {
		_ = write(dir, "cgroup.subtree_control", "+"+string(c))
	}
}

// enabled says whether groups in dir have the controllers.
func enabled(dir string, cs ...controller) bool {
	there := strings.Fields(read(dir, "cgroup.subtree_control"))
	return !slices.ContainsFunc(cs, func(c controller) bool { return !slices.Contains(there, string(c)) })
}

// movable says whether we are the only process in a group.
func movable(dir string) bool { return read(dir, "cgroup.procs") == fmt.Sprint(os.Getpid()) }
