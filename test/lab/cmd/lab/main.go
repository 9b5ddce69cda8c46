// Command lab runs commands and test binaries in the test suite's lab: a virtual machine with a working KVM and with cgroup v2. It boots
// one, or uses the one that is up, and leaves nothing behind. Inside the lab the same program is the service that runs the commands.
//
// It is for people who work on forkd and for `make test`; it is no part of the product.
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"syscall"
	"time"

	"github.com/alecthomas/kong"

	"github.com/forkd/forkd/test/lab"
)

func main() {
	if code, played := lab.PlayRole(); played {
		os.Exit(code)
	}
	os.Exit(run(os.Args[1:]))
}

// cli are the flags and commands.
type cli struct {
	Cache string        `env:"FORKD_CACHE" placeholder:"DIR" help:"Where what is built once is kept; may be deleted at any time."`
	Mem   int           `name:"mem-mib" default:"5120" placeholder:"MIB" help:"Memory of a lab that is booted."`
	Limit time.Duration `default:"1h" help:"When everything is ended, whatever is going on."`

	Build  buildCmd  `cmd:"" help:"Build what a lab is made of, and boot one to see that it works."`
	Run    runCmd    `cmd:"" help:"Run a command in the lab."`
	Shell  shellCmd  `cmd:"" help:"Open a shell in the lab; meanwhile others can use it too."`
	GoTest goTestCmd `cmd:"" name:"gotest" help:"Run a package's tests where KVM works: on this host, or else in the lab. Prints what go test -json prints."`
	Suite  suiteCmd  `cmd:"" help:"Run all tests that need KVM, cgroup v2 or systemd, on this host or in the lab. Prints what go test -json prints."`
}

// exitCode ends the program with that code and without a message.
type exitCode int

func (e exitCode) Error() string { return fmt.Sprintf("exit code %d", int(e)) }

// Exit codes of our own, as those of timeout(1) and of shells.
const (
	codeError       = 125
	codeInterrupted = 130
)

func run(args []string) int {
	var c cli
	parser, err := kong.New(&c, kong.Name("lab"), kong.UsageOnError())
	if err != nil {
		fmt.Fprintln(os.Stderr, "lab:", err)
		return codeError
	}
	call, err := parser.Parse(args)
	if err != nil {
		fmt.Fprintln(os.Stderr, "lab:", err)
		return codeError
	}
	if c.Cache == "" {
		base, err := os.UserCacheDir()
		if err != nil {
			fmt.Fprintln(os.Stderr, "lab:", err)
			return codeError
		}
		c.Cache = filepath.Join(base, "forkd")
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM, syscall.SIGHUP)
	defer stop()
	ctx, cancel := context.WithTimeoutCause(ctx, c.Limit, fmt.Errorf("the limit of %v is over", c.Limit))
	defer cancel()
	ctx, orphaned := context.WithCancelCause(ctx)
	go watchParent(ctx, os.Getppid(), orphaned)
	defer orphaned(nil)

	call.BindTo(ctx, (*context.Context)(nil))
	err = call.Run(&c)
	var code exitCode
	switch {
	case err == nil:
		return 0
	case errors.As(err, &code):
		return int(code)
	case ctx.Err() != nil && errors.Is(context.Cause(ctx), context.Canceled):
		fmt.Fprintln(os.Stderr, "lab: interrupted")
		return codeInterrupted
	}
	fmt.Fprintln(os.Stderr, "lab:", err)
	return codeError
}

// watchParent ends everything when whoever started this program is gone: a lab does not outlive them.
func watchParent(ctx context.Context, parent int, orphaned context.CancelCauseFunc) {
	tick := time.NewTicker(time.Second)
	defer tick.Stop()
	for {
		select {
		case <-tick.C:
			if os.Getppid() != parent {
				orphaned(errors.New("the process that started this one has ended"))
				return
			}
		case <-ctx.Done():
			return
		}
	}
}

// with opens the lab, does something in it, and closes it. disk is a directory for Options.Disk.
func (c *cli) with(ctx context.Context, disk string, do func(*lab.Lab) error) error {
	l, err := lab.Open(ctx, lab.Options{Cache: c.Cache, MemMiB: c.Mem, Disk: disk, Log: os.Stderr})
	if err != nil {
		return err
	}
	return errors.Join(do(l), l.Close(ctx))
}
