package confine

import (
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/forkd/forkd/internal/confine/stage"
)

// Command is what to start.
type Command struct {
	Args   []string // without the program's name
	Env    []string
	Files  []*os.File             // its descriptors from 0 on
	Dir    string                 // the one directory of the host that it may write to, its working directory; "": none, it works in /
	NetNS  *os.File               // its network namespace; nil: one of its own, with nothing in it
	Give   func(uid uint32) error // makes what it will open by name its user's; nil: nothing is
	Tasks  []*os.File             // of control groups of version 1 that it is to be in
	Cgroup *os.File               // directory of the control group of version 2 that it is to be in; nil: the daemon's
	PidFD  *int
}

// hostName is what a process in a cell takes for the host's name.
const hostName = "machine"

// Start starts the cell's program, and returns it with the user id that it has, which is to be released when it has ended.
func (c *Cell) Start(cmd Command) (_ *os.Process, _ uint32, err error) {
	uid, err := c.users.take()
	if err != nil {
		return nil, 0, fmt.Errorf("confine %s: %w", c.binary, err)
	}
	defer func() {
		if err != nil {
			c.users.Release(uid)
		}
	}()
	dir := -1
	if cmd.Dir != "" {
		if dir, err = unix.OpenTree(unix.AT_FDCWD, cmd.Dir, unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC); err != nil {
			return nil, 0, fmt.Errorf("confine %s: its directory: %w", c.binary, err)
		}
		defer unix.Close(dir)
		if err := os.Chown(cmd.Dir, int(uid), int(uid)); err != nil {
			return nil, 0, fmt.Errorf("confine %s: its directory: %w", c.binary, err)
		}
	}
	for _, f := range cmd.Files {
		if err := own(f, uid); err != nil {
			return nil, 0, fmt.Errorf("confine %s: what it inherits: %w", c.binary, err)
		}
	}
	if cmd.Give != nil {
		if err := cmd.Give(uid); err != nil {
			return nil, 0, fmt.Errorf("confine %s: %w", c.binary, err)
		}
	}
	var p *os.Process
	err = OnThread(func() (err error) {
		if err = c.enter(cmd, dir); err == nil {
			p, err = c.spawn(cmd, uid)
		}
		return err
	})
	if err == nil {
		err = settle(p)
	}
	if err != nil {
		return nil, 0, fmt.Errorf("start %s in its confinement: %w%s", c.binary, err, advice(err))
	}
	return p, uid, nil
}

// Users is what the cell's user ids are released to.
func (c *Cell) Users() *Users { return c.users }

// tryLimit is how long a program that only says something of itself may take.
const tryLimit = 20 * time.Second

// Try runs the cell's program with arguments that make it end at once, as --version does. It fails when the program lacks something in the cell.
func (c *Cell) Try(args ...string) error {
	null, err := os.OpenFile(os.DevNull, os.O_RDWR, 0)
	if err != nil {
		return err
	}
	defer null.Close()
	r, w, err := os.Pipe()
	if err != nil {
		return err
	}
	defer r.Close()
	p, uid, err := c.Start(Command{Args: args, Files: []*os.File{null, w, w}})
	w.Close()
	if err != nil {
		return err
	}
	defer c.users.Release(uid)
	late := time.AfterFunc(tryLimit, func() { _ = p.Kill() })
	defer late.Stop()
	said, _ := io.ReadAll(io.LimitReader(r, 4<<10))
	state, err := p.Wait()
	if err == nil && !state.Success() {
		err = fmt.Errorf("%s: %s", state, strings.TrimSpace(string(said)))
	}
	if err != nil {
		return fmt.Errorf("%s does not work in its confinement: %w", c.binary, err)
	}
	return nil
}

// enter brings this thread to where the process is to be. After it the thread is good for nothing but starting that process.
func (c *Cell) enter(cmd Command, dir int) error {
	const own = unix.CLONE_NEWNS | unix.CLONE_NEWPID | unix.CLONE_NEWIPC | unix.CLONE_NEWUTS
	steps := []step{
		{"control group", func() error { return Enter(cmd.Tasks) }},
		{"leave the daemon's directory", func() error { return unix.Unshare(unix.CLONE_FS) }},
		{"modes as they are given", func() error { unix.Umask(0o022); return nil }}, // of this thread and what it starts
		{"network namespace", func() error {
			if cmd.NetNS == nil {
				return unix.Unshare(unix.CLONE_NEWNET)
			}
			return unix.Setns(int(cmd.NetNS.Fd()), unix.CLONE_NEWNET)
		}},
		{"mount namespace", func() error { return unix.Setns(int(c.mounts.Fd()), unix.CLONE_NEWNS) }},
		{"namespaces of its own", func() error { return unix.Unshare(own) }},
		{"its name", func() error { return unix.Sethostname([]byte(hostName)) }},
	}
	var capabilities []uintptr
	if c.jailer != nil {
		steps = append(steps, c.jailer.makeJail(dir, showProc(jailRoot+procDir))...)
		capabilities = jailerCapabilities
	} else {
		steps = append(steps, showProc(procDir))
		if dir >= 0 {
			steps = append(steps, showDir(dir, workDir))
		}
	}
	steps = append(steps,
		step{"drop capabilities", func() error { return dropBounding(capabilities) }},
		step{"no new privileges", func() error { return unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) }})
	return run(steps...)
}

