package guest

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/forkd/forkd/test/lab/wire"
)

// queued is how many frames of input can wait for a command to read them.
const queued = 64 << 10

// killLimit is how long the processes of a group may take to be gone after they were killed.
const killLimit = 10 * time.Second

// environment is what every command gets.
func environment() []string {
	return []string{"PATH=" + BinDir + ":/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "HOME=/root", "USER=root", "LANG=C.UTF-8",
		"SHELL=/bin/bash", "TERM=linux"}
}

// command is one that runs.
type command struct {
	s     *server
	cmd   *exec.Cmd
	group string
	input chan wire.Frame // closed: there is no more
	ended chan struct{}
	code  int
}

// run runs a command to its end. frames are what comes from the host meanwhile.
func (s *server) run(ctx context.Context, request []byte, frames <-chan wire.Frame, group string) wire.Result {
	var req wire.Request
	if err := json.Unmarshal(request, &req); err != nil || len(req.Args) == 0 {
		return wire.Result{Code: 126, Error: fmt.Sprintf("the request can't be read: %v", err)}
	}
	c := &command{s: s, group: group, input: make(chan wire.Frame, queued), ended: make(chan struct{})}
	if err := c.start(req); err != nil {
		return wire.Result{Code: 127, Error: err.Error()}
	}
	open := true
	for {
		select {
		case f := <-frames:
			switch {
			case (f.Kind == wire.Stdin || f.Kind == wire.Fetch) && open:
				select {
				case c.input <- f:
				case <-c.ended:
				}
			case f.Kind == wire.StdinEnd && open:
				open = false
				close(c.input)
			case f.Kind == wire.Kill:
				c.kill()
			}
		case <-ctx.Done():
			c.kill()
			<-c.ended
			return wire.Result{Code: c.code}
		case <-c.ended:
			return wire.Result{Code: c.code}
		}
	}
}

// start starts the command in its group. On an error nothing of it is left.
func (c *command) start(req wire.Request) (err error) {
	if err := os.Mkdir(c.group, 0o755); err != nil {
		return fmt.Errorf("control group: %w", err)
	}
	var pipes []*os.File
	defer func() {
		for _, f := range pipes {
			f.Close()
		}
		if err != nil {
			c.removeGroup()
		}
	}()
	group, err := os.Open(c.group)
	if err != nil {
		return fmt.Errorf("control group: %w", err)
	}
	defer group.Close()
	var ours [3]*os.File
	for i := range ours {
		r, w, err := os.Pipe()
		if err != nil {
			return fmt.Errorf("pipe: %w", err)
		}
		ours[i] = r
		pipes = append(pipes, w)
		if i == 0 {
			ours[i], pipes[0] = w, r
		}
	}
	_, _ = unix.FcntlInt(ours[0].Fd(), unix.F_SETPIPE_SZ, 1<<20) // fewer switches between writer and reader
	if c.cmd, err = build(req); err != nil {
		return err
	}
	c.cmd.Stdin, c.cmd.Stdout, c.cmd.Stderr = pipes[0], pipes[1], pipes[2]
	c.cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true, UseCgroupFD: true, CgroupFD: int(group.Fd())}
	if err := c.cmd.Start(); err != nil {
		for _, f := range ours {
			f.Close()
		}
		return err
	}
	go c.feed(ours[0])
	go c.wait(ours[1], ours[2])
	return nil
}

// build makes the process of a request. Its program is looked for in the PATH that it will have.
func build(req wire.Request) (*exec.Cmd, error) {
	env := append(environment(), req.Env...)
	if err := os.Setenv("PATH", environment()[0][len("PATH="):]); err != nil {
		return nil, err
	}
	path, err := exec.LookPath(req.Args[0])
	if err != nil {
		return nil, err
	}
	cmd := &exec.Cmd{Path: path, Args: req.Args, Env: env, Dir: WorkDir}
	if req.Dir != "" {
		cmd.Dir = req.Dir
	}
	return cmd, nil
}

