package hostcheck

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/forkd/forkd/internal/hostcpu"
)

// programLimit is how long a program that is asked for its version may take.
const programLimit = 10 * time.Second

// Local is the machine this process runs on.
func Local() Host {
	return Host{
		Root:     os.DirFS("/"),
		UID:      os.Geteuid(),
		LookPath: lookPath,
		Output:   output,
		OpenRW:   openRW,
		Memfd:    sealMemfd,
		DiskFree: diskFree,
		Files:    fileLimit,
		TSC:      hostcpu.FindTSC,
	}
}

// lookPath also looks where system tools are and an ordinary user's PATH does not lead.
func lookPath(program string) (string, error) {
	for _, dir := range []string{"", "/usr/sbin", "/sbin"} {
		if path, err := exec.LookPath(filepath.Join(dir, program)); err == nil {
			return path, nil
		}
	}
	return "", fmt.Errorf("%s: %w", program, exec.ErrNotFound)
}

func output(ctx context.Context, program string, args ...string) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, programLimit)
	defer cancel()
	cmd := exec.CommandContext(ctx, program, args...)
	cmd.WaitDelay = time.Second
	out, err := cmd.CombinedOutput()
	if err != nil {
		return "", fmt.Errorf("%w: %s", err, strings.TrimSpace(string(out)))
	}
	return string(out), nil
}

func openRW(path string) error {
	f, err := os.OpenFile(path, os.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		var pathErr *fs.PathError
		if errors.As(err, &pathErr) {
			return pathErr.Err
		}
		return err
	}
	return f.Close()
}

func sealMemfd() error {
	fd, err := unix.MemfdCreate("forkd-check", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	if err != nil {
		return fmt.Errorf("memfd_create: %w", err)
	}
	defer unix.Close(fd)
	const seals = unix.F_SEAL_SEAL | unix.F_SEAL_SHRINK | unix.F_SEAL_GROW | unix.F_SEAL_WRITE
	if _, err := unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, seals); err != nil {
		return fmt.Errorf("seal: %w", err)
	}
	return nil
}

func diskFree(path string) (int64, error) {
	path, err := filepath.Abs(path)
	if err != nil {
		return 0, err
	}
	for {
		var s unix.Statfs_t
		err := unix.Statfs(path, &s)
		if err == nil {
			return int64(s.Bavail) * s.Bsize, nil
		}
		parent := filepath.Dir(path)
		if !errors.Is(err, unix.ENOENT) || parent == path {
			return 0, fmt.Errorf("%s: %w", path, err)
		}
		path = parent
	}
}

func fileLimit() (uint64, error) {
	var limit unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &limit); err != nil {
		return 0, fmt.Errorf("getrlimit: %w", err)
	}
	return limit.Max, nil // Go raises the soft limit to it
}
