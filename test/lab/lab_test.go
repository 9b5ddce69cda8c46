package lab

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"
)

// driverEnv makes this test binary a driver of a lab that is to be killed: it opens one and runs a command for long.
const driverEnv = "FORKD_LAB_TEST_DRIVER"

func TestMain(m *testing.M) {
	if code, played := PlayRole(); played {
		os.Exit(code)
	}
	if cache := os.Getenv(driverEnv); cache != "" {
		os.Exit(drive(cache))
	}
	os.Exit(m.Run())
}

func drive(cache string) int {
	l, err := Open(context.Background(), Options{Cache: cache, Log: os.Stderr})
	if err == nil {
		_, err = l.Run(context.Background(), Command{Args: []string{"sh", "-c", "echo running; sleep 600"}, Stdout: os.Stdout})
	}
	fmt.Fprintln(os.Stderr, err)
	return 1
}

// cacheOf returns the cache, or skips the test: it boots a machine.
func cacheOf(t *testing.T) string {
	t.Helper()
	if os.Getenv("FORKD_VM_TESTS") != "1" {
		t.Skip("boots a lab; set FORKD_VM_TESTS=1 to run it")
	}
	if dir := os.Getenv("FORKD_CACHE"); dir != "" {
		return dir
	}
	base, err := os.UserCacheDir()
	if err != nil {
		t.Fatal(err)
	}
	return filepath.Join(base, "forkd")
}

// TestLab boots one lab, in another process, looks at what it is for, and kills that process.
func TestLab(t *testing.T) {
	d := startDriver(t)
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Minute)
	defer cancel()
	d.awaitLab(t)
	l, err := Open(ctx, Options{Cache: d.cache})
	if err != nil || l.Own() {
		t.Fatalf("Open: %v, own %v, want the lab of another process", err, err == nil && l.Own())
	}
	sh := func(t *testing.T, script string) (string, int) {
		t.Helper()
		var out bytes.Buffer
		code, err := l.Run(ctx, Command{Args: []string{"sh", "-c", script}, Stdout: &out, Stderr: &out})
		if err != nil {
			t.Fatalf("%s: %v", script, err)
		}
		return strings.TrimSpace(out.String()), code
	}
	t.Run("what it has", func(t *testing.T) {
		for script, want := range map[string]string{
			"test -c /dev/kvm && echo yes":                            "yes",
			"stat -fc %T /sys/fs/cgroup":                              "cgroup2fs",
			"test -c /dev/userfaultfd && echo yes":                    "yes",
			"ps -p 1 -o comm=":                                        "systemd",
			"nft list ruleset && ip -br link show lo | cut -d' ' -f1": "lo",
			"for c in cpu io memory pids; do grep -ow $c /sys/fs/cgroup/cgroup.controllers; done | wc -l": "4",
			"systemctl --failed --no-legend | grep -v '^$' || echo none":                                  "none",
		} {
			if got, _ := sh(t, script); got != want {
				t.Errorf("%s: got %q, want %q", script, got, want)
			}
		}
	})
	t.Run("memory is limited", func(t *testing.T) {
		const script = `mkdir /sys/fs/cgroup/small; echo 16M >/sys/fs/cgroup/small/memory.max; echo 0 >/sys/fs/cgroup/small/memory.swap.max 2>/dev/null || true
sh -c 'echo 0 >/sys/fs/cgroup/small/cgroup.procs; exec dd if=/dev/zero of=/dev/null bs=64M count=1' >/dev/null 2>&1 || echo killed
grep '^oom_kill ' /sys/fs/cgroup/small/memory.events; rmdir /sys/fs/cgroup/small`
		if got, _ := sh(t, script); got != "killed\noom_kill 1" {
			t.Errorf("a process with 64 MiB in a group of 16: got %q, want it killed", got)
		}
	})
	t.Run("exit codes", func(t *testing.T) {
		for script, want := range map[string]int{"exit 0": 0, "exit 7": 7, "kill -9 $$": 137} {
			if _, got := sh(t, script); got != want {
				t.Errorf("%s: exit code %d, want %d", script, got, want)
			}
		}
		if code, err := l.Run(ctx, Command{Args: []string{"no-such-program"}}); err == nil || code != 127 {
			t.Errorf("a program that is not there: got %d, %v, want 127 and an error", code, err)
		}
	})
	t.Run("files", func(t *testing.T) { checkFiles(ctx, t, l) })
	t.Run("what a command starts ends with it", func(t *testing.T) {
		sh(t, "setsid sleep 987 & setsid sh -c 'trap \"\" TERM; sleep 987' &")
		if got, _ := sh(t, "pgrep -f 'sleep 98[7]' || echo none"); got != "none" {
			t.Errorf("processes that are left: %s", got)
		}
	})
	t.Run("a command that is given up ends", func(t *testing.T) {
		short, cancel := context.WithTimeout(ctx, 2*time.Second)
		defer cancel()
		if _, err := l.Run(short, Command{Args: []string{"sleep", "986"}}); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("Run: got %v, want context.DeadlineExceeded", err)
		}
		eventually(t, func() string {
			if got, _ := sh(t, "pgrep -f 'sleep 98[6]' || echo none"); got != "none" {
				return "processes that are left: " + got
			}
			return ""
		})
	})
	t.Run("its driver is killed", d.killed)
}

