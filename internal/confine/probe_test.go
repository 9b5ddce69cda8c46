package confine

import (
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// questions are what a probe tries beside what it always tries.
type questions struct {
	PIDs    []int    // of the host: signal, trace, read them
	Paths   []string // of the host: read and write them
	Sockets []string // of Unix sockets, "@…" for abstract ones: connect to them
	TCP     []string // addresses to connect to
	Taps    []string // by name: open them
}

// answers are what a probe could do. What it could not is in Refused, with the reason.
type answers struct {
	UID, GID   int
	Groups     []int
	Status     map[string]string // of /proc/self/status
	PID        int
	Host       string
	Files      []string // all of its root but what is below /proc
	Processes  []string // in /proc
	Proc       []string // of /proc, beside processes
	Inherited  []string // its descriptors
	Interfaces []string
	Did        []string          // what it should not have been able to do
	Refused    map[string]string // what it tried and why that failed
}

func (a *answers) try(what string, err error) {
	if err == nil {
		a.Did = append(a.Did, what)
		return
	}
	a.Refused[what] = err.Error()
}

// answer looks around and tries everything.
func (q questions) answer() answers {
	a := answers{UID: os.Getuid(), GID: os.Getgid(), PID: os.Getpid(), Status: map[string]string{}, Refused: map[string]string{}}
	a.Groups, _ = os.Getgroups()
	a.Host, _ = os.Hostname()
	a.look()
	for _, path := range q.Paths {
		_, err := os.ReadFile(path)
		a.try("read "+path, err)
		_, err = os.OpenFile(path, os.O_WRONLY, 0)
		a.try("write "+path, err)
	}
	for _, dir := range a.writable() {
		a.Did = append(a.Did, "make a file in "+dir)
	}
	for _, pid := range append([]int{0, -1}, q.PIDs...) {
		a.processes(pid)
	}
	for _, path := range q.Sockets {
		a.try("connect to "+path, connectUnix(path))
	}
	for _, address := range q.TCP {
		conn, err := net.DialTimeout("tcp", address, time.Second)
		if err == nil {
			conn.Close()
		}
		a.try("connect to "+address, err)
	}
	for _, name := range append(q.Taps, "new%d") {
		a.try("open the tap "+name, openTap(name, 0))
		a.try("open the tap "+name+" as one of many queues", openTap(name, unix.IFF_MULTI_QUEUE))
	}
	a.kernel()
	a.try("run a program", exec.Command("/bin/sh", "-c", "true").Run())
	return a
}

func (a *answers) look() {
	status, _ := os.ReadFile("/proc/self/status")
	for line := range strings.Lines(string(status)) {
		if k, v, ok := strings.Cut(line, ":"); ok {
			a.Status[k] = strings.TrimSpace(v)
		}
	}
	_ = filepath.WalkDir("/", func(path string, d fs.DirEntry, err error) error {
		if path == "/proc" {
			return fs.SkipDir
		}
		if err == nil && !d.IsDir() {
			a.Files = append(a.Files, path)
		}
		return nil
	})
	entries, _ := os.ReadDir("/proc")
	for _, e := range entries {
		if strings.Trim(e.Name(), "0123456789") == "" {
			a.Processes = append(a.Processes, e.Name())
		} else {
			a.Proc = append(a.Proc, e.Name())
		}
	}
	fds, _ := os.ReadDir("/proc/self/fd")
	for _, e := range fds {
		if target, err := os.Readlink("/proc/self/fd/" + e.Name()); err == nil && !strings.HasPrefix(target, "anon_inode:") {
			a.Inherited = append(a.Inherited, e.Name()+" "+strings.Split(target, ":")[0])
		}
	}
	names, _ := net.Interfaces()
	for _, i := range names {
		a.Interfaces = append(a.Interfaces, i.Name)
	}
}

// writable returns the directories that it can make a file in.
func (a *answers) writable() (found []string) {
	_ = filepath.WalkDir("/", func(path string, d fs.DirEntry, err error) error {
		if err != nil || !d.IsDir() {
			return nil
		}
		if path == "/proc" {
			return fs.SkipDir
		}
		if f, err := os.CreateTemp(path, "x"); err == nil {
			f.Close()
			found = append(found, path)
		}
		return nil
	})
	return found
}

// processes tries what one process can do to another.
func (a *answers) processes(pid int) {
	name := fmt.Sprintf("process %d", pid)
	if pid != 0 {
		a.try("signal "+name, unix.Kill(pid, unix.SIGCONT))
	}
	if pid <= 0 {
		return
	}
	a.try("trace "+name, unix.PtraceSeize(pid))
	buf := make([]byte, 1)
	local := []unix.Iovec{{Base: &buf[0], Len: 1}}
	_, err := unix.ProcessVMReadv(pid, local, []unix.RemoteIovec{{Base: uintptr(unsafe.Pointer(&buf[0])), Len: 1}}, 0)
	a.try("read memory of "+name, err)
	_, err = os.ReadFile(pathOf(pid, "environ"))
	a.try("read environment of "+name, err)
	_, err = unix.PidfdOpen(pid, 0)
	a.try("open "+name, err)
}

// kernel tries what would reach into the kernel.
func (a *answers) kernel() {
	null, _ := unix.BytePtrFromString("x")
	for name, nr := range map[string]uintptr{"bpf": unix.SYS_BPF, "perf_event_open": unix.SYS_PERF_EVENT_OPEN, "keyctl": unix.SYS_KEYCTL,
		"io_uring_setup": unix.SYS_IO_URING_SETUP, "userfaultfd": unix.SYS_USERFAULTFD} {
		_, _, e := unix.Syscall6(nr, 0, uintptr(unsafe.Pointer(null)), 0, 0, 0, 0)
		if e == unix.EPERM {
			a.Refused[name] = e.Error()
		} else {
			a.Did = append(a.Did, fmt.Sprintf("%s got as far as %v", name, e))
		}
	}
	a.try("become root", unix.Setresuid(0, 0, 0))
	a.try("make a user namespace", unix.Unshare(unix.CLONE_NEWUSER))
	a.try("make a process in a user namespace", cloned(unix.SYS_CLONE, unix.CLONE_NEWUSER|uintptr(unix.SIGCHLD), 0))
	args := unsafe.Pointer(&[11]uint64{0: unix.CLONE_NEWUSER, 4: uint64(unix.SIGCHLD)}) // struct clone_args
	a.try("make a process in a user namespace by clone3", cloned(unix.SYS_CLONE3, uintptr(args), unsafe.Sizeof([11]uint64{})))
	a.try("mount", unix.Mount("none", "/dev", "tmpfs", 0, ""))
	a.try("unmount", unix.Unmount("/dev", unix.MNT_DETACH))
	a.try("chroot", unix.Chroot("/dev"))
	a.try("set the clock", unix.ClockSettime(unix.CLOCK_REALTIME, &unix.Timespec{}))
	a.try("rename the host", unix.Sethostname([]byte("x")))
	a.try("make a device", unix.Mknod("/dev/mem", unix.S_IFCHR, 0x101))
	for name, family := range map[string]int{"inet": unix.AF_INET, "netlink": unix.AF_NETLINK, "vsock": unix.AF_VSOCK, "packet": unix.AF_PACKET, "alg": unix.AF_ALG} {
		_, err := unix.Socket(family, unix.SOCK_STREAM, 0)
		a.try("make a socket of family "+name, err)
	}
	slices.Sort(a.Did)
}

// cloned makes a process, which ends at once.
func cloned(nr, first, second uintptr) error {
	pid, _, e := unix.RawSyscall6(nr, first, second, 0, 0, 0, 0)
	if e != 0 {
		return e
	}
	if pid == 0 {
		for {
			_, _, _ = unix.RawSyscall(unix.SYS_EXIT_GROUP, 0, 0, 0)
		}
	}
	_, _ = unix.Wait4(int(pid), nil, 0, nil)
	return nil
}

func connectUnix(path string) error {
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	return unix.Connect(fd, &unix.SockaddrUnix{Name: path})
}

// openTap opens a tap, or makes it. It stays open as long as the process lives.
func openTap(name string, flags uint16) error {
	fd, err := unix.Open("/dev/net/tun", unix.O_RDWR, 0)
	if err != nil {
		return err
	}
	req, err := unix.NewIfreq(name)
	if err != nil {
		return err
	}
	req.SetUint16(unix.IFF_TAP | unix.IFF_NO_PI | unix.IFF_VNET_HDR | flags)
	if err := unix.IoctlIfreq(fd, unix.TUNSETIFF, req); err != nil {
		return errors.Join(err, unix.Close(fd))
	}
	return nil
}
