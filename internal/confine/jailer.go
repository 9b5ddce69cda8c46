package confine

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"

	"golang.org/x/sys/unix"
)

// Names in the cell of a jailer.
const (
	jailsDir = "/jails" // where it makes jails
	jailID   = "forkd"  // the one that it makes in a process's own jailsDir
)

// jailRoot is where the jailer makes the root of a jail.
var jailRoot = filepath.Join(jailsDir, filepath.Base(stageFile), jailID, "root")

// jailSize is what a jail's own files may take: a monitor could fill it.
const jailSize = "1m"

// jailerCapabilities are those that Firecracker's jailer makes use of. What it starts has none, since it has another user id.
var jailerCapabilities = []uintptr{unix.CAP_CHOWN, unix.CAP_DAC_OVERRIDE, unix.CAP_FOWNER, unix.CAP_FSETID, unix.CAP_MKNOD, unix.CAP_SETGID, unix.CAP_SETUID,
	unix.CAP_SYS_ADMIN, unix.CAP_SYS_CHROOT, unix.CAP_SYS_RESOURCE}

// jailer is what a cell is started through.
type jailer struct {
	path   string
	inside []string // the monitor and what it needs: what a jail shows of the cell
}

// makeJail makes the jail's place, and what the jailer does not put there, where only the process and its children see it: on a file system that
// ends with them. The jailer finds the jail there and completes it.
func (j *jailer) makeJail(dir int, proc step) []step {
	steps := []step{
		{"place of its jail", func() error {
			return unix.Mount("forkd", jailsDir, "tmpfs", unix.MS_NOSUID, "mode=755,size="+jailSize)
		}},
		{"place of its jail", func() error { return os.MkdirAll(jailRoot+procDir, 0o755) }},
		proc,
		{"what its jail shows", func() error { return bindAll(jailRoot, j.inside) }},
	}
	if dir >= 0 {
		steps = append(steps, step{"its directory", func() error { return os.Mkdir(jailRoot+workDir, 0o755) }}, showDir(dir, jailRoot+workDir))
	}
	return steps
}

// arguments are the jailer's, for a monitor with arguments of its own.
func (j *jailer) arguments(args []string, uid uint32) []string {
	id := strconv.FormatUint(uint64(uid), 10)
	return append([]string{j.path, "--id", jailID, "--exec-file", stageFile, "--uid", id, "--gid", id, "--chroot-base-dir", jailsDir, "--"}, args...)
}

// newJailer completes a spec, and says what the jails are to show. Preconditions: spec.Jailer is not empty.
func newJailer(spec Spec) (_ *jailer, _ Spec, err error) {
	j := &jailer{}
	if j.path, err = filepath.Abs(spec.Jailer); err != nil {
		return nil, spec, err
	}
	if _, err := os.Stat(j.path); err != nil {
		return nil, spec, fmt.Errorf("the jailer: %w", err)
	}
	if j.inside, _, err = contentsOf(spec); err != nil {
		return nil, spec, err
	}
	spec.Files = append(slices.Clone(spec.Files), j.path)
	return j, spec, nil
}

// fill puts the jailer's own things into the root of its cell, which is at top.
func (j *jailer) fill(top string) error { return os.Mkdir(top+jailsDir, 0o755) }
