package limits

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/forkd/forkd/internal/confine"
)

// TestMain makes this test's binary a program that takes what it is told to.
func TestMain(m *testing.M) {
	switch os.Getenv("FORKD_LIMITS_TAKE") {
	case "":
		os.Exit(m.Run())
	case "memory":
		var held [][]byte
		for range 256 {
			held = append(held, bytes.Repeat([]byte{1}, 1<<20))
		}
		fmt.Println(len(held))
	case "cpu":
		for used := time.Duration(0); used < burnt; {
			var u unix.Rusage
			if err := unix.Getrusage(unix.RUSAGE_SELF, &u); err != nil {
				fmt.Println(err)
				return
			}
			used = time.Duration(u.Utime.Nano() + u.Stime.Nano())
		}
	case "disk":
		if err := writeThrough(os.Getenv("FORKD_LIMITS_FILE"), written); err != nil {
			fmt.Println(err)
		}
	case "threads":
		var held []*exec.Cmd
		for range 100 {
			c := exec.Command("/proc/self/exe")
			c.Env = []string{"FORKD_LIMITS_TAKE=nothing"}
			if err := c.Start(); err != nil {
				fmt.Println(err)
				break
			}
			held = append(held, c)
		}
		for _, c := range held {
			_ = c.Wait()
		}
	}
}

func TestOr(t *testing.T) {
	got := Limits{MemoryMiB: 1, CPUs: 0.5}.Or(Limits{MemoryMiB: 2, CPUs: 3, PIDs: 4, IOMiBPerS: 5})
	if want := (Limits{1, 0.5, 4, 5}); got != want {
		t.Errorf("got %+v, want %+v", got, want)
	}
}

func TestSettings(t *testing.T) {
	full := Limits{MemoryMiB: 256, CPUs: 1.5, PIDs: 64, IOMiBPerS: 10}
	for _, tt := range []struct {
		name    string
		version int
		limits  Limits
		want    string
	}{
		{"version 1", 1, full, `memory.limit_in_bytes=268435456 memory.memsw.limit_in_bytes=268435456 memory.limit_in_bytes=268435456 cpu.cfs_period_us=100000 cpu.cfs_quota_us=150000 pids.max=64 ` +
			`blkio.throttle.read_bps_device=8:0 10485760 blkio.throttle.write_bps_device=8:0 10485760`},
		{"version 1, none", 1, Limits{}, `memory.limit_in_bytes=-1 memory.memsw.limit_in_bytes=-1 memory.limit_in_bytes=-1 cpu.cfs_period_us=100000 cpu.cfs_quota_us=-1 pids.max=max ` +
			`blkio.throttle.read_bps_device=8:0 0 blkio.throttle.write_bps_device=8:0 0`},
		{"version 2", 2, full, `memory.max=268435456 memory.swap.max=0 memory.oom.group=1 cpu.max=150000 100000 pids.max=64 io.max=8:0 rbps=10485760 wbps=10485760`},
		{"version 2, none", 2, Limits{}, `memory.max=max memory.swap.max=max memory.oom.group=1 cpu.max=max 100000 pids.max=max io.max=8:0 rbps=max wbps=max`},
	} {
		r := &Root{version: tt.version, device: "8:0"}
		var got []string
		for _, c := range controllers() {
			for _, s := range r.settings(c, tt.limits) {
				got = append(got, s.file+"="+s.value)
			}
		}
		if diff := cmp.Diff(tt.want, strings.Join(got, " ")); diff != "" {
			t.Errorf("%s (-want +got):\n%s", tt.name, diff)
		}
	}
}

func TestNoRoot(t *testing.T) {
	var r *Root
	if g, err := r.Make("sb1", Limits{}); g != nil || err != nil {
		t.Errorf("no limits: %v, %v", g, err)
	}
	if _, err := r.Make("sb1", Limits{CPUs: 1}); !errors.Is(err, ErrUnavailable) || !strings.Contains(err.Error(), "1 CPUs") {
		t.Errorf("a limit: %v", err)
	}
	if got := r.Default(Limits{PIDs: 3}); got != (Limits{}) {
		t.Errorf("Default() = %+v", got)
	}
	if err := errors.Join((*Group)(nil).Remove(), (*Group)(nil).Set(Limits{}), r.Close(), r.Sweep(nil)); err != nil {
		t.Error(err)
	}
}

