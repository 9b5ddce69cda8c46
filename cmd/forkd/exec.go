package main

import (
	"fmt"
	"io"
	"time"

	"github.com/forkd/forkd/client"
)

// maxStdin is what fits into a request, encoded.
const maxStdin = 5 << 20

type execCmd struct {
	ID      string            `arg:"" help:"Id of the sandbox."`
	Command []string          `arg:"" help:"The command and its arguments, after --."`
	Stdin   bool              `short:"i" help:"Give it this command's standard input."`
	Timeout time.Duration     `default:"30s" help:"Kill it after this long."`
	Env     map[string]string `mapsep:"none" placeholder:"K=V" help:"Environment. May be given again."`
	Cwd     string            `placeholder:"DIR" help:"Working directory."`
	User    string            `short:"u" help:"User in the guest."`
	Max     int               `name:"max-output-bytes" placeholder:"N" help:"How much of each of stdout and stderr to keep. Default: 1 MiB."`
}

// Help says what kong's own lines can't.
func (c *execCmd) Help() string {
	return "Runs the command without a shell, prints what it wrote to stdout and stderr, and exits with its code: " +
		"forkd exec ID -- ls -l /"
}

// Run runs a command in a sandbox.
func (c *execCmd) Run(p *program) error {
	cl, err := p.client()
	if err != nil {
		return err
	}
	req := client.ExecRequest{Args: c.Command, Env: c.Env, Cwd: c.Cwd, User: c.User, Timeout: c.Timeout, MaxOutputBytes: c.Max}
	if c.Stdin {
		if req.Stdin, err = io.ReadAll(io.LimitReader(p.stdin, maxStdin+1)); err != nil {
			return fmt.Errorf("read standard input: %w", err)
		}
		if len(req.Stdin) > maxStdin {
			return fmt.Errorf("standard input is larger than the %s that a command can be given", size(maxStdin))
		}
	}
	res, err := cl.Exec(p.ctx, c.ID, req)
	if err != nil {
		return err
	}
	return p.printExec(res, c.Timeout)
}

// sayShort says what something that failed was short of.
func (p *program) sayShort(memory, disk bool) {
	if memory {
		p.say("forkd: the guest had no memory left, and its kernel killed this or what it had started")
	}
	if disk {
		p.say("forkd: the guest's disk is full")
	}
}

func (p *program) printExec(res client.ExecResult, timeout time.Duration) error {
	if p.cli.JSON {
		err := p.printJSON(map[string]any{"stdout": string(res.Stdout), "stderr": string(res.Stderr), "exit_code": res.ExitCode, "signal": res.Signal,
			"timed_out": res.TimedOut, "truncated": res.Truncated, "oom_killed": res.OOMKilled, "disk_full": res.DiskFull, "duration_ms": float64(res.Duration.Microseconds()) / 1000})
		if err != nil {
			return err
		}
	} else {
		if _, err := p.stdout.Write(res.Stdout); err != nil {
			return fmt.Errorf("write the output: %w", err)
		}
		_, _ = p.stderr.Write(res.Stderr)
		if res.Truncated {
			p.say("forkd: output was cut: use --max-output-bytes for more")
		}
		if res.TimedOut {
			p.say("forkd: the command was killed after %s", timeout)
		}
		p.sayShort(res.OOMKilled, res.DiskFull)
	}
	switch {
	case res.TimedOut:
		return &codedError{code: exitTimeout}
	case res.ExitCode != 0:
		return &codedError{code: res.ExitCode}
	}
	return nil
}
