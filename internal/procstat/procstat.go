// Package procstat reads what the kernel says of a process that runs a machine: its state and start, processor time and disk.
//
// It is the one place that takes /proc/PID/stat apart, but for the guest's agent, which has no package of the host's. Guest memory is internal/memory's, which knows what is shared, and traffic
// internal/hostnet's; limits are set elsewhere.
package procstat

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strconv"
	"strings"
	"time"
)

// Usage is what a process has used since it started.
type Usage struct {
	CPU                     time.Duration // user and system time of all threads
	ReadBytes, WrittenBytes int64         // from and to disks
}

// tick is the unit of CPU times in /proc: USER_HZ, which is 100 on every architecture of ours.
const tick = time.Second / 100

// Read reads the figures of a process. The error wraps fs.ErrNotExist when it is gone.
func Read(pid int) (Usage, error) {
	var u Usage
	stat, err := ReadStat(pid)
	if err != nil {
		return Usage{}, gone(pid, err)
	}
	u.CPU = stat.CPU
	if u.ReadBytes, u.WrittenBytes, err = disk(pid); err != nil && !errors.Is(err, fs.ErrPermission) {
		return Usage{}, gone(pid, err)
	}
	return u, nil
}

func gone(pid int, err error) error { return fmt.Errorf("figures of process %d: %w", pid, err) }

func file(pid int, name string) ([]byte, error) {
	return os.ReadFile(fmt.Sprintf("/proc/%d/%s", pid, name))
}

// Stat is what the kernel says of a process or thread in one line (proc(5)).
type Stat struct {
	State      byte // as in ps: 'R', 'S', 'Z', …
	Parent     int
	CPU        time.Duration // user and system time
	StartTicks uint64        // when it started, in clock ticks since boot: with its id, one process for all time since then
}

// Ended says whether it has ended, and only was not reaped yet.
func (s Stat) Ended() bool { return s.State == 'Z' || s.State == 'X' }

// ReadStat reads a process's line. The error wraps fs.ErrNotExist when it is gone.
func ReadStat(pid int) (Stat, error) { return readStat(fmt.Sprintf("/proc/%d/stat", pid)) }

// ReadThread reads the line of one thread.
func ReadThread(pid, tid int) (Stat, error) {
	return readStat(fmt.Sprintf("/proc/%d/task/%d/stat", pid, tid))
}

func readStat(path string) (Stat, error) {
	data, err := os.ReadFile(path)
	if err != nil {
		return Stat{}, err
	}
	s, err := parseStat(data)
	if err != nil {
		return Stat{}, fmt.Errorf("%s is %.100q: %w", path, data, err)
	}
	return s, nil
}

// parseStat takes a line apart. Its second field is the name in parentheses, which may have anything in it.
func parseStat(data []byte) (s Stat, err error) {
	i := bytes.LastIndexByte(data, ')')
	fields := strings.Fields(string(data[i+1:])) // from the third on
	if i < 0 || len(fields) < 20 {
		return s, errors.New("unexpected form")
	}
	number := func(at int) uint64 {
		n, failed := strconv.ParseUint(fields[at-3], 10, 64)
		err = errors.Join(err, failed)
		return n
	}
	s.State, s.Parent = fields[0][0], int(number(4))
	s.CPU, s.StartTicks = time.Duration(number(14)+number(15))*tick, number(22)
	return s, err
}

func disk(pid int) (read, written int64, err error) {
	data, err := file(pid, "io")
	if err != nil {
		return 0, 0, err
	}
	for line := range strings.Lines(string(data)) {
		name, value, _ := strings.Cut(strings.TrimSpace(line), ": ")
		switch name {
		case "read_bytes":
			read, err = strconv.ParseInt(value, 10, 64)
		case "write_bytes":
			written, err = strconv.ParseInt(value, 10, 64)
		}
		if err != nil {
			return 0, 0, err
		}
	}
	return read, written, nil
}