// openTest opens a Root of this host's, with the controllers that a test needs.
func openTest(t *testing.T, need Limits) *Root {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("only root can make control groups")
	}
	r, err := Open(Options{RunDir: t.TempDir(), Data: "/"})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := r.Close(); err != nil {
			t.Error(err)
		}
		for _, d := range r.distinct() {
			if _, err := os.Stat(d); err == nil {
				t.Errorf("%s is left", d)
			}
		}
	})
	if err := r.Can(need); err != nil {
		t.Skipf("this host can't: %v", err)
	}
	t.Logf("version %d, disk %q, %v", r.version, r.device, r.dirs)
	return r
}

// start starts a program of this test in a group.
func start(t *testing.T, g *Group, take string) (*exec.Cmd, *bytes.Buffer) {
	t.Helper()
	dir, tasks, err := g.Files()
	if err != nil {
		t.Fatal(err)
	}
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(self)
	cmd.Env = append(os.Environ(), "FORKD_LIMITS_TAKE="+take)
	var out bytes.Buffer
	cmd.Stdout = &out
	cmd.SysProcAttr = &syscall.SysProcAttr{}
	if dir != nil {
		cmd.SysProcAttr.UseCgroupFD, cmd.SysProcAttr.CgroupFD = true, int(dir.Fd())
		defer dir.Close()
	}
	err = confine.OnThread(func() error {
		if err := confine.Enter(tasks); err != nil {
			return err
		}
		return cmd.Start()
	})
	for _, f := range tasks {
		f.Close()
	}
	if err != nil {
		t.Fatal(err)
	}
	return cmd, &out
}

func TestOutOfMemory(t *testing.T) {
	r := openTest(t, Limits{MemoryMiB: 64})
	g, err := r.Make("sb1", Limits{MemoryMiB: 64})
	if err != nil {
		t.Fatal(err)
	}
	cmd, _ := start(t, g, "memory")
	if err := cmd.Wait(); err == nil || cmd.ProcessState.String() != "signal: killed" {
		t.Errorf("it ended with %v, want it killed", cmd.ProcessState)
	}
	if got := g.Events().OOMKills; got < 1 {
		t.Errorf("%d processes killed for want of memory, want one", got)
	}
	if _, peak := g.MemoryBytes(); peak > 65<<20 { // a process that is being killed may go over by a few pages
		t.Errorf("it had %d bytes", peak)
	}
	if err := g.Remove(); err != nil {
		t.Error(err)
	}
}

// TestLimitsMove raises a limit of a group that is in use, and takes it away.
func TestLimitsMove(t *testing.T) {
	r := openTest(t, Limits{MemoryMiB: 64})
	g, err := r.Make("sb1", r.Default(Limits{PIDs: 100}))
	if err != nil {
		t.Fatal(err)
	}
	defer g.Remove()
	for _, l := range []Limits{{MemoryMiB: 64, CPUs: 0.5}, {MemoryMiB: 1024, CPUs: 2}, {}} {
		if err := g.Set(l); err != nil {
			t.Errorf("%+v: %v", l, err)
		}
	}
	cmd, out := start(t, g, "memory")
	if err := cmd.Wait(); err != nil || strings.TrimSpace(out.String()) != "256" {
		t.Errorf("without a limit: %v, %s", err, out)
	}
	if got := r.Adopt("sb1", Limits{PIDs: 7}); got == nil || got.Limits().PIDs != 7 {
		t.Errorf("Adopt() = %+v", got)
	}
	if got := r.Adopt("other", Limits{}); got != nil {
		t.Errorf("Adopt() of one that is not there = %+v", got)
	}
}

// What a process takes in the tests of rates.
const (
	burnt   = 600 * time.Millisecond
	written = 4 << 20
)

