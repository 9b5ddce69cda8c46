package vmmtest

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/forkd/forkd/internal/procstat"
)

// eventually retries check until it returns "", and fails the test with what it said last.
func eventually(t *testing.T, d time.Duration, check func() string) {
	t.Helper()
	deadline := time.Now().Add(d)
	for pause := time.Millisecond; ; pause = min(2*pause, 100*time.Millisecond) {
		problem := check()
		if problem == "" {
			return
		}
		if time.Now().After(deadline) {
			t.Error(problem)
			return
		}
		time.Sleep(pause) // what /proc shows can't be awaited
	}
}

// pids lists the processes of this host.
func pids() []int {
	entries, _ := os.ReadDir("/proc")
	var list []int
	for _, entry := range entries {
		if pid, err := strconv.Atoi(entry.Name()); err == nil {
			list = append(list, pid)
		}
	}
	return list
}

// children lists our child processes, zombies included.
func children() []int {
	var list []int
	for _, pid := range pids() {
		if s, err := procstat.ReadStat(pid); err == nil && s.Parent == os.Getpid() {
			list = append(list, pid)
		}
	}
	return list
}

// holders lists the other processes that have f open.
func holders(f *os.File) []int {
	want, err := f.Stat()
	if err != nil {
		return nil
	}
	var list []int
	for _, pid := range pids() {
		if pid == os.Getpid() {
			continue
		}
		fds, _ := filepath.Glob(fmt.Sprintf("/proc/%d/fd/*", pid))
		if slices.ContainsFunc(fds, func(fd string) bool { return sameFile(fd, want) }) {
			list = append(list, pid)
		}
	}
	return list
}

// sameFile says whether path leads to the very file, be it one without a name.
func sameFile(path string, want os.FileInfo) bool {
	got, err := os.Stat(path)
	return err == nil && os.SameFile(got, want)
}

// checkNoProcess waits until no process but ours holds f and we have no more children than before.
func checkNoProcess(t *testing.T, f *os.File, before []int) {
	t.Helper()
	eventually(t, 5*time.Second, func() string {
		if held := holders(f); len(held) > 0 {
			return fmt.Sprintf("processes %v still hold the guest's memory", held)
		}
		for _, pid := range children() {
			if !slices.Contains(before, pid) {
				return fmt.Sprintf("child process %d is left: %s", pid, describe(pid))
			}
		}
		return ""
	})
}

func describe(pid int) string {
	s, _ := procstat.ReadStat(pid)
	cmdline, _ := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid))
	return fmt.Sprintf("state %c, %s", s.State, strings.ReplaceAll(string(cmdline), "\x00", " "))
}

// descriptors lists what our open descriptors are.
func descriptors() []string {
	links, _ := filepath.Glob("/proc/self/fd/*")
	var list []string
	for _, link := range links {
		if target, err := os.Readlink(link); err == nil {
			list = append(list, target)
		}
	}
	return list
}

// mapping is one line of /proc/PID/maps.
type mapping struct {
	perms string
	bytes uint64
}

// mappings lists how a process maps f.
func mappings(pid int, f *os.File) ([]mapping, error) {
	info, err := f.Stat()
	if err != nil {
		return nil, err
	}
	inode := strconv.FormatUint(info.Sys().(*syscall.Stat_t).Ino, 10)
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/maps", pid))
	if err != nil {
		return nil, err
	}
	var list []mapping
	for line := range strings.Lines(string(b)) {
		fields := strings.Fields(line)
		if len(fields) < 6 || fields[4] != inode || !strings.HasPrefix(fields[5], "/memfd:") {
			continue
		}
		var from, to uint64
		if _, err := fmt.Sscanf(fields[0], "%x-%x", &from, &to); err != nil {
			return nil, fmt.Errorf("maps of process %d: %q: %w", pid, line, err)
		}
		list = append(list, mapping{fields[1], to - from})
	}
	return list, nil
}
