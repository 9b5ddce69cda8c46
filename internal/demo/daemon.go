package demo

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/forkd/forkd/client"
)

const (
	startLimit = 60 * time.Second
	stopLimit  = 60 * time.Second
	startPoll  = 20 * time.Millisecond
)

// daemon is the demo's own daemon.
type daemon struct {
	client *client.Client
	cmd    *exec.Cmd
	log    bytes.Buffer
	ended  chan error
	runDir string // short: sockets have short paths
	data   string
}

// startDaemon starts `forkd serve` on directories of the demo's own and waits until it answers.
func startDaemon(ctx context.Context, opt Options) (_ *daemon, err error) {
	run, err := os.MkdirTemp("", "forkd-demo-")
	if err != nil {
		return nil, fmt.Errorf("run directory: %w", err)
	}
	d := &daemon{runDir: run, data: filepath.Join(opt.Cache, "demo"), ended: make(chan error, 1)}
	defer func() {
		if err != nil {
			err = errors.Join(err, d.remove())
		}
	}()
	socket := filepath.Join(run, "s")
	args := append([]string{"serve", "--data", d.data, "--run", run, "--cache", opt.Cache, "--socket", socket, "--listen", ""}, opt.Serve...)
	d.cmd = exec.Command(opt.Program, args...)
	d.cmd.Stdout, d.cmd.Stderr = &d.log, &d.log
	d.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true} // an interrupt at the terminal is ours to handle
	if err := d.cmd.Start(); err != nil {
		return nil, fmt.Errorf("start the daemon: %w", err)
	}
	go func() { d.ended <- d.cmd.Wait() }()
	if d.client, err = client.New(client.Config{URL: socket}); err != nil {
		return nil, errors.Join(err, d.stop())
	}
	ctx, cancel := context.WithTimeout(ctx, startLimit)
	defer cancel()
	tick := time.NewTicker(startPoll)
	defer tick.Stop()
	for {
		if d.client.Health(ctx) == nil {
			return d, nil
		}
		select {
		case err := <-d.ended:
			d.ended <- err
			return nil, fmt.Errorf("the daemon ended at once: %s", strings.TrimSpace(d.log.String()))
		case <-ctx.Done():
			return nil, errors.Join(fmt.Errorf("the daemon does not answer: %w", ctx.Err()), d.stop())
		case <-tick.C:
		}
	}
}

// stop asks the daemon to end and waits. It is killed when it does not.
func (d *daemon) stop() error {
	d.cmd.Process.Signal(syscall.SIGTERM)
	select {
	case err := <-d.ended:
		d.ended <- err
		if err != nil {
			return fmt.Errorf("the daemon ended with %w: %s", err, strings.TrimSpace(d.log.String()))
		}
		return nil
	case <-time.After(stopLimit):
		d.cmd.Process.Kill()
		return fmt.Errorf("the daemon did not end within %v of SIGTERM and was killed", stopLimit)
	}
}

// remove deletes the demo's directories but for the image and what makes its build faster.
func (d *daemon) remove() error { return os.RemoveAll(d.runDir) }

// Leftovers are what the daemon left behind after it was shut down.
type Leftovers struct {
	Processes  []string `json:"processes"`
	Namespaces []string `json:"namespaces"`
	Cgroups    []string `json:"cgroups"`
	Files      []string `json:"files"`
}

func (l Leftovers) count() int {
	return len(l.Processes) + len(l.Namespaces) + len(l.Cgroups) + len(l.Files)
}

// leftovers looks for processes that run in the demo's directories, for namespaces and cgroups that carry their name, and for files.
func (d *daemon) leftovers() Leftovers {
	return Leftovers{
		Processes:  processesIn(d.runDir),
		Namespaces: named("/run/netns", filepath.Base(d.runDir)),
		Cgroups:    named("/sys/fs/cgroup", filepath.Base(d.runDir)),
		Files:      append(filesIn(d.runDir), filesIn(filepath.Join(d.data, "snapshots"))...),
	}
}

// processesIn lists processes whose working directory is in dir or whose command line or environment names it.
func processesIn(dir string) (found []string) {
	entries, _ := os.ReadDir("/proc")
	for _, e := range entries {
		pid, err := strconv.Atoi(e.Name())
		if err != nil || pid == os.Getpid() {
			continue
		}
		cwd, _ := os.Readlink(filepath.Join("/proc", e.Name(), "cwd"))
		cmdline, _ := os.ReadFile(filepath.Join("/proc", e.Name(), "cmdline"))
		environ, _ := os.ReadFile(filepath.Join("/proc", e.Name(), "environ"))
		if strings.HasPrefix(cwd, dir) || bytes.Contains(cmdline, []byte(dir)) || bytes.Contains(environ, []byte("FORKD_MACHINE="+dir)) {
			found = append(found, fmt.Sprintf("%d %s", pid, firstWord(cmdline)))
		}
	}
	return found
}

func firstWord(cmdline []byte) string {
	word, _, _ := bytes.Cut(cmdline, []byte{0})
	return string(word)
}

// named lists what is below root and has the name in its own.
func named(root, name string) (found []string) {
	filepath.WalkDir(root, func(path string, e fs.DirEntry, err error) error {
		if err == nil && strings.Contains(e.Name(), name) {
			found = append(found, path)
		}
		return nil
	})
	return found
}

// filesIn lists files, sockets and whatever else is not a directory below dir.
func filesIn(dir string) (found []string) {
	filepath.WalkDir(dir, func(path string, e fs.DirEntry, err error) error {
		if err == nil && !e.IsDir() {
			found = append(found, path)
		}
		return nil
	})
	return found
}
