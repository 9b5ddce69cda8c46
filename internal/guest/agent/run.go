package agent

import (
	"context"
	"flag"
	"fmt"
	"io"
	"net"
	"os"
	"os/signal"
	"slices"

	"golang.org/x/sys/unix"
)

const usage = `forkd-agent is the init of a forkd guest. It does its work when it is process 1.
For tests it serves a Unix socket instead:
`

// Run is the program: init when it is process 1, else the development server of its flags. It returns the exit status.
func Run(args []string, stderr io.Writer) int {
	// The kernel gives its own unknown words to init as arguments: they mean nothing.
	if os.Getpid() == 1 && !slices.Contains(args, "-serve-unix") {
		return runInit()
	}
	fs := flag.NewFlagSet("forkd-agent", flag.ContinueOnError)
	fs.SetOutput(stderr)
	fs.Usage = func() {
		fmt.Fprint(stderr, usage)
		fs.PrintDefaults()
	}
	path := fs.String("serve-unix", "", "serve the control channel on a new Unix socket at `PATH`")
	root := fs.String("root", "", "write the files of an identity under `DIR` (default: nowhere)")
	python := fs.String("python", "", "the interpreter for evals (default: python3 of the default path)")
	whole := fs.Bool("whole-machine", false, "let an identity set the clock, the entropy and the host name of this machine, and write its /etc")
	if err := fs.Parse(args[1:]); err != nil {
		return 2
	}
	if *path == "" || fs.NArg() > 0 {
		fs.Usage()
		return 2
	}
	opt := Options{Sandboxed: !*whole, Root: *root, Python: *python, Log: func(m string) { fmt.Fprintln(stderr, "forkd-agent: "+m) }}
	if err := serveUnix(*path, opt); err != nil {
		fmt.Fprintln(stderr, "forkd-agent:", err)
		return 1
	}
	return 0
}

func serveUnix(path string, opt Options) error {
	ctx, stop := signal.NotifyContext(context.Background(), unix.SIGINT, unix.SIGTERM)
	defer stop()
	l, err := net.Listen("unix", path)
	if err != nil {
		return fmt.Errorf("can't serve: %w", err)
	}
	defer l.Close()
	return Serve(ctx, l, opt)
}
