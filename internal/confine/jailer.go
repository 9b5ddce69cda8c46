package confine

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/forkd/forkd/internal/confine/stage"
)

// Names in the cell of a jailer.
const (
	stageFile = "/stage/firecracker" // what the jailer takes for the monitor: it wants "firecracker" in the name
	jailsDir  = "/jails"             // where it makes jails
	jailID    = "forkd"              // the one that it makes in a process's own jailsDir
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

// spawn starts the jailer, which becomes the program. What it is to inherit waits for it in a socket: nobody has to be there when it is fetched.
func (j *jailer) spawn(c *Cell, cmd Command, uid uint32) (*os.Process, error) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, os.NewSyscallError("socketpair", err)
	}
	ours, theirs := os.NewFile(uintptr(fds[0]), "stage"), os.NewFile(uintptr(fds[1]), "stage")
	defer theirs.Close()
	message := stage.Message{Program: c.binary, Dir: "/", Env: c.environment(cmd.Env), Filter: c.filter, Files: cmd.Files[3:], Stdin: cmd.Files[0]}
	if cmd.Dir != "" {
		message.Dir = workDir
	}
	if err := errors.Join(stage.Send(ours, message), ours.Close()); err != nil {
		return nil, err
	}
	sys := &syscall.SysProcAttr{Setsid: true, PidFD: cmd.PidFD, Credential: &syscall.Credential{Groups: []uint32{}}}
	if cmd.Cgroup != nil {
		sys.UseCgroupFD, sys.CgroupFD = true, int(cmd.Cgroup.Fd())
	}
	return os.StartProcess(j.path, j.arguments(cmd.Args, uid), &os.ProcAttr{Dir: "/", Env: c.environment(cmd.Env), Files: []*os.File{theirs, cmd.Files[1], cmd.Files[2]}, Sys: sys})
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
func (j *jailer) fill(top string) error {
	if err := os.Mkdir(top+jailsDir, 0o755); err != nil {
		return err
	}
	if err := os.Mkdir(top+filepath.Dir(stageFile), 0o755); err != nil {
		return err
	}
	if err := os.WriteFile(top+stageFile, stage.Program(), 0o755); err != nil {
		return fmt.Errorf("the program that takes over in jails: %w", err)
	}
	return nil
}