// writeThrough writes bytes to a disk, past the page cache.
func writeThrough(path string, n int) error {
	fd, err := unix.Open(path, unix.O_WRONLY|unix.O_CREAT|unix.O_DIRECT|unix.O_CLOEXEC, 0o600)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	page, err := unix.Mmap(-1, 0, 256<<10, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	if err != nil {
		return err
	}
	for ; n > 0; n -= len(page) {
		if _, err := unix.Write(fd, page); err != nil {
			return err
		}
	}
	return nil
}

// takes says how long a process takes in a group with limits.
func takes(t *testing.T, r *Root, l Limits, what string) time.Duration {
	t.Helper()
	g, err := r.Make("sb1", l)
	if err != nil {
		t.Fatal(err)
	}
	defer g.Remove()
	begin := time.Now()
	cmd, out := start(t, g, what)
	if err := cmd.Wait(); err != nil {
		t.Fatal(err)
	}
	if strings.Contains(out.String(), "invalid argument") {
		t.Skip("this file system can't be written past the page cache")
	}
	if out.Len() > 0 {
		t.Fatal(out)
	}
	return time.Since(begin)
}

// TestProcessorTime: a fifth of a processor takes five times as long, at least. The kernel gives some of it ahead.
func TestProcessorTime(t *testing.T) {
	l := Limits{CPUs: 0.2}
	if took := takes(t, openTest(t, l), l, "cpu"); took < 2*time.Second {
		t.Errorf("%v of processor time took %v at a fifth of a processor, want 3 s or so", burnt, took)
	}
}

// TestDisk: so many MiB at one a second take as many seconds. The kernel gives some of it ahead.
func TestDisk(t *testing.T) {
	l := Limits{IOMiBPerS: 1}
	r := openTest(t, l)
	dir, err := os.MkdirTemp("/", "forkd-limits-") // on the disk that is limited
	if err != nil {
		t.Skip(err)
	}
	defer os.RemoveAll(dir)
	t.Setenv("FORKD_LIMITS_FILE", filepath.Join(dir, "file"))
	if took := takes(t, r, l, "disk"); took < 2*time.Second {
		t.Errorf("%d MiB took %v at one a second", written>>20, took)
	}
}

func TestProcesses(t *testing.T) {
	r := openTest(t, Limits{PIDs: 30})
	g, err := r.Make("sb1", Limits{PIDs: 30})
	if err != nil {
		t.Fatal(err)
	}
	defer g.Remove()
	cmd, out := start(t, g, "threads")
	_ = cmd.Wait()
	if g.Events().PIDsHit < 1 {
		t.Errorf("the limit was not hit; it said %q", out)
	}
}

// TestSweep: what an earlier daemon left is ended and removed, what is kept is not.
func TestSweep(t *testing.T) {
	r := openTest(t, Limits{MemoryMiB: 64})
	kept, err := r.Make("kept", Limits{})
	if err != nil {
		t.Fatal(err)
	}
	left, err := r.Make("left", Limits{MemoryMiB: 64})
	if err != nil {
		t.Fatal(err)
	}
	dir, tasks, err := left.Files()
	if err != nil {
		t.Fatal(err)
	}
	defer dir.Close()
	sleep := exec.Command("sleep", "60")
	if err := confine.OnThread(func() error {
		sleep.SysProcAttr = &syscall.SysProcAttr{}
		if dir != nil {
			sleep.SysProcAttr.UseCgroupFD, sleep.SysProcAttr.CgroupFD = true, int(dir.Fd())
		}
		return errors.Join(confine.Enter(tasks), sleep.Start())
	}); err != nil {
		t.Fatal(err)
	}
	ended := make(chan struct{})
	go func() { _ = sleep.Wait(); close(ended) }()
	if err := r.Sweep(func(id string) bool { return id == "kept" }); err != nil {
		t.Error(err)
	}
	<-ended
	for _, g := range []*Group{kept, left} {
		for _, d := range g.dirs() {
			if _, err := os.Stat(d); (err == nil) != (g == kept) {
				t.Errorf("%s: %v", filepath.Base(d), err)
			}
		}
	}
	if err := kept.Remove(); err != nil {
		t.Error(err)
	}
}

func TestBelow(t *testing.T) {
	for _, tt := range []struct{ root, group, want string }{{"/", "/a/b", "/m/a/b"}, {"/", "/", "/m"}, {"/c", "/c/d", "/m/d"}, {"/c", "/x", "/m"}, {"/c", "/c", "/m"}} {
		if got := (mount{"/m", tt.root}).below(tt.group); got != tt.want {
			t.Errorf("group %s of a mount of %s: %s, want %s", tt.group, tt.root, got, tt.want)
		}
	}
}
