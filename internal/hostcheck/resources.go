package hostcheck

import (
	"io/fs"
	"path"
	"slices"
	"strconv"
	"strings"
)

// What a machine should have to spare, at least.
const (
	enoughMemory = 1 << 30
	leastMemory  = 256 << 20
	enoughDisk   = 5 << 30
	leastDisk    = 1 << 30
	enoughFiles  = 16384
	enoughMaps   = 65530 // the kernel's own default
)

func (r *run) root() verdict {
	if r.h.UID != 0 {
		return warn("sudo forkd serve", "not root: images can't be built from packages, and limits and live branches may be missing")
	}
	return ok("running as root")
}

// imageTools are the programs an image build runs, and their packages.
var imageTools = []struct{ program, pkg string }{
	{"mmdebstrap", "mmdebstrap"},
	{"mkfs.erofs", "erofs-utils"},
	{"apt-get", "apt"},
	{"apt-cache", "apt"},
	{"dpkg", "dpkg"},
	{"tar", "tar"},
}

func (r *run) imageTools() verdict {
	var missing, packages []string
	for _, t := range imageTools {
		if _, err := r.h.LookPath(t.program); err != nil {
			missing = append(missing, t.program)
			if !slices.Contains(packages, t.pkg) {
				packages = append(packages, t.pkg)
			}
		}
	}
	switch {
	case len(missing) == 0:
		return ok("mmdebstrap, mkfs.erofs and apt are there")
	case slices.Contains(missing, "apt-get"):
		return warn("", "no apt-get: images can't be built on this system; bring images, or a kernel and a root file system (forkd image import)")
	}
	return warn(install(packages...), "images can't be built without %s", strings.Join(missing, ", "))
}

// wantedControllers limit sandboxes.
var wantedControllers = []string{"cpu", "memory", "pids"}

func (r *run) cgroup() verdict {
	const dir = "sys/fs/cgroup"
	if list, found := r.read(path.Join(dir, "cgroup.controllers")); found {
		have := strings.Fields(list)
		missing := slices.DeleteFunc(slices.Clone(wantedControllers), func(c string) bool { return slices.Contains(have, c) })
		if len(missing) == 0 {
			return ok("version 2 with %s", strings.Join(wantedControllers, ", "))
		}
		return warn("echo '+"+strings.Join(missing, " +")+"' > /"+dir+"/cgroup.subtree_control",
			"version 2 without %s: sandboxes can't be limited by them", strings.Join(missing, ", "))
	}
	var missing []string
	for _, c := range wantedControllers {
		if _, err := fs.Stat(r.h.Root, path.Join(dir, c, "tasks")); err != nil {
			missing = append(missing, c)
		}
	}
	switch len(missing) {
	case 0:
		return ok("version 1 with %s", strings.Join(wantedControllers, ", "))
	case len(wantedControllers):
		return warn("mount -t cgroup2 none /"+dir, "no control groups below /%s: sandboxes can't be limited", dir)
	}
	c := missing[0]
	return warn("mkdir -p /"+dir+"/"+c+" && mount -t cgroup -o "+c+" none /"+dir+"/"+c,
		"version 1 without %s: sandboxes can't be limited by them", strings.Join(missing, ", "))
}

func (r *run) memory() verdict {
	text, _ := r.field("proc/meminfo", "MemAvailable")
	kib, err := strconv.ParseInt(strings.TrimSuffix(text, " kB"), 10, 64)
	if err != nil {
		return warn("", "how much memory is free is not known: %v", err)
	}
	switch free := kib << 10; {
	case free < leastMemory:
		return fail("forkd kill --all", "%s available, which is too little for one guest", size(free))
	case free < enoughMemory:
		return warn("forkd kill --all", "%s available: enough for a few small guests", size(free))
	default:
		return ok("%s available", size(free))
	}
}

func (r *run) overcommit() verdict {
	mode, found := r.read("proc/sys/vm/overcommit_memory")
	switch {
	case !found:
		return warn("", "vm.overcommit_memory can't be read")
	case mode == "2":
		return warn("sysctl -w vm.overcommit_memory=0",
			"vm.overcommit_memory is 2: every sandbox counts with its full memory, though it shares most of it")
	}
	return ok("vm.overcommit_memory is %s", mode)
}

func (r *run) disk() verdict {
	free, err := r.h.DiskFree(r.opt.DataDir)
	if err != nil {
		return warn("", "how much room %s has is not known: %v", r.opt.DataDir, err)
	}
	switch {
	case free < leastDisk:
		return fail("forkd cleanup", "%s free in %s, which is too little for an image and a snapshot", size(free), r.opt.DataDir)
	case free < enoughDisk:
		return warn("forkd cleanup", "%s free in %s: enough for a few images and snapshots", size(free), r.opt.DataDir)
	}
	return ok("%s free in %s", size(free), r.opt.DataDir)
}

func (r *run) openFiles() verdict {
	most, err := r.h.Files()
	if err != nil {
		return warn("", "how many files may be open is not known: %v", err)
	}
	if most < enoughFiles {
		return warn("ulimit -n "+strconv.Itoa(enoughFiles), "a process may have %d files open; a few hundred sandboxes need %d", most, enoughFiles)
	}
	return ok("a process may have %d open", most)
}

func (r *run) memoryMaps() verdict {
	text, _ := r.read("proc/sys/vm/max_map_count")
	n, err := strconv.Atoi(text)
	if err != nil {
		return warn("", "vm.max_map_count can't be read: %v", err)
	}
	if n < enoughMaps {
		return warn("sysctl -w vm.max_map_count="+strconv.Itoa(enoughMaps), "vm.max_map_count is %d; snapshots with many layers need %d", n, enoughMaps)
	}
	return ok("vm.max_map_count is %d", n)
}
