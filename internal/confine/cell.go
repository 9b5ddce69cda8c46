package confine

import (
	"errors"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/forkd/forkd/internal/confine/stage"
)

// Names in a cell.
const (
	workDir   = "/machine" // the directory that Command.Dir is seen as
	procDir   = "/proc"
	devDir    = "/dev"
	stageFile = "/stage/firecracker" // the program that becomes the monitor; a jailer takes it for that, and wants "firecracker" in the name
)

// Spec is what a cell is made of.
type Spec struct {
	Binary  string   // the monitor
	Files   []string // more files and directories it needs, under their own names, each with its libraries; those that are not there are left out
	Devices []string // devices below /dev that it may open; those that are not there are left out
	Jailer  string   // Firecracker's jailer, through which the program is started; it makes /dev/kvm, /dev/net/tun and no other device. "": none, we do all ourselves
}

// Cell is a place that processes can be started in.
type Cell struct {
	binary string
	mounts *os.File // its mount namespace
	libs   string   // where its libraries are
	filter []unix.SockFilter
	users  *Users
	jailer *jailer // nil: none
}

// New makes a cell. Its processes get their user ids from users.
func New(spec Spec, users *Users) (*Cell, error) {
	// The runtime tries a fork when it first starts a process. On a thread whose next child is the first of a pid namespace that would be its last.
	if self, err := os.FindProcess(os.Getpid()); err == nil {
		_ = self.Release()
	}
	// A core of a monitor would be its guest's memory, in the hands of whatever the host has for such files. The limit is inherited.
	if err := unix.Setrlimit(unix.RLIMIT_CORE, &unix.Rlimit{}); err != nil {
		return nil, fmt.Errorf("confine %s: no core dumps: %w", spec.Binary, err)
	}
	// Descriptors that this process was started with may be anything. All that it opens itself are closed for others already.
	if err := unix.CloseRange(3, math.MaxUint32, unix.CLOSE_RANGE_CLOEXEC); err != nil {
		return nil, fmt.Errorf("confine %s: close what it is not given: %w", spec.Binary, err)
	}
	c := &Cell{binary: spec.Binary, users: users}
	var err error
	if spec.Jailer != "" {
		if c.jailer, spec, err = newJailer(spec); err != nil {
			return nil, fmt.Errorf("confine %s: %w", spec.Binary, err)
		}
	}
	contents, libs, err := contentsOf(spec)
	if err != nil {
		return nil, fmt.Errorf("confine %s: %w", spec.Binary, err)
	}
	c.libs = strings.Join(libs, ":")
	if c.filter, err = newFilter(); err != nil {
		return nil, fmt.Errorf("confine %s: seccomp filter: %w", spec.Binary, err)
	}
	err = OnThread(func() error {
		c.mounts, err = c.buildRoot(contents, spec.Devices)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("confine %s: %w%s", spec.Binary, err, advice(err))
	}
	return c, nil
}

// Close gives the cell up. Processes in it go on.
func (c *Cell) Close() error { return c.mounts.Close() }

// advice is what to do about an error, for the end of a message.
func advice(err error) string {
	if errors.Is(err, unix.EPERM) || errors.Is(err, unix.EACCES) {
		return ": the daemon lacks the right to, as in a container; give it CAP_SYS_ADMIN, or run it with --confine off"
	}
	return ""
}

// buildRoot makes the root of a cell and returns the mount namespace that holds it. It is run on a thread of its own.
//
// The root is put together on /proc, because that is there on every host, and in a namespace that nobody else sees.
func (c *Cell) buildRoot(contents, devices []string) (namespace *os.File, err error) {
	const top = procDir
	err = run(
		step{"mount namespace", func() error { return unix.Unshare(unix.CLONE_NEWNS | unix.CLONE_FS) }},
		step{"modes as they are given", func() error { unix.Umask(0); return nil }}, // of this thread only
		step{"mount namespace", func() error {
			namespace, err = os.Open("/proc/thread-self/ns/mnt")
			return err
		}},
		step{"keep mounts to ourselves", func() error { return unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, "") }},
		step{"mount its root", func() error {
			return unix.Mount("forkd", top, "tmpfs", unix.MS_NOSUID|unix.MS_NODEV, "mode=755,size=4m")
		}},
		step{"fill its root", func() error { return bindAll(top, contents) }},
		step{"make its directories", func() error {
			return errors.Join(os.Mkdir(top+workDir, 0o755), os.Mkdir(top+procDir, 0o755), os.Mkdir(top+devDir, 0o755))
		}},
		step{"fill its root", func() error { return putStage(top + stageFile) }},
		step{"fill its root", func() error {
			if c.jailer == nil {
				return nil
			}
			return c.jailer.fill(top)
		}},
		step{"make its root read-only", func() error {
			attr := unix.MountAttr{Attr_set: unix.MOUNT_ATTR_RDONLY | unix.MOUNT_ATTR_NOSUID | unix.MOUNT_ATTR_NODEV}
			return unix.MountSetattr(unix.AT_FDCWD, top, unix.AT_RECURSIVE, &attr)
		}},
		step{"make its devices", func() error { return makeDevices(top+devDir, devices) }},
		step{"go there", func() error { return unix.Chdir(top) }},
		step{"make it the root", func() error { return unix.PivotRoot(".", ".") }},
		step{"let go of the host's root", func() error { return unix.Unmount(".", unix.MNT_DETACH) }},
	)
	if err != nil && namespace != nil {
		err = errors.Join(err, namespace.Close())
	}
	return namespace, err
}