func checkFiles(ctx context.Context, t *testing.T, l *Lab) {
	t.Helper()
	dir := filepath.Join(t.TempDir(), "tree")
	want := bytes.Repeat([]byte("0123456789abcde\n"), 1<<18) // 4 MiB: more than a window
	if err := os.MkdirAll(filepath.Join(dir, "sub"), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, "sub", "file"), want, 0o755); err != nil {
		t.Fatal(err)
	}
	begin := time.Now()
	if err := l.Put(ctx, dir, "/work/copy"); err != nil {
		t.Fatalf("Put: %v", err)
	}
	t.Logf("4 MiB went in in %v", time.Since(begin).Round(time.Millisecond))
	if err := l.Put(ctx, dir, "/work/copy"); err != nil {
		t.Errorf("Put again: %v", err)
	}
	back := t.TempDir()
	if err := l.Get(ctx, "/work/copy", back); err != nil {
		t.Fatalf("Get: %v", err)
	}
	got, err := os.ReadFile(filepath.Join(back, "copy", "sub", "file"))
	if err != nil || !bytes.Equal(got, want) {
		t.Errorf("what came back differs: %d bytes, %v, want %d", len(got), err, len(want))
	}
	// More input than anybody reads.
	if code, err := l.Run(ctx, Command{Args: []string{"true"}, Stdin: bytes.NewReader(want)}); err != nil || code != 0 {
		t.Errorf("a command that reads no input: got %d, %v", code, err)
	}
}

// TestDriverKilled kills the process that keeps a lab while it boots, and looks for what is left.
func TestDriverKilled(t *testing.T) {
	startDriver(t).killed(t)
}

// driver is a process that keeps a lab.
type driver struct {
	cache    string
	cmd      *exec.Cmd
	out      *bufio.Reader
	said     bytes.Buffer // to stderr
	monitors []int
	before   []string // files of the cache
}

// startDriver starts one and returns when it has started QEMU. Its lab is not the one that others use: it has a name of its own for the cache.
func startDriver(t *testing.T) *driver {
	t.Helper()
	cache := cacheOf(t)
	if err := available(Options{MemMiB: DefaultMemMiB}); err != nil {
		t.Skip(err)
	}
	d := &driver{cache: filepath.Join(t.TempDir(), "cache"), before: files(t, cache)}
	if err := os.Symlink(cache, d.cache); err != nil {
		t.Fatal(err)
	}
	d.cmd = exec.Command("/proc/self/exe")
	d.cmd.Env = append(os.Environ(), driverEnv+"="+d.cache)
	d.cmd.Stderr = &d.said
	out, err := d.cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := d.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	d.out = bufio.NewReader(out)
	t.Cleanup(func() {
		_ = d.cmd.Process.Kill() // it may have ended
		_ = d.cmd.Wait()
	})
	// The first time, the lab is built before.
	within(t, 20*time.Minute, func() string {
		if d.monitors = childrenOf(d.cmd.Process.Pid); len(d.monitors) == 0 {
			return "the driver starts no QEMU"
		}
		return ""
	})
	return d
}

// awaitLab returns when the lab runs commands.
func (d *driver) awaitLab(t *testing.T) {
	t.Helper()
	if line, err := d.out.ReadString('\n'); err != nil || line != "running\n" {
		_ = d.cmd.Wait()
		t.Fatalf("the lab did not come up: %v %q\n%s", err, line, d.said.String())
	}
	d.monitors = childrenOf(d.cmd.Process.Pid)
}

// killed kills the driver and looks for what is left.
func (d *driver) killed(t *testing.T) {
	t.Helper()
	_ = d.cmd.Process.Signal(unix.SIGKILL)
	_ = d.cmd.Wait()
	eventually(t, func() string {
		for _, pid := range d.monitors {
			if _, err := os.Stat(fmt.Sprintf("/proc/%d", pid)); err == nil {
				return fmt.Sprintf("process %d is left", pid)
			}
		}
		return ""
	})
	if diff := cmp.Diff(d.before, files(t, d.cache)); diff != "" && len(d.before) > 0 {
		t.Errorf("files of the cache (-before +after):\n%s", diff)
	}
	l := &Lab{socket: address(filepath.Join(d.cache, "lab"))}
	if c, err := l.dial(t.Context()); err == nil {
		c.Close()
		t.Error("the lab's address is still in use")
	}
}

// files lists the names in the lab's cache.
func files(t *testing.T, cache string) []string {
	t.Helper()
	found, err := filepath.Glob(filepath.Join(cache, "lab", "*"))
	if err != nil {
		t.Fatal(err)
	}
	for i := range found {
		found[i] = filepath.Base(found[i])
	}
	return found
}

// childrenOf lists the child processes of a process.
func childrenOf(parent int) (found []int) {
	stats, _ := filepath.Glob("/proc/[0-9]*/stat")
	for _, path := range stats {
		b, err := os.ReadFile(path)
		if err != nil {
			continue
		}
		fields := strings.Fields(string(b[bytes.LastIndexByte(b, ')')+1:]))
		if fields[1] == strconv.Itoa(parent) && fields[0] != "Z" {
			pid, _ := strconv.Atoi(strings.Split(path, "/")[2])
			found = append(found, pid)
		}
	}
	return found
}

func eventually(t *testing.T, check func() string) {
	t.Helper()
	within(t, 20*time.Second, check)
}

func within(t *testing.T, limit time.Duration, check func() string) {
	t.Helper()
	deadline := time.Now().Add(limit)
	for {
		problem := check()
		if problem == "" {
			return
		}
		if time.Now().After(deadline) {
			t.Fatal(problem)
		}
		time.Sleep(50 * time.Millisecond) // what /proc shows can't be awaited
	}
}
