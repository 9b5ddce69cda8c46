package confine

import (
	"fmt"
	"net"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// TestNothingOfTheHost starts a probe exactly as a monitor is started, beside another one, and has it try to reach the host, this process, which
// stands for the daemon, and the other probe.
func TestNothingOfTheHost(t *testing.T) {
	c := newTestCell(t)
	dir := t.TempDir()
	secret, socket := filepath.Join(dir, "secret"), filepath.Join(dir, "daemon.sock")
	if err := os.WriteFile(secret, []byte("x"), 0o666); err != nil {
		t.Fatal(err)
	}
	abstract := fmt.Sprintf("@forkd-test-%d", os.Getpid())
	for _, name := range []string{socket, abstract} {
		listen(t, "unix", name)
	}
	tcp := listen(t, "tcp", "127.0.0.1:0")
	other := probe(t, c, questions{}, Command{})
	open, err := os.Open(secret) // what it is given it has
	if err != nil {
		t.Fatal(err)
	}
	defer open.Close()

	q := questions{PIDs: []int{os.Getpid(), other.child.Pid, os.Getppid()}, Sockets: []string{socket, abstract}, TCP: []string{tcp.String()},
		Paths: []string{secret, "/etc/passwd", "/etc/hostname", "/proc/sys/kernel/core_pattern", "/proc/1/root/etc/passwd", "/proc/kcore", "/proc/sysrq-trigger",
			"/sys/kernel/uevent_helper", "/dev/mem", "/dev/sda", "/dev/vda", "/.." + secret, pathOf(os.Getpid(), "mem"), pathOf(other.child.Pid, "mem"), "/proc/self/cwd/.." + secret}}
	j := probe(t, c, q, Command{Files: []*os.File{open}})
	saw := j.saw
	if len(saw.Did) != 0 {
		t.Errorf("it could do what it must not:\n  %s", strings.Join(saw.Did, "\n  "))
	}
	if n := len(saw.Refused); n < 50 {
		t.Errorf("it tried only %d things", n)
	}
	checkPrivileges(t, j)
	self, _ := os.Executable()
	want := []string{"/dev/null", "/dev/urandom", stageFile, self}
	for _, device := range testDevices() {
		if _, err := os.Stat(device); err == nil {
			want = append(want, device)
		}
	}
	slices.Sort(want)
	slices.Sort(saw.Files)
	if !slices.Equal(saw.Files, want) {
		t.Errorf("files in its root: %q, want %q", saw.Files, want)
	}
	if got := fmt.Sprint(saw.Inherited); got != fmt.Sprintf("[0 pipe 1 pipe 2 pipe 3 %s]", secret) {
		t.Errorf("it holds %s, want its pipes and the one file it was given", got)
	}
}

// checkPrivileges checks who the probe was.
func checkPrivileges(t *testing.T, j *jailed) {
	t.Helper()
	saw := j.saw
	for field, want := range map[string]string{"CapEff": "0000000000000000", "CapPrm": "0000000000000000", "CapInh": "0000000000000000",
		"CapBnd": "0000000000000000", "CapAmb": "0000000000000000", "NoNewPrivs": "1", "Seccomp": "2"} {
		if got := saw.Status[field]; got != want {
			t.Errorf("%s is %s, want %s", field, got, want)
		}
	}
	if first := int(DefaultUIDs.First); saw.UID < first || saw.GID != saw.UID || len(saw.Groups) > 1 || len(saw.Groups) == 1 && saw.Groups[0] != saw.GID {
		t.Errorf("it is user %d, group %d, groups %v", saw.UID, saw.GID, saw.Groups)
	}
	if saw.PID != 1 || saw.Host != hostName || fmt.Sprint(saw.Processes) != fmt.Sprint([]int{j.child.Pid}) {
		t.Errorf("it is process %d of %v on %q", saw.PID, saw.Processes, saw.Host)
	}
	for _, name := range saw.Proc {
		if name != "self" && name != "thread-self" {
			t.Errorf("its /proc has %s", name)
		}
	}
	if len(saw.Interfaces) > 1 || len(saw.Interfaces) == 1 && saw.Interfaces[0] != "lo" {
		t.Errorf("it has the interfaces %v", saw.Interfaces)
	}
}

func listen(t *testing.T, network, address string) net.Addr {
	t.Helper()
	l, err := net.Listen(network, address)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	return l.Addr()
}

// TestOwnDirectory gives a probe a directory, and nothing above it.
func TestOwnDirectory(t *testing.T) {
	c := newTestCell(t)
	top := t.TempDir()
	dir := filepath.Join(top, "mine")
	for _, d := range []string{dir, filepath.Join(top, "other")} {
		if err := os.Mkdir(d, 0o700); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.WriteFile(filepath.Join(top, "secret"), nil, 0o666); err != nil {
		t.Fatal(err)
	}
	j := probe(t, c, questions{Paths: []string{"../secret", "../other", top + "/secret", "/machine/../../secret"}}, Command{Dir: dir})
	if got := fmt.Sprint(j.saw.Did); got != "[make a file in /machine]" {
		t.Errorf("it could do %s, want only files in its own directory", got)
	}
	if made, _ := filepath.Glob(filepath.Join(dir, "x*")); len(made) != 1 {
		t.Errorf("in its directory: %v, want the file that it made", made)
	}
}

// TestOwnUsers: no two that live are the same user, also not after the daemon started again.
func TestOwnUsers(t *testing.T) {
	c := newTestCell(t)
	one, two := probe(t, c, questions{}, Command{}), probe(t, c, questions{}, Command{})
	if one.uid == two.uid || one.saw.UID != int(one.uid) {
		t.Errorf("users %d and %d, the first is %d", one.uid, two.uid, one.saw.UID)
	}
	again := NewUsers(UIDRange{First: one.uid, N: 3})
	if got := again.Adopt(one.child.Pid); got != one.uid {
		t.Errorf("Adopt() = %d, want %d", got, one.uid)
	}
	if got := again.Adopt(os.Getpid()); got != 0 {
		t.Errorf("Adopt() of a process of another user = %d", got)
	}
	for range 2 {
		if id, err := again.take(); err != nil || id == one.uid {
			t.Errorf("take() = %d, %v, want one that is not in use", id, err)
		}
	}
	if id, err := again.take(); err == nil {
		t.Errorf("take() of an empty range = %d", id)
	}
	again.Release(one.uid)
	if id, err := again.take(); err != nil || id != one.uid {
		t.Errorf("take() = %d, %v, want the one that was released", id, err)
	}
}

// TestSettled looks at what is set from outside.
func TestSettled(t *testing.T) {
	c := newTestCell(t)
	j := probe(t, c, questions{}, Command{})
	if limits, err := os.ReadFile(pathOf(j.child.Pid, "limits")); err != nil || !regexp.MustCompile(`Max core file size +0 +0 `).Match(limits) {
		t.Errorf("its core dumps are not limited to nothing: %v\n%s", err, limits)
	}
	if b, err := os.ReadFile(pathOf(j.child.Pid, "oom_score_adj")); err != nil || strings.TrimSpace(string(b)) != oomScore {
		t.Errorf("oom_score_adj %q, %v", b, err)
	}
	ours, _ := os.Readlink("/proc/self/ns/mnt")
	for _, ns := range []string{"mnt", "pid", "ipc", "uts", "net"} {
		theirs, err := os.Readlink(pathOf(j.child.Pid, "ns/"+ns))
		mine, _ := os.Readlink("/proc/self/ns/" + ns)
		if err != nil || theirs == mine {
			t.Errorf("namespace %s: %s, %v, want one of its own", ns, theirs, err)
		}
	}
	if again, _ := os.Readlink("/proc/self/ns/mnt"); again != ours {
		t.Errorf("this process is in %s now", again)
	}
}

// TestFailuresLeaveNothing: a start that fails at any step gives the user id back and leaves no process.
func TestFailuresLeaveNothing(t *testing.T) {
	c := newTestCell(t)
	notNS, err := os.Open(os.DevNull)
	if err != nil {
		t.Fatal(err)
	}
	defer notNS.Close()
	for name, start := range map[string]func() error{
		"no cgroup":         func() error { _, _, err := c.Start(Command{Tasks: []*os.File{notNS}}); return err },
		"no namespace":      func() error { _, _, err := c.Start(Command{NetNS: notNS}); return err },
		"no such directory": func() error { _, _, err := c.Start(Command{Dir: "/no/such"}); return err },
	} {
		if err := start(); err == nil {
			t.Errorf("%s: it started", name)
		}
	}
	bad := *c
	bad.binary = "/no/such/program"
	if err := bad.Try(); err == nil || !strings.Contains(err.Error(), "execute the monitor") {
		t.Errorf("no program: got %v, want the step that failed", err)
	}
	if n := len(c.users.used); n != 0 {
		t.Errorf("%d user ids are in use", n)
	}
}

func TestDecide(t *testing.T) {
	for _, tt := range []struct {
		mode Mode
		euid int
		want Level
		fail bool
	}{{Auto, 0, Full, false}, {Require, 0, Full, false}, {Off, 0, None, false}, {Auto, 1000, User, false}, {Off, 1000, User, false}, {Require, 1000, "", true}} {
		if got, err := Decide(tt.mode, tt.euid); got != tt.want || (err != nil) != tt.fail {
			t.Errorf("Decide(%s, %d) = %s, %v, want %s", tt.mode, tt.euid, got, err, tt.want)
		}
	}
}

// TestControlGroup: a process is in its control group of version 2 from its first moment on, and its filter does not stand against that.
func TestControlGroup(t *testing.T) {
	c := newTestCell(t)
	top := t.TempDir()
	if err := unix.Mount("none", top, "cgroup2", 0, ""); err != nil {
		t.Skipf("control groups of version 2 can't be mounted: %v", err)
	}
	t.Cleanup(func() { _ = unix.Unmount(top, unix.MNT_DETACH) })
	dir := filepath.Join(top, fmt.Sprintf("forkd-test-%d", os.Getpid()))
	if err := os.Mkdir(dir, 0o755); err != nil {
		t.Skipf("control groups of version 2 can't be made: %v", err)
	}
	group, err := os.Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { group.Close() })
	t.Cleanup(func() { // after the probe's end, which is registered later
		if err := os.Remove(dir); err != nil {
			t.Error(err)
		}
	})
	j := probe(t, c, questions{}, Command{Cgroup: group})
	b, err := os.ReadFile(pathOf(j.child.Pid, "cgroup"))
	if err != nil || !strings.Contains(string(b), "0::/"+filepath.Base(dir)) {
		t.Errorf("it is in %q, %v", b, err)
	}
}