// showProc mounts a proc file system. It is one of our pid namespace, in which the process sees itself: hidepid leaves it nothing else, since no
// other has its user id.
func showProc(at string) step {
	return step{"proc", func() error {
		return unix.Mount("forkd", at, "proc", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, "subset=pid,hidepid=ptraceable")
	}}
}

// showDir mounts the process's directory, an open mount.
func showDir(dir int, at string) step {
	return step{"its directory", func() error {
		if err := unix.MoveMount(dir, "", unix.AT_FDCWD, at, unix.MOVE_MOUNT_F_EMPTY_PATH); err != nil {
			return err
		}
		attr := unix.MountAttr{Attr_set: unix.MOUNT_ATTR_NOSUID | unix.MOUNT_ATTR_NODEV | unix.MOUNT_ATTR_NOEXEC}
		return unix.MountSetattr(unix.AT_FDCWD, at, 0, &attr)
	}}
}

// Enter brings this thread, and what it starts, into control groups of version 1, whose "tasks" files are given.
func Enter(tasks []*os.File) error {
	for _, f := range tasks {
		if _, err := f.WriteString("0"); err != nil {
			return fmt.Errorf("enter %s: %w", f.Name(), err)
		}
	}
	return nil
}

// dropBounding takes from what this thread starts the capabilities that a program could bring with it, but for some. Those of the thread go with its
// user id.
func dropBounding(but []uintptr) error {
	for c := range uintptr(unix.CAP_LAST_CAP + 1) {
		if slices.Contains(but, c) {
			continue
		}
		err := unix.Prctl(unix.PR_CAPBSET_DROP, c, 0, 0, 0)
		if errors.Is(err, unix.EINVAL) { // an older kernel has fewer
			return nil
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// spawn starts the stage, or the jailer, which starts the stage; that becomes the program. It is there because the filter denies what we start processes
// with ourselves, clone3: it puts a process into its control group at once. What the program is to inherit waits for the stage in a socket, so nobody
// has to be there when it is fetched.
func (c *Cell) spawn(cmd Command, uid uint32) (*os.Process, error) {
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
	path, args, who := stageFile, append([]string{c.binary}, cmd.Args...), syscall.Credential{Uid: uid, Gid: uid, Groups: []uint32{}}
	if c.jailer != nil { // it takes on the user id itself
		path, args, who = c.jailer.path, c.jailer.arguments(cmd.Args, uid), syscall.Credential{Groups: []uint32{}}
	}
	sys := &syscall.SysProcAttr{Setsid: true, PidFD: cmd.PidFD, Credential: &who}
	if cmd.Cgroup != nil {
		sys.UseCgroupFD, sys.CgroupFD = true, int(cmd.Cgroup.Fd())
	}
	return os.StartProcess(path, args, &os.ProcAttr{Dir: "/", Env: message.Env, Files: []*os.File{theirs, cmd.Files[1], cmd.Files[2]}, Sys: sys})
}

// environment is the program's: its libraries may be where its loader does not look.
func (c *Cell) environment(env []string) []string {
	if c.libs == "" {
		return env
	}
	return append(env[:len(env):len(env)], "LD_LIBRARY_PATH="+c.libs)
}

// oomScore makes the kernel choose a machine rather than the daemon or another program when the host is out of memory.
const oomScore = "500"

// settle sets what can only be set from outside. It ends a process that it can't be set for.
func settle(p *os.Process) error {
	err := os.WriteFile(fmt.Sprintf("/proc/%d/oom_score_adj", p.Pid), []byte(oomScore), 0)
	if err == nil || hasEnded(p.Pid) { // who waits for it says why
		return nil
	}
	_ = p.Kill()
	_, _ = p.Wait()
	return fmt.Errorf("its order in a lack of memory: %w", err)
}

// hasEnded says whether a child has ended and was not waited for.
func hasEnded(pid int) bool {
	var info unix.Siginfo
	for range 2 {
		err := unix.Waitid(unix.P_PID, pid, &info, unix.WEXITED|unix.WNOHANG|unix.WNOWAIT, nil)
		if !errors.Is(err, unix.EINTR) {
			break
		}
		time.Sleep(time.Millisecond)
	}
	return info.Signo != 0
}
