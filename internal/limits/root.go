package limits

import (
	"errors"
	"fmt"
	"hash/fnv"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"
)

// Root is the daemon's group, below which each machine has its own.
type Root struct {
	version int
	name    string
	dirs    map[controller]string // of those controllers that are there; all the same in version 2
	device  string                // "8:0": the disk whose traffic is limited; "" when there is none that can be
	problem error                 // why controllers are missing; nil when none is
}

// Options say what a Root is for.
type Options struct {
	RunDir string // tells it from those of other daemons
	Data   string // a directory on the disk whose traffic can be limited
	Under  string // version 2: the group to make it in; "": the nearest slice, or the daemon's own group
}

// Name is that of the group of the daemon with that run directory.
func Name(runDir string) string {
	h := fnv.New32a()
	_, _ = h.Write([]byte(runDir))
	return fmt.Sprintf("forkd-%08x", h.Sum32())
}

// Open finds the daemon's group, or makes it. That some controllers, or all, can't be had is no error here: Missing tells, and Set fails.
func Open(opt Options) (*Root, error) {
	r := &Root{name: Name(opt.RunDir), dirs: map[controller]string{}, device: diskOf(opt.Data)}
	mounts, err := readMounts()
	if err != nil {
		return nil, fmt.Errorf("control groups: %w", err)
	}
	own, err := ownGroups()
	if err != nil {
		return nil, fmt.Errorf("control groups: %w", err)
	}
	if mounts.v2 != "" && mounts.v2Has(memory) {
		r.version = 2
		r.problem = r.openV2(mounts, own, opt.Under)
	} else {
		r.version = 1
		r.problem = r.openV1(mounts, own)
	}
	if r.device == "" {
		delete(r.dirs, io)
		r.problem = errors.Join(r.problem, fmt.Errorf("%s is on no disk of its own: its traffic can't be limited", opt.Data))
	}
	return r, nil
}

// Where says which version of control groups is used, and below which directory machines have theirs: one of them in version 1; "" for none.
func (r *Root) Where() (version int, dir string) {
	for _, d := range r.distinct() {
		return r.version, d
	}
	return r.version, ""
}

// Missing are the kinds of limits that can't be kept here, and why.
func (r *Root) Missing() (kinds []string, why error) {
	for _, c := range controllers() {
		if r == nil || r.dirs[c] == "" {
			kinds = append(kinds, string(c))
		}
	}
	if r == nil {
		return kinds, ErrUnavailable
	}
	return kinds, r.problem
}

// Can says whether limits can be kept here; its error wraps ErrUnavailable.
func (r *Root) Can(l Limits) error {
	for _, c := range controllers() {
		if what := l.wants(c); what != "" && (r == nil || r.dirs[c] == "") {
			err := fmt.Errorf("%s: the control group controller %q is not there: %w", what, c, ErrUnavailable)
			if r != nil && r.problem != nil {
				err = fmt.Errorf("%w (%w)", err, r.problem)
			}
			return err
		}
	}
	return nil
}

// Default returns those of the limits that can be kept here.
func (r *Root) Default(l Limits) Limits {
	if r.Can(Limits{PIDs: l.PIDs}) != nil {
		l.PIDs = 0
	}
	if r.Can(Limits{CPUs: l.CPUs}) != nil {
		l.CPUs = 0
	}
	if r.Can(Limits{MemoryMiB: l.MemoryMiB}) != nil {
		l.MemoryMiB = 0
	}
	if r.Can(Limits{IOMiBPerS: l.IOMiBPerS}) != nil {
		l.IOMiBPerS = 0
	}
	return l
}

// openV1 makes the group in each hierarchy, below the one that we are in.
func (r *Root) openV1(mounts mounts, own map[string]string) error {
	var errs []error
	for _, c := range controllers() {
		name := string(c)
		if c == io {
			name = "blkio"
		}
		top, ok := mounts.v1[name]
		if !ok {
			errs = append(errs, fmt.Errorf("no hierarchy with %s is mounted", name))
			continue
		}
		dir := filepath.Join(top.below(own[name]), r.name)
		if err := mkdir(dir); err != nil {
			errs = append(errs, err)
			continue
		}
		r.dirs[c] = dir
	}
	return errors.Join(errs...)
}

// distinct are the directories of the group, each once.
func (r *Root) distinct() (dirs []string) {
	for _, c := range controllers() {
		if d := r.dirs[c]; d != "" && (r.version == 1 || len(dirs) == 0) {
			dirs = append(dirs, d)
		}
	}
	return dirs
}

// Close removes the group when no machine has one in it any more.
func (r *Root) Close() error {
	if r == nil {
		return nil
	}
	var errs []error
	for _, d := range r.distinct() {
		if err := unix.Rmdir(d); err != nil && !errors.Is(err, unix.EBUSY) && !errors.Is(err, unix.ENOTEMPTY) && !errors.Is(err, unix.ENOENT) {
			errs = append(errs, fmt.Errorf("remove group %s: %w", d, err))
		}
	}
	return errors.Join(errs...)
}

// Sweep ends what is left in groups that nobody keeps, and removes them.
func (r *Root) Sweep(keep func(id string) bool) error {
	if r == nil {
		return nil
	}
	ids := map[string]bool{}
	for _, d := range r.distinct() {
		entries, err := os.ReadDir(d)
		if err != nil {
			return fmt.Errorf("look for leftover groups: %w", err)
		}
		for _, e := range entries {
			if e.IsDir() && !keep(e.Name()) {
				ids[e.Name()] = true
			}
		}
	}
	var errs []error
	for id := range ids {
		g := r.at(id)
		g.kill()
		errs = append(errs, g.Remove())
	}
	return errors.Join(errs...)
}

func mkdir(dir string) error {
	if err := os.Mkdir(dir, 0o755); err != nil && !errors.Is(err, os.ErrExist) {
		return err
	}
	return nil
}

func write(dir, file, value string) error {
	f, err := os.OpenFile(filepath.Join(dir, file), os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	_, err = f.WriteString(value)
	return errors.Join(err, f.Close())
}

func read(dir, file string) string {
	b, _ := os.ReadFile(filepath.Join(dir, file))
	return strings.TrimSpace(string(b))
}

// diskOf is the disk that a directory is on, as "major:minor"; "" when it is on none, or on several.
func diskOf(dir string) string {
	var st unix.Stat_t
	if dir == "" || unix.Stat(dir, &st) != nil || unix.Major(st.Dev) == 0 {
		return ""
	}
	device := fmt.Sprintf("%d:%d", unix.Major(st.Dev), unix.Minor(st.Dev))
	sys := "/sys/dev/block/" + device
	if _, err := os.Stat(sys + "/partition"); err != nil {
		return device
	}
	return read(sys+"/..", "dev") // traffic is limited for whole disks
}
