package main

import (
	"context"
	"fmt"
	"os"
	"path"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/forkd/forkd/test/lab"
	"github.com/forkd/forkd/test/lab/guest"
)

type buildCmd struct{}

// Run builds and boots.
func (*buildCmd) Run(ctx context.Context, c *cli) error {
	return c.with(ctx, "", func(*lab.Lab) error { return nil })
}

type runCmd struct {
	Put   []string `placeholder:"FILE[:PATH]" help:"Copy a file or a directory in first; without a path to the directory for programs, which is in the PATH."`
	Get   []string `placeholder:"PATH[:DIR]" help:"Copy a file or a directory out afterwards; without a directory to the current one."`
	Env   []string `short:"e" placeholder:"K=V" help:"A variable for the command."`
	Stdin bool     `help:"Hand on the standard input."`
	Args  []string `arg:"" passthrough:"" help:"The command."`
}

// Run runs the command. Its exit code is ours.
func (r *runCmd) Run(ctx context.Context, c *cli) error {
	return c.with(ctx, "", func(l *lab.Lab) error {
		if err := put(ctx, l, r.Put); err != nil {
			return err
		}
		args := r.Args
		if args[0] == "--" && len(args) > 1 {
			args = args[1:]
		}
		command := lab.Command{Args: args, Env: r.Env, Stdout: os.Stdout, Stderr: os.Stderr}
		if r.Stdin {
			command.Stdin = os.Stdin
		}
		code, err := l.Run(ctx, command)
		if err != nil {
			return err
		}
		for _, get := range r.Get {
			src, dir, found := strings.Cut(get, ":")
			if !found {
				dir = "."
			}
			if err := l.Get(ctx, src, dir); err != nil {
				return err
			}
		}
		if code != 0 {
			return exitCode(code)
		}
		return nil
	})
}

func put(ctx context.Context, l *lab.Lab, files []string) error {
	for _, file := range files {
		src, dst, found := strings.Cut(file, ":")
		if !found {
			dst = path.Join(guest.BinDir, path.Base(src))
		}
		begin := time.Now()
		if err := l.Put(ctx, src, dst); err != nil {
			return err
		}
		if d := time.Since(begin); d > time.Second {
			fmt.Fprintf(os.Stderr, "lab: copied %s in %.1f s\n", src, d.Seconds())
		}
	}
	return nil
}

type shellCmd struct {
	Put []string `placeholder:"FILE[:PATH]" help:"Copy a file or a directory in first."`
}

// Run opens a shell. script(1) gives it a terminal over there.
func (s *shellCmd) Run(ctx context.Context, c *cli) error {
	return c.with(ctx, "", func(l *lab.Lab) error {
		if err := put(ctx, l, s.Put); err != nil {
			return err
		}
		size, err := unix.IoctlGetWinsize(int(os.Stdin.Fd()), unix.TIOCGWINSZ)
		if err != nil {
			return fmt.Errorf("a shell needs a terminal: %w: for one command use: lab run", err)
		}
		restore, err := rawTerminal()
		if err != nil {
			return err
		}
		defer restore()
		shell := fmt.Sprintf("stty rows %d cols %d; exec bash -l", size.Row, size.Col)
		code, err := l.Run(ctx, lab.Command{Args: []string{"script", "-qec", shell, "/dev/null"}, Env: []string{"TERM=" + os.Getenv("TERM")},
			Stdin: os.Stdin, Stdout: os.Stdout, Stderr: os.Stderr})
		if err == nil && code != 0 {
			err = exitCode(code)
		}
		return err
	})
}

// rawTerminal hands every key on and returns what takes that back.
func rawTerminal() (restore func(), err error) {
	fd := int(os.Stdin.Fd())
	old, err := unix.IoctlGetTermios(fd, unix.TCGETS)
	if err != nil {
		return nil, fmt.Errorf("terminal: %w", err)
	}
	raw := *old
	raw.Iflag &^= unix.IGNBRK | unix.BRKINT | unix.PARMRK | unix.ISTRIP | unix.INLCR | unix.IGNCR | unix.ICRNL | unix.IXON
	raw.Oflag &^= unix.OPOST
	raw.Lflag &^= unix.ECHO | unix.ECHONL | unix.ICANON | unix.ISIG | unix.IEXTEN
	raw.Cflag = raw.Cflag&^(unix.CSIZE|unix.PARENB) | unix.CS8
	raw.Cc[unix.VMIN], raw.Cc[unix.VTIME] = 1, 0
	if err := unix.IoctlSetTermios(fd, unix.TCSETS, &raw); err != nil {
		return nil, fmt.Errorf("terminal: %w", err)
	}
	return func() { _ = unix.IoctlSetTermios(fd, unix.TCSETS, old) }, nil
}
