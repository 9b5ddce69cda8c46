package e2e

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// pids lists the processes of this host.
func pids() []int {
	entries, _ := os.ReadDir("/proc")
	var list []int
	for _, e := range entries {
		if pid, err := strconv.Atoi(e.Name()); err == nil {
			list = append(list, pid)
		}
	}
	return list
}

// processesIn describes the processes that work below dir, whose program is there, or that run a machine of a directory there.
func processesIn(dir string) (found []string) {
	for _, pid := range pidsIn(dir) {
		found = append(found, describe(pid))
	}
	return found
}

func pidsIn(dir string) (found []int) {
	for _, pid := range pids() {
		if pid == os.Getpid() {
			continue
		}
		cwd, _ := os.Readlink(fmt.Sprintf("/proc/%d/cwd", pid))
		cmdline, _ := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid))
		if strings.HasPrefix(cwd, dir+"/") || bytes.HasPrefix(cmdline, []byte(dir+"/")) || strings.HasPrefix(machineOf(pid), dir+"/") {
			found = append(found, pid)
		}
	}
	return found
}

func describe(pid int) string {
	cmdline, _ := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid))
	cwd, _ := os.Readlink(fmt.Sprintf("/proc/%d/cwd", pid))
	return fmt.Sprintf("process %d in %s: %.150s", pid, cwd, strings.ReplaceAll(string(cmdline), "\x00", " "))
}

// endProcesses kills what pidsIn finds, each by a descriptor of that very process.
func endProcesses(dir string) {
	for _, pid := range pidsIn(dir) {
		fd, err := unix.PidfdOpen(pid, 0)
		if err != nil {
			continue
		}
		if slices.Contains(pidsIn(dir), pid) { // still the one that was found
			_ = unix.PidfdSendSignal(fd, unix.SIGKILL, nil, 0)
			_, _ = unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, 10_000)
		}
		unix.Close(fd)
	}
}

// machineOf is the directory of the machine that a process runs; "" when it runs none.
func machineOf(pid int) string {
	environ, _ := os.ReadFile(fmt.Sprintf("/proc/%d/environ", pid))
	for variable := range strings.SplitSeq(string(environ), "\x00") {
		if dir, ok := strings.CutPrefix(variable, "FORKD_MACHINE="); ok {
			return dir
		}
	}
	return ""
}

// machinesIn returns the monitors of a daemon's run directory: their pids by the names of their machines' directories.
func machinesIn(run string) map[string]int {
	found := map[string]int{}
	for _, pid := range pids() {
		if name, ok := strings.CutPrefix(machineOf(pid), filepath.Join(run, "vm")+"/"); ok {
			found[name] = pid
		}
	}
	return found
}

// zombies lists the ended children that a process has not waited for.
func zombies(parent int) (found []int) {
	for _, pid := range pids() {
		state, ppid := stat(pid)
		if state == "Z" && ppid == parent {
			found = append(found, pid)
		}
	}
	return found
}

// stat reads the state and the parent of a process (proc(5)); the name before them may hold anything.
func stat(pid int) (state string, parent int) {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return "", 0
	}
	fields := strings.Fields(string(b[bytes.LastIndexByte(b, ')')+1:]))
	parent, _ = strconv.Atoi(fields[1])
	return fields[0], parent
}

// unmountBelow unmounts what is mounted below dir and returns what that was.
func unmountBelow(dir string) (found []string) {
	mounts, _ := os.ReadFile("/proc/self/mountinfo")
	for line := range strings.Lines(string(mounts)) {
		if f := strings.Fields(line); len(f) > 4 && strings.HasPrefix(f[4], dir+"/") {
			found = append(found, f[4])
			_ = unix.Unmount(f[4], unix.MNT_DETACH)
		}
	}
	return found
}

// entries lists the names in a directory.
func entries(dir string) []string {
	list, _ := os.ReadDir(dir)
	var names []string
	for _, e := range list {
		names = append(names, e.Name())
	}
	return names
}
