package vmproc

import (
	"fmt"
	"os"
	"os/exec"
	"syscall"

	"github.com/forkd/forkd/internal/confine"
	"github.com/forkd/forkd/internal/netns"
	"github.com/forkd/forkd/internal/procstat"
	"github.com/forkd/forkd/internal/vmm"
)

// Command is what to start.
type Command struct {
	Name    string // of the monitor, for messages: "QEMU"
	Binary  string
	Dir     string // the machine's run directory
	Args    []string
	Stdin   *os.File      // nil: the null device
	Stdout  *os.File      // nil: the null device
	Files   []*os.File    // its descriptors from 3 on
	Cell    *confine.Cell // what it is confined to, made for Binary; nil: it is not
	WorkDir bool          // confined, it works in Dir and may write there; else it doesn't see it
	Cgroup  *vmm.Cgroup   // the control group to run in; nil: ours
	NetNS   *os.File      // the network namespace to run in; nil: ours, or one of its own in a cell
	Tap     *os.File      // of NetNS, which it opens by its name, and is closed here; nil: none
}

// machineVariable names the machine's directory in the environment of its monitor: that is how a process is found whose start was not recorded.
const machineVariable = "FORKD_MACHINE"

// Start runs a monitor.
func Start(c Command) (*Process, error) {
	p := &Process{name: c.Name, done: make(chan struct{}), pidfd: -1}
	r, w, err := os.Pipe()
	if err != nil {
		return nil, fmt.Errorf("pipe for %s's errors: %w", c.Name, err)
	}
	err = c.start(p, w)
	w.Close()
	if err != nil {
		r.Close()
		return nil, err
	}
	p.ID = vmm.Process{PID: p.child.Pid, Dir: c.Dir, Confinement: string(c.level())}
	// Before it is reaped: until then its number is its own, even if it has ended already.
	born, err := procstat.ReadStat(p.ID.PID)
	p.ID.StartTicks = born.StartTicks
	go p.reap(r)
	if err != nil {
		p.Kill()
		return nil, fmt.Errorf("start time of %s: %w", c.Name, err)
	}
	return p, nil
}

// level is how far the process is confined.
func (c Command) level() confine.Level {
	switch {
	case c.Cell != nil:
		return confine.Full
	case os.Geteuid() != 0:
		return confine.User
	}
	return confine.None
}

// start starts the process, in a cell or as it is.
func (c Command) start(p *Process, stderr *os.File) (err error) {
	null, err := os.OpenFile(os.DevNull, os.O_RDWR, 0)
	if err != nil {
		return err
	}
	defer null.Close()
	files := append([]*os.File{null, null, stderr}, c.Files...)
	if c.Stdin != nil {
		files[0] = c.Stdin
	}
	if c.Stdout != nil {
		files[1] = c.Stdout
	}
	env := []string{"PATH=/usr/sbin:/usr/bin:/sbin:/bin", "LANG=C", machineVariable + "=" + c.Dir}
	if c.Cell == nil {
		p.child, err = c.startOpen(env, files, &p.pidfd)
		return err
	}
	start := confine.Command{Args: c.Args, Env: env, Files: files, NetNS: c.NetNS, PidFD: &p.pidfd}
	if c.Cgroup != nil {
		start.Cgroup, start.Tasks = c.Cgroup.Dir, c.Cgroup.Tasks
	}
	if c.WorkDir {
		start.Dir = c.Dir
	}
	if c.Tap != nil {
		start.Give = func(uid uint32) error { return netns.HandOver(c.Tap, uid) }
	}
	p.users = c.Cell.Users()
	p.child, p.uid, err = c.Cell.Start(start)
	return err
}

// startOpen starts the process without a cell.
func (c Command) startOpen(env []string, files []*os.File, pidfd *int) (*os.Process, error) {
	binary, err := exec.LookPath(c.Binary)
	if err != nil {
		return nil, fmt.Errorf("start %s: %w", c.Binary, err)
	}
	attr := &os.ProcAttr{Dir: c.Dir, Env: env, Files: files, Sys: &syscall.SysProcAttr{Setsid: true, PidFD: pidfd}}
	if c.Tap != nil {
		if err := netns.HandOver(c.Tap, uint32(os.Geteuid())); err != nil {
			return nil, fmt.Errorf("start %s: %w", c.Name, err)
		}
	}
	var child *os.Process
	start := func() (err error) {
		child, err = os.StartProcess(binary, append([]string{c.Binary}, c.Args...), attr)
		return err
	}
	if c.NetNS != nil {
		outside := start
		start = func() error { return netns.Do(c.NetNS, outside) }
	}
	if c.Cgroup != nil {
		start = inCgroup(c.Cgroup, attr, start)
	}
	if err := start(); err != nil {
		return nil, fmt.Errorf("start %s: %w", c.Binary, err)
	}
	return child, nil
}

// inCgroup has start start its process in a control group.
func inCgroup(g *vmm.Cgroup, attr *os.ProcAttr, start func() error) func() error {
	if g.Dir != nil {
		attr.Sys.UseCgroupFD, attr.Sys.CgroupFD = true, int(g.Dir.Fd())
		return start
	}
	return func() error {
		return confine.OnThread(func() error {
			if err := confine.Enter(g.Tasks); err != nil {
				return err
			}
			return start()
		})
	}
}
