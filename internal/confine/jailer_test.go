package confine

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/forkd/forkd/internal/confine/jailertest"
)

// jailers are those that there are: a fake one, and the real one that FORKD_JAILER names.
func jailers(t *testing.T) map[string]string {
	list := map[string]string{"fake": fakeJailer(t, jailertest.Works)}
	if real := os.Getenv("FORKD_JAILER"); real != "" {
		list["real"] = real
	}
	return list
}

func fakeJailer(t *testing.T, fault string) string {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(t.TempDir(), jailertest.Name("1.16.1", fault))
	if err := os.Link(self, path); err != nil { // a symbolic link would be shown under the name of what it leads to
		b, err := os.ReadFile(self)
		if err == nil {
			err = os.WriteFile(path, b, 0o755)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	return path
}

func newJailedCell(t *testing.T, jailer string) *Cell {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("only root can confine anything")
	}
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	c, err := New(Spec{Binary: self, Jailer: jailer}, NewUsers(DefaultUIDs))
	if errors.Is(err, unix.EPERM) {
		t.Skipf("this root may not make namespaces: %v", err)
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return c
}

// TestJailed: what is started through a jailer inherits what it is given, under the same numbers as without, and has nothing else.
func TestJailed(t *testing.T) {
	for name, jailer := range jailers(t) {
		t.Run(name, func(t *testing.T) {
			c := newJailedCell(t, jailer)
			top := t.TempDir()
			dir, secret := filepath.Join(top, "mine"), filepath.Join(top, "secret")
			if err := errors.Join(os.Mkdir(dir, 0o700), os.WriteFile(secret, []byte("x"), 0o666)); err != nil {
				t.Fatal(err)
			}
			mounts, err := os.ReadFile("/proc/self/mountinfo")
			if err != nil {
				t.Fatal(err)
			}
			open, err := os.Open(secret)
			if err != nil {
				t.Fatal(err)
			}
			defer open.Close()
			other := probe(t, c, questions{}, Command{})
			q := questions{PIDs: []int{os.Getpid(), other.child.Pid}, Paths: []string{secret, "../secret", "/etc/passwd", "/proc/1/root/etc/passwd", "/proc/sys/kernel/core_pattern",
				"/jails/x", "/stage/firecracker", pathOf(os.Getpid(), "mem"), pathOf(other.child.Pid, "mem")}}
			j := probe(t, c, q, Command{Dir: dir, Files: []*os.File{open}})
			want := "[make a file in / make a file in /dev make a file in /dev/net make a file in /machine make a file in /run]" // the jail is the jailed user's
			if got := fmt.Sprint(j.saw.Did); got != want {
				t.Errorf("it could do %s, want only files in its jail", got)
			}
			if got := fmt.Sprint(j.saw.Inherited); got != fmt.Sprintf("[0 pipe 1 pipe 2 pipe 3 %s]", secret) {
				t.Errorf("it holds %s, want its pipes and the one file it was given", got)
			}
			checkJailed(t, j)
			if after, err := os.ReadFile("/proc/self/mountinfo"); err != nil || !bytes.Equal(after, mounts) {
				t.Errorf("the host's mounts have changed: %v", err)
			}
		})
	}
}

// checkJailed checks who the probe was: the same as without a jailer, but for capabilities that it can't get any more.
func checkJailed(t *testing.T, j *jailed) {
	t.Helper()
	saw := j.saw
	for field, want := range map[string]string{"CapEff": "0000000000000000", "CapPrm": "0000000000000000", "CapInh": "0000000000000000",
		"CapAmb": "0000000000000000", "NoNewPrivs": "1", "Seccomp": "2"} {
		if got := saw.Status[field]; got != want {
			t.Errorf("%s is %s, want %s", field, got, want)
		}
	}
	if saw.UID != int(j.uid) || saw.GID != saw.UID || len(saw.Groups) > 1 {
		t.Errorf("it is user %d, group %d, groups %v; want user %d", saw.UID, saw.GID, saw.Groups, j.uid)
	}
	if saw.PID != 1 || saw.Host != hostName || fmt.Sprint(saw.Processes) != fmt.Sprint([]int{j.child.Pid}) {
		t.Errorf("it is process %d of %v on %q", saw.PID, saw.Processes, saw.Host)
	}
	if len(saw.Interfaces) > 1 {
		t.Errorf("it has the interfaces %v", saw.Interfaces)
	}
	if !slices.ContainsFunc(saw.Files, func(f string) bool { return f == "/dev/kvm" }) {
		t.Errorf("files in its root: %q, want /dev/kvm with them: then it was the jailer that made it", saw.Files)
	}
}

// TestJailerFails: however the jailer fails, no process and no user id is left, and what it said is known.
func TestJailerFails(t *testing.T) {
	for fault, says := range map[string]string{jailertest.Garbage: "garbage", jailertest.Refuse: "ordered to refuse",
		jailertest.NoDevice: "/dev/kvm", jailertest.Keep: "receive what the monitor inherits"} {
		t.Run(fault, func(t *testing.T) {
			c := newJailedCell(t, fakeJailer(t, fault))
			err := c.Try()
			if err == nil || !strings.Contains(err.Error(), says) {
				t.Errorf("got %v, want an error about %q", err, says)
			}
			if n := len(c.users.used); n != 0 {
				t.Errorf("%d user ids are in use", n)
			}
		})
	}
}

// TestJailerStalls: a jailer that does not get on is a process like any other, which can be killed; whose it is can be seen.
func TestJailerStalls(t *testing.T) {
	c := newJailedCell(t, fakeJailer(t, jailertest.Stall))
	null, err := os.OpenFile(os.DevNull, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer null.Close()
	p, uid, err := c.Start(Command{Env: []string{"FORKD_MACHINE=/some/dir"}, Files: []*os.File{null, null, null}, Dir: t.TempDir()})
	if err != nil {
		t.Fatal(err)
	}
	defer c.users.Release(uid)
	env, err := os.ReadFile(pathOf(p.Pid, "environ"))
	if err != nil || !bytes.Contains(env, []byte("FORKD_MACHINE=/some/dir")) {
		t.Errorf("its environment is %q, %v: a daemon that starts again could not tell whose it is", env, err)
	}
	if err := p.Kill(); err != nil {
		t.Error(err)
	}
	late := time.AfterFunc(tryLimit, func() { t.Error("it can't be killed") })
	defer late.Stop()
	if _, err := p.Wait(); err != nil {
		t.Error(err)
	}
}

func TestNoJailer(t *testing.T) {
	if _, err := New(Spec{Binary: os.Args[0], Jailer: "/no/such/jailer"}, NewUsers(DefaultUIDs)); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("got %v, want ErrNotExist", err)
	}
}
