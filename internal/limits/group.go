package limits

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// Group bounds one machine. A nil Group bounds nothing.
type Group struct {
	root *Root
	id   string
	set  Limits
}

// at is the group of an id, whether it is there or not.
func (r *Root) at(id string) *Group { return &Group{root: r, id: id} }

func (g *Group) dir(c controller) string { return filepath.Join(g.root.dirs[c], g.id) }

func (g *Group) dirs() (dirs []string) {
	for _, d := range g.root.distinct() {
		dirs = append(dirs, filepath.Join(d, g.id))
	}
	return dirs
}

// Make makes the group of a machine with limits. On an error nothing is left of it.
func (r *Root) Make(id string, l Limits) (*Group, error) {
	if err := r.Can(l); err != nil {
		return nil, err
	}
	if r == nil || len(r.dirs) == 0 {
		return nil, nil
	}
	g := r.at(id)
	for _, d := range g.dirs() {
		if err := os.Mkdir(d, 0o755); err != nil {
			return nil, errors.Join(fmt.Errorf("make control group: %w", err), g.Remove())
		}
	}
	if err := g.Set(l); err != nil {
		return nil, errors.Join(err, g.Remove())
	}
	return g, nil
}

// Adopt returns the group of a machine that an earlier daemon started with these limits; nil when it has none.
func (r *Root) Adopt(id string, l Limits) *Group {
	if r == nil || len(r.dirs) == 0 {
		return nil
	}
	g := r.at(id)
	for _, d := range g.dirs() {
		if _, err := os.Stat(d); err != nil {
			return nil
		}
	}
	g.set = l
	return g
}

// Set changes the limits: only what differs is written.
func (g *Group) Set(l Limits) error {
	if g == nil {
		return (*Root)(nil).Can(l)
	}
	if err := g.root.Can(l); err != nil {
		return err
	}
	for _, c := range controllers() {
		if l.wants(c) == g.set.wants(c) {
			continue
		}
		for _, s := range g.root.settings(c, l) {
			err := write(g.dir(c), s.file, s.value)
			if err != nil && s.how != mayFail && !(s.how == mayLack && errors.Is(err, os.ErrNotExist)) {
				what := l.wants(c)
				if what == "" {
					what = "no limit of " + string(c)
				}
				return fmt.Errorf("%s: write %q to %s: %w", what, s.value, s.file, err)
			}
		}
	}
	g.set = l
	return nil
}

// Limits are those that are set.
func (g *Group) Limits() Limits {
	if g == nil {
		return Limits{}
	}
	return g.set
}

// Files are what a process is started in the group with: a directory, which it is cloned into, or files that the thread which starts it writes "0"
// to. The caller closes them.
func (g *Group) Files() (dir *os.File, tasks []*os.File, err error) {
	if g == nil {
		return nil, nil, nil
	}
	if g.root.version == 2 {
		dir, err = os.Open(g.dirs()[0])
		return dir, nil, err
	}
	for _, d := range g.dirs() {
		f, err := os.OpenFile(filepath.Join(d, "tasks"), os.O_WRONLY, 0)
		if err != nil {
			for _, t := range tasks {
				_ = t.Close()
			}
			return nil, nil, fmt.Errorf("control group: %w", err)
		}
		tasks = append(tasks, f)
	}
	return nil, tasks, nil
}

// Events are what limits did.
type Events struct {
	OOMKills int64 // processes that were killed for want of memory
	PIDsHit  int64 // starts of processes or threads that were refused
}

// Events reads them. A group that is gone has none.
func (g *Group) Events() Events {
	if g == nil {
		return Events{}
	}
	events := "memory.events"
	if g.root.version == 1 {
		events = "memory.oom_control"
	}
	return Events{OOMKills: field(read(g.dir(memory), events), "oom_kill"), PIDsHit: field(read(g.dir(pids), "pids.events"), "max")}
}

// field finds "key N" among lines.
func field(text, key string) int64 {
	for line := range strings.Lines(text) {
		if k, v, ok := strings.Cut(strings.TrimSpace(line), " "); ok && k == key {
			n, _ := strconv.ParseInt(v, 10, 64)
			return n
		}
	}
	return 0
}

// MemoryBytes is what is charged to the group now, and has been at most; 0 where that can't be told.
func (g *Group) MemoryBytes() (now, peak int64) {
	if g == nil || g.root.dirs[memory] == "" {
		return 0, 0
	}
	files := [2]string{"memory.current", "memory.peak"}
	if g.root.version == 1 {
		files = [2]string{"memory.usage_in_bytes", "memory.max_usage_in_bytes"}
	}
	now, _ = strconv.ParseInt(read(g.dir(memory), files[0]), 10, 64)
	peak, _ = strconv.ParseInt(read(g.dir(memory), files[1]), 10, 64)
	return now, peak
}

// removeLimit is how long a group may take to notice that its processes are gone.
const removeLimit = 3 * time.Second

// Remove removes the group. Preconditions: its processes have ended.
func (g *Group) Remove() error {
	if g == nil {
		return nil
	}
	var errs []error
	deadline := time.Now().Add(removeLimit)
	for _, d := range g.dirs() {
		err := unix.Rmdir(d)
		for pause := 100 * time.Microsecond; errors.Is(err, unix.EBUSY) && time.Now().Before(deadline); pause *= 2 {
			time.Sleep(pause) // the kernel tells nobody when it is done with a process
			err = unix.Rmdir(d)
		}
		if err != nil && !errors.Is(err, unix.ENOENT) {
			errs = append(errs, fmt.Errorf("remove control group %s: %w", d, err))
		}
	}
	return errors.Join(errs...)
}

// kill ends what is in the group.
func (g *Group) kill() {
	for _, d := range g.dirs() {
		for line := range strings.Lines(read(d, "cgroup.procs")) {
			if pid, err := strconv.Atoi(strings.TrimSpace(line)); err == nil && pid > 1 && pid != os.Getpid() {
				_ = unix.Kill(pid, unix.SIGKILL)
			}
		}
	}
}
