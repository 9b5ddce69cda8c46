package agent

import (
	"errors"
	"path/filepath"

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
	if err := unix.Mount("tmpfs", upperDir, "tmpfs", 0, "mode=0755,size=75%,nr_inodes=0"); err != nil {
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

// finishRoot gives programs what they expect. Each part is of use without the others, so problems are only reported.
func finishRoot() []string {
	var problems []string
	try := func(what string, err error) {
		if err != nil {
			problems = append(problems, "can't "+what+": "+err.Error())
		}
	}
	mount := func(kind, dir string, flags uintptr, data string) {
		_ = mkdirAll(dir, 0o755)
		err := unix.Mount(kind, dir, kind, flags, data)
		try("mount "+kind+" on "+dir, err)
	}
	const quiet = unix.MS_NOSUID | unix.MS_NODEV | unix.MS_NOEXEC
	mount("devpts", "/dev/pts", unix.MS_NOSUID|unix.MS_NOEXEC, "mode=0620,gid=5,ptmxmode=0666")
	mount("tmpfs", "/dev/shm", unix.MS_NOSUID|unix.MS_NODEV, "mode=1777")
	mount("cgroup2", "/sys/fs/cgroup", quiet, "")
	for link, target := range map[string]string{
		"/dev/fd": "/proc/self/fd", "/dev/stdin": "/proc/self/fd/0", "/dev/stdout": "/proc/self/fd/1", "/dev/stderr": "/proc/self/fd/2",
	} {
		if !exists(filepath.Dir(target)) || unix.Symlink(target, link) == nil {
			continue
		}
		var st unix.Stat_t
		try("link "+link, unix.Lstat(link, &st))
	}
	for _, dir := range []string{"/tmp", "/run/lock"} {
		_ = mkdirAll(dir, 0o777)
		try("open "+dir+" for everyone", unix.Chmod(dir, unix.S_ISVTX|0o777))
	}
	if !exists("/etc/hosts") {
		files := identityFiles{}
		try("write /etc/hosts", files.hosts.replace("", "/etc/hosts", []byte(defaultHosts)))
		files.close()
	}
	if name, err := readFile("/etc/hostname"); err == nil && firstLine(name) != "" {
		try("set the host name", unix.Sethostname([]byte(firstLine(name))))
	} else {
		try("set the host name", unix.Sethostname([]byte("forkd")))
	}
	try("bring the loopback device up", loopbackUp())
	// As systemd does: programs that use select keep their limit, others may raise it.
	try("raise the limit of open files", unix.Setrlimit(unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: 1024, Max: 524288}))
	unix.Umask(0o022)
	return problems
}