// putStage writes the program that becomes the monitor.
func putStage(at string) error {
	if err := os.Mkdir(filepath.Dir(at), 0o755); err != nil {
		return err
	}
	return os.WriteFile(at, stage.Program(), 0o755)
}

// bindAll shows files and directories of the host below top, under their own names.
func bindAll(top string, paths []string) error {
	for _, path := range paths {
		fi, err := os.Stat(path)
		if err != nil {
			return err
		}
		at := top + path
		if err := os.MkdirAll(filepath.Dir(at), 0o755); err != nil {
			return err
		}
		if fi.IsDir() {
			err = os.MkdirAll(at, 0o755)
		} else {
			err = os.WriteFile(at, nil, 0o444)
		}
		if err == nil {
			err = unix.Mount(path, at, "", unix.MS_BIND, "")
		}
		if err != nil {
			return fmt.Errorf("%s: %w", path, err)
		}
	}
	return nil
}

// makeDevices mounts a directory with devices of its own: their modes on the host say who may use them there.
func makeDevices(dir string, devices []string) error {
	if err := unix.Mount("forkd", dir, "tmpfs", unix.MS_NOSUID|unix.MS_NOEXEC, "mode=755,size=64k"); err != nil {
		return err
	}
	for _, path := range append([]string{"/dev/null", "/dev/urandom"}, devices...) {
		var st unix.Stat_t
		if err := unix.Stat(path, &st); errors.Is(err, unix.ENOENT) {
			continue
		} else if err != nil {
			return fmt.Errorf("%s: %w", path, err)
		}
		at := filepath.Join(dir, strings.TrimPrefix(path, devDir))
		if err := os.MkdirAll(filepath.Dir(at), 0o755); err != nil {
			return err
		}
		if err := unix.Mknod(at, unix.S_IFCHR|0o666, int(st.Rdev)); err != nil {
			return fmt.Errorf("%s: %w", path, err)
		}
	}
	return unix.Mount("", dir, "", unix.MS_REMOUNT|unix.MS_BIND|unix.MS_RDONLY|unix.MS_NOSUID|unix.MS_NOEXEC, "")
}

// contentsOf returns the files and directories of a cell, and the directories of its libraries.
func contentsOf(spec Spec) (contents, libs []string, err error) {
	binary, err := filepath.Abs(spec.Binary)
	if err != nil {
		return nil, nil, err
	}
	contents = []string{binary}
	for i, path := range append([]string{binary}, spec.Files...) {
		fi, err := os.Stat(path)
		if errors.Is(err, os.ErrNotExist) && i > 0 {
			continue
		}
		if err != nil {
			return nil, nil, err
		}
		contents = append(contents, path)
		if fi.IsDir() {
			continue
		}
		needed, err := librariesOf(path)
		if err != nil {
			return nil, nil, err
		}
		contents = append(contents, needed...)
		for _, lib := range needed {
			libs = append(libs, filepath.Dir(lib))
		}
	}
	for _, list := range []*[]string{&contents, &libs} {
		slices.Sort(*list) // a directory comes before what is in it
		*list = slices.Compact(*list)
	}
	return contents, libs, nil
}
