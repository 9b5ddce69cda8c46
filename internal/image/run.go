package image

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"time"
)

// command is a program a build runs.
type command struct {
	name    string
	args    []string
	dir     string
	env     []string      // added to the little that is passed on
	timeout time.Duration // the longest it may take
	line    func(string)  // called with every line of standard error; may be nil
	// isolated gives it mount and PID namespaces of its own: whatever it mounts or starts is gone when it is.
	isolated bool
}

// runner runs commands. Tests replace it with one that fails at the n-th.
type runner interface {
	// run returns what the command wrote to standard output. When ctx ends the command and all it started are killed.
	run(ctx context.Context, c command) ([]byte, error)
}

// packageOf names the Debian package of commands that may be missing.
func packageOf(command string) string {
	switch command {
	case "mkfs.erofs":
		return "erofs-utils"
	case "apt-cache", "apt-get":
		return "apt"
	case "xz":
		return "xz-utils"
	}
	return command
}

type osRunner struct{}

func (osRunner) run(ctx context.Context, c command) ([]byte, error) {
	path, err := lookPath(c.name)
	if err != nil {
		return nil, fmt.Errorf("%s is not installed: run: apt-get install %s", c.name, packageOf(c.name))
	}
	ctx, cancel := context.WithTimeoutCause(ctx, c.timeout, fmt.Errorf("took longer than %s", c.timeout))
	defer cancel()

	cmd := exec.CommandContext(ctx, path, c.args...)
	cmd.Dir = c.dir
	cmd.Env = append(environment(), c.env...)
	var stdout bytes.Buffer
	stderr := &lineWriter{line: c.line}
	cmd.Stdout, cmd.Stderr = &stdout, stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	if c.isolated {
		cmd.SysProcAttr.Cloneflags = syscall.CLONE_NEWPID
		cmd.SysProcAttr.Unshareflags = syscall.CLONE_NEWNS // this one also stops mounts from spreading
	}
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) }
	cmd.WaitDelay = 5 * time.Second

	// Pdeathsig goes by the thread that started the process, not by our process.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	err = cmd.Run()
	if err == nil {
		return stdout.Bytes(), nil
	}
	if ctx.Err() != nil {
		return nil, fmt.Errorf("%s: %w", c.name, context.Cause(ctx))
	}
	var exit *exec.ExitError
	if errors.As(err, &exit) {
		return nil, fmt.Errorf("%s failed (%s)%s", c.name, exit.ProcessState, stderr.tail())
	}
	return nil, fmt.Errorf("run %s: %w", c.name, err)
}

// lookPath finds a program also where system tools are and an ordinary user's PATH does not lead.
func lookPath(name string) (string, error) {
	for _, dir := range []string{"", "/usr/sbin", "/sbin"} {
		if path, err := exec.LookPath(filepath.Join(dir, name)); err == nil {
			return path, nil
		}
	}
	return "", exec.ErrNotFound
}

// environment is what commands get of ours: where programs and proxies are, and nothing that would make a build differ.
func environment() []string {
	env := []string{"LC_ALL=C.UTF-8", "DEBIAN_FRONTEND=noninteractive", "HOME=/root",
		"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}
	for _, kv := range os.Environ() {
		name, _, _ := strings.Cut(kv, "=")
		switch strings.ToLower(name) {
		case "http_proxy", "https_proxy", "ftp_proxy", "no_proxy", "all_proxy":
			env = append(env, kv)
		}
	}
	return env
}

// lineWriter hands on lines and keeps the last ones for an error message.
type lineWriter struct {
	line    func(string)
	partial []byte
	last    []string
}

// keptLines is how many lines of a failed command's output an error shows.
const keptLines = 12

func (w *lineWriter) Write(p []byte) (int, error) {
	w.partial = append(w.partial, p...)
	for {
		i := bytes.IndexAny(w.partial, "\n\r")
		if i < 0 {
			return len(p), nil
		}
		w.add(string(w.partial[:i]))
		w.partial = w.partial[i+1:]
	}
}

func (w *lineWriter) add(l string) {
	l = strings.TrimSpace(l)
	if l == "" {
		return
	}
	if w.last = append(w.last, l); len(w.last) > keptLines {
		w.last = w.last[1:]
	}
	if w.line != nil {
		w.line(l)
	}
}

func (w *lineWriter) tail() string {
	w.add(string(w.partial))
	w.partial = nil
	if len(w.last) == 0 {
		return ""
	}
	return ":\n  " + strings.Join(w.last, "\n  ")
}