// outputPiece is what a virtio port takes at a time.
const outputPiece = 32 << 10

// content is the input that a frame holds or that the mailbox disk holds for it. It is valid until the next call.
func (s *server) content(f wire.Frame) ([]byte, error) {
	if f.Kind != wire.Fetch {
		return f.Payload, nil
	}
	var at wire.Place
	if err := json.Unmarshal(f.Payload, &at); err != nil {
		return nil, fmt.Errorf("place in the mailbox: %w", err)
	}
	if at.Length > len(s.buf) {
		return nil, fmt.Errorf("%d bytes in the mailbox: the limit is %d", at.Length, len(s.buf))
	}
	if _, err := s.mail.ReadAt(s.buf[:(at.Length+wire.MailAlign-1)/wire.MailAlign*wire.MailAlign], at.Offset); err != nil {
		return nil, fmt.Errorf("mailbox: %w", err)
	}
	return s.buf[:at.Length], nil
}

// feed writes the input until there is no more or the command has ended.
func (c *command) feed(w *os.File) {
	defer w.Close()
	broken := false
	for {
		select {
		case f, more := <-c.input:
			if !more {
				return
			}
			b, err := c.s.content(f)
			if err != nil {
				fmt.Fprintln(os.Stderr, "input:", err)
				c.kill()
				return
			}
			if !broken {
				_, err := w.Write(b)
				broken = err != nil // nobody reads it: what follows is dropped
			}
			if err := c.s.send(wire.Taken, wire.CountPayload(len(b))); err != nil {
				return
			}
		case <-c.ended:
			return
		}
	}
}

// wait sends the output until the command has ended, and then ends what it left running.
func (c *command) wait(stdout, stderr *os.File) {
	var copies sync.WaitGroup
	for kind, r := range map[wire.Kind]*os.File{wire.Stdout: stdout, wire.Stderr: stderr} {
		copies.Go(func() { c.forward(kind, r) })
	}
	err := c.cmd.Wait()
	c.kill()
	copies.Wait()
	var exit *exec.ExitError
	switch {
	case err == nil:
	case errors.As(err, &exit):
		status := exit.Sys().(syscall.WaitStatus)
		if c.code = status.ExitStatus(); status.Signaled() {
			c.code = 128 + int(status.Signal())
		}
	default:
		c.code = 126
	}
	c.removeGroup()
	close(c.ended)
}

func (c *command) forward(kind wire.Kind, r *os.File) {
	defer r.Close()
	buf := make([]byte, outputPiece)
	for {
		n, err := r.Read(buf)
		if n > 0 && c.s.send(kind, buf[:n]) != nil {
			return
		}
		if err != nil {
			return
		}
	}
}

// kill ends every process of the group, and of groups below it.
func (c *command) kill() {
	_ = os.WriteFile(filepath.Join(c.group, "cgroup.kill"), []byte("1"), 0) // there is no such file once the group is gone
}

// removeGroup removes the group and those the command made below it, once the killed processes are gone.
func (c *command) removeGroup() {
	deadline := time.Now().Add(killLimit)
	for {
		b, err := os.ReadFile(filepath.Join(c.group, "cgroup.events"))
		if err != nil || bytes.Contains(b, []byte("populated 0")) {
			break
		}
		if time.Now().After(deadline) {
			fmt.Fprintln(os.Stderr, "processes of", c.group, "can't be killed")
			return
		}
		time.Sleep(2 * time.Millisecond) // cgroup.events can be polled, but this is rare and short
	}
	var dirs []string
	_ = filepath.WalkDir(c.group, func(path string, d fs.DirEntry, err error) error {
		if err == nil && d.IsDir() {
			dirs = append(dirs, path)
		}
		return nil
	})
	slices.Reverse(dirs) // the deepest first
	for _, dir := range dirs {
		if err := unix.Rmdir(dir); err != nil {
			fmt.Fprintln(os.Stderr, "remove", dir, err)
		}
	}
}
