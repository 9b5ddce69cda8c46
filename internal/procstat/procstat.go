// Package procstat reads what the kernel counts of a process that runs a machine: processor time and disk.
//
// It is for figures that people and monitors look at. Guest memory is internal/memory's, which knows what is shared, and traffic
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
	var err error
	if u.CPU, err = cpu(pid); err != nil {
		return Usage{}, gone(pid, err)
	}
	if u.ReadBytes, u.WrittenBytes, err = disk(pid); err != nil && !errors.Is(err, fs.ErrPermission) {
		return Usage{}, gone(pid, err)
	}
	return u, nil
}

func gone(pid int, err error) error { return fmt.Errorf("figures of process %d: %w", pid, err) }

func file(pid int, name string) ([]byte, error) {
	return os.ReadFile(fmt.Sprintf("/proc/%d/%s", pid, name))
}

// cpu is the 14th and 15th field of stat; the second, the name, may have anything in it.
func cpu(pid int) (time.Duration, error) {
	data, err := file(pid, "stat")
	if err != nil {
		return 0, err
	}
	_, rest, ok := bytes.Cut(data[max(0, bytes.LastIndexByte(data, ')')):], []byte(") "))
	fields := strings.Fields(string(rest))
	if !ok || len(fields) < 13 {
		return 0, fmt.Errorf("stat is %.100q", data)
	}
	user, err := strconv.ParseInt(fields[11], 10, 64)
	if err != nil {
		return 0, err
	}
	system, err := strconv.ParseInt(fields[12], 10, 64)
	return time.Duration(user+system) * tick, err
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
