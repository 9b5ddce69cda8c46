package agent

import (
	"errors"

	"golang.org/x/sys/unix"
)

// Where the parts of the root file system are put together in the initramfs.
const (
	lowerDir  = "/forkd/lower"
	upperDir  = "/forkd/upper"
	mergedDir = "/forkd/root"
)

// mountKernelFS mounts what the boot itself needs.
func mountKernelFS() error {
	for _, m := range []struct{ kind, dir, data string }{
		{"devtmpfs", "/dev", "mode=0755"},
		{"proc", "/proc", ""},
		{"sysfs", "/sys", ""},
		{"tmpfs", "/run", "mode=0755"},
	} {
		if err := mkdirAll(m.dir, 0o755); err != nil {
			return errors.New("can't make " + m.dir + ": " + err.Error())
		}
		err := unix.Mount(m.kind, m.dir, m.kind, unix.MS_NOSUID, m.data)
		if err != nil && err != unix.EBUSY { // a kernel with DEVTMPFS_MOUNT has done it
			return errors.New("can't mount " + m.kind + " on " + m.dir + ": " + err.Error())
		}
	}
	return nil
}

// mountRoot mounts the read-only root and, over it, an overlay whose writes stay in memory: they are part of every snapshot, and forks
// share nothing that can be written.
func mountRoot(device, kind string) error {
	for _, dir := range []string{lowerDir, upperDir, mergedDir} {
		if err := mkdirAll(dir, 0o755); err != nil {
			return errors.New("can't make " + dir + ": " + err.Error())
		}
	}
	if err := unix.Mount(device, lowerDir, kind, unix.MS_RDONLY, ""); err != nil {
		return errors.New("can't mount " + device + " as " + kind + ": " + err.Error())
	}
	// Less than the memory that programs leave, so that one who fills it is told that there is no room, and no program is killed for it.
	if err := unix.Mount("tmpfs", upperDir, "tmpfs", 0, "mode=0755,size=60%,nr_inodes=0"); err != nil {
		return errors.New("can't mount the tmpfs for writes: " + err.Error())
	}
	for _, dir := range []string{upperDir + "/data", upperDir + "/work"} {
		if err := unix.Mkdir(dir, 0o755); err != nil {
			return errors.New("can't make " + dir + ": " + err.Error())
		}
	}
	data := "lowerdir=" + lowerDir + ",upperdir=" + upperDir + "/data,workdir=" + upperDir + "/work"
	if err := unix.Mount("overlay", mergedDir, "overlay", 0, data); err != nil {
		return errors.New("can't mount the overlay: " + err.Error())
	}
	return nil
}

// switchRoot makes the overlay the root of this process and of everything it will start, and gives the initramfs' memory back.
func switchRoot() error {
	old, err := unix.Open("/", unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return errors.New("can't open the initramfs: " + err.Error())
	}
	defer unix.Close(old)
	for _, dir := range []string{"/dev", "/proc", "/sys", "/run"} {
		target := mergedDir + dir
		if err := mkdirAll(target, 0o755); err != nil {
			return errors.New("can't make " + dir + " in the root file system: " + err.Error())
		}
		if err := unix.Mount(dir, target, "", unix.MS_MOVE, ""); err != nil {
			return errors.New("can't move " + dir + " to the root file system: " + err.Error())
		}
	}
	if err := unix.Chdir(mergedDir); err != nil {
		return errors.New("can't enter the root file system: " + err.Error())
	}
	removeTree(old)
	if err := unix.Mount(".", "/", "", unix.MS_MOVE, ""); err != nil {
		return errors.New("can't move the root file system to /: " + err.Error())
	}
	if err := unix.Chroot("."); err != nil {
		return errors.New("can't change the root: " + err.Error())
	}
	return unix.Chdir("/")
}

// removeTree deletes the regular files of the file system that dir is on. This program's own is among them: its pages stay while it runs.
func removeTree(dir int) {
	var st unix.Stat_t
	if unix.Fstat(dir, &st) == nil {
		removeBelow(dir, st.Dev)
	}
}

func removeBelow(dir int, dev uint64) {
	fd, err := unix.Openat(dir, ".", unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return
	}
	defer unix.Close(fd)
	names, _ := dirNames(fd)
	for _, name := range names {
		var st unix.Stat_t
		if unix.Fstatat(fd, name, &st, unix.AT_SYMLINK_NOFOLLOW) != nil || st.Dev != dev {
			continue
		}
		if st.Mode&unix.S_IFMT != unix.S_IFDIR {
			_ = unix.Unlinkat(fd, name, 0)
			continue
		}
		sub, err := unix.Openat(fd, name, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
		if err != nil {
			continue
		}
		removeBelow(sub, dev)
		unix.Close(sub)
	}
}

// problems collects what could not be done; each part is of use without the others.
type problems []string

func (p *problems) try(what string, err error) {
	if err != nil {
		*p = append(*p, "can't "+what+": "+err.Error())
	}
}

// finishRoot gives programs what they expect.
func finishRoot() problems {
	var p problems
	p.mountDevices()
	for _, dir := range []string{"/tmp", "/run/lock"} {
		_ = mkdirAll(dir, 0o777)
		p.try("open "+dir+" for everyone", unix.Chmod(dir, unix.S_ISVTX|0o777))
	}
	if !exists("/etc/hosts") {
		var hosts keptFile
		p.try("write /etc/hosts", hosts.replace("", "/etc/hosts", []byte(defaultHosts)))
		hosts.close()
	}
	name := "forkd"
	if b, err := readFile("/etc/hostname"); err == nil && firstLine(b) != "" {
		name = firstLine(b)
	}
	p.try("set the host name", unix.Sethostname([]byte(name)))
	p.try("bring the loopback device up", loopbackUp())
	// As systemd does: programs that use select keep their limit, others may raise it.
	p.try("raise the limit of open files", unix.Setrlimit(unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: 1024, Max: 524288}))
	unix.Umask(0o022)
	return p
}

// mountDevices mounts what lies below /dev and /sys, and makes the links that shells use.
func (p *problems) mountDevices() {
	mount := func(kind, dir string, flags uintptr, data string) {
		_ = mkdirAll(dir, 0o755)
		p.try("mount "+kind+" on "+dir, unix.Mount(kind, dir, kind, flags, data))
	}
	mount("devpts", "/dev/pts", unix.MS_NOSUID|unix.MS_NOEXEC, "mode=0620,gid=5,ptmxmode=0666")
	mount("tmpfs", "/dev/shm", unix.MS_NOSUID|unix.MS_NODEV, "mode=1777")
	mount("cgroup2", "/sys/fs/cgroup", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, "")
	links := [][2]string{
		{"/dev/fd", "/proc/self/fd"}, {"/dev/stdin", "/proc/self/fd/0"}, {"/dev/stdout", "/proc/self/fd/1"}, {"/dev/stderr", "/proc/self/fd/2"},
	}
	for _, l := range links {
		if err := unix.Symlink(l[1], l[0]); err != unix.EEXIST {
			p.try("link "+l[0], err)
		}
	}
}
