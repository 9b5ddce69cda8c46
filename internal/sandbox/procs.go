package sandbox

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/forkd/forkd/internal/procstat"
	"github.com/forkd/forkd/internal/vmm"
)

// machineProcess is a process that is provably a machine of ours.
type machineProcess struct {
	pid   int
	ticks uint64
	dir   string
}

// searcher looks for processes that run machines below a directory. What proves it is one of:
//   - the process holds a listening socket that is bound in the machine's directory;
//   - a variable FORKD_… in its environment names the directory;
//   - the record in the directory names it (pid and start time), and it works in the directory or was started with its name.
//
// A shell that stands in such a directory, or an editor that was called with a file there, is none of that.
type searcher struct {
	root      string // the directory of machine directories
	dirIn     *regexp.Regexp
	listeners map[string]string // socket inode → machine directory
	records   map[int]vmm.Process
}

func newSearcher(root string) (*searcher, error) {
	s := &searcher{root: root, dirIn: regexp.MustCompile(regexp.QuoteMeta(root+"/") + `[a-z0-9]+`), listeners: map[string]string{}, records: map[int]vmm.Process{}}
	if err := s.readListeners(); err != nil {
		return nil, fmt.Errorf("look for machines: %w", err)
	}
	return s, s.readRecords()
}

// readListeners reads /proc/net/unix: "Num RefCount Protocol Flags Type St Inode Path"; bit 16 of Flags is for a listening socket.
func (s *searcher) readListeners() error {
	f, err := os.Open("/proc/net/unix")
	if err != nil {
		return err
	}
	defer func() { _ = f.Close() }()
	for lines := bufio.NewScanner(f); lines.Scan(); {
		fields := strings.Fields(lines.Text())
		if len(fields) != 8 {
			continue
		}
		flags, err := strconv.ParseUint(fields[3], 16, 64)
		if err == nil && flags&(1<<16) != 0 && strings.HasPrefix(fields[7], s.root+"/") {
			s.listeners[fields[6]] = filepath.Dir(fields[7])
		}
	}
	return nil
}

func (s *searcher) readRecords() error {
	names, err := filepath.Glob(filepath.Join(s.root, "*", vmm.ProcessFile))
	if err != nil {
		return fmt.Errorf("look for machines: %w", err)
	}
	for _, name := range names {
		var p vmm.Process
		b, err := readRecord(name)
		if err == nil && json.Unmarshal(b, &p) == nil && p.Dir == filepath.Dir(name) {
			s.records[p.PID] = p
		}
	}
	return nil
}

// readRecord reads a file in a directory that may be a monitor's own, who may have put anything there.
func readRecord(name string) ([]byte, error) {
	f, err := os.OpenFile(name, os.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil, err
	}
	defer func() { _ = f.Close() }()
	if fi, err := f.Stat(); err != nil || !fi.Mode().IsRegular() {
		return nil, fmt.Errorf("%s is no file: %w", name, errors.Join(err, os.ErrInvalid))
	}
	const most = 64 << 10
	return io.ReadAll(io.LimitReader(f, most))
}

// find returns all machines that live, whoever started them.
func (s *searcher) find() ([]machineProcess, error) {
	entries, err := os.ReadDir("/proc")
	if err != nil {
		return nil, fmt.Errorf("look for machines: %w", err)
	}
	var found []machineProcess
	for _, e := range entries {
		pid, err := strconv.Atoi(e.Name())
		if err != nil || pid == os.Getpid() {
			continue
		}
		ticks, err := startTicks(pid)
		if err != nil {
			continue // it is gone
		}
		if dir := s.dirOf(pid, ticks); dir != "" {
			found = append(found, machineProcess{pid, ticks, dir})
		}
	}
	return found, nil
}

// dirOf returns the directory of the machine that a process provably runs, or "".
func (s *searcher) dirOf(pid int, ticks uint64) string {
	proc := fmt.Sprintf("/proc/%d/", pid)
	environ, _ := os.ReadFile(proc + "environ") // unreadable: not one of ours
	for v := range bytes.SplitSeq(environ, []byte{0}) {
		if bytes.HasPrefix(v, []byte("FORKD_")) {
			if dir := s.dirIn.Find(v); dir != nil {
				return string(dir)
			}
		}
	}
	if p, ok := s.records[pid]; ok && p.StartTicks == ticks {
		cwd, _ := os.Readlink(proc + "cwd")
		cmdline, _ := os.ReadFile(proc + "cmdline")
		if cwd == p.Dir || bytes.Contains(cmdline, []byte(p.Dir)) || bytes.Contains(environ, []byte(p.Dir)) {
			return p.Dir
		}
	}
	return s.heldSocket(proc + "fd/")
}

func (s *searcher) heldSocket(fds string) string {
	if len(s.listeners) == 0 {
		return ""
	}
	entries, err := os.ReadDir(fds)
	if err != nil {
		return ""
	}
	for _, e := range entries {
		target, err := os.Readlink(fds + e.Name())
		if err != nil {
			continue
		}
		if inode, ok := strings.CutPrefix(target, "socket:["); ok {
			if dir := s.listeners[strings.TrimSuffix(inode, "]")]; dir != "" {
				return dir
			}
		}
	}
	return ""
}

// killWait bounds the wait for the end of a killed process: one in an uninterruptible system call takes as long as that does.
const killWait = 10 * time.Second

// kill ends that very process and waits until it is gone.
func (p machineProcess) kill() error {
	fd, err := unix.PidfdOpen(p.pid, 0)
	if errors.Is(err, unix.ESRCH) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("process %d: %w", p.pid, err)
	}
	defer func() { _ = unix.Close(fd) }()
	// The pidfd holds on to whatever the number named when it was opened: only now is it worth looking at the start time.
	if ticks, err := startTicks(p.pid); err != nil || ticks != p.ticks {
		return nil
	}
	if err := unix.PidfdSendSignal(fd, unix.SIGKILL, nil, 0); err != nil && !errors.Is(err, unix.ESRCH) {
		return fmt.Errorf("kill process %d: %w", p.pid, err)
	}
	deadline := time.Now().Add(killWait)
	for {
		n, err := unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, int(time.Until(deadline).Milliseconds()))
		switch {
		case errors.Is(err, unix.EINTR):
		case err != nil:
			return fmt.Errorf("wait for process %d: %w", p.pid, err)
		case n == 0:
			return fmt.Errorf("process %d was killed and is not gone after %v", p.pid, killWait)
		default:
			return nil
		}
	}
}

// startTicks is when a process started, in clock ticks since boot. A process that has ended and was not reaped counts as gone.
func startTicks(pid int) (uint64, error) {
	s, err := procstat.ReadStat(pid)
	if err == nil && s.Ended() {
		err = os.ErrProcessDone
	}
	return s.StartTicks, err
}
