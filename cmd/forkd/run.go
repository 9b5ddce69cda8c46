package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strings"

	"github.com/alecthomas/kong"

	"github.com/forkd/forkd/api"
	"github.com/forkd/forkd/client"
)

// Exit codes. exec passes the guest's code through instead.
const (
	exitOK          = 0
	exitError       = 1
	exitUsage       = 2
	exitNoDaemon    = 3
	exitPartial     = 4
	exitTimeout     = 124 // exec: the command ran out of time, as timeout(1) has it
	exitInterrupted = 130
)

const description = `Start virtual machines from a warmed, frozen one.

Exit codes: 0 all went well, 1 it did not, 2 wrong usage, 3 no daemon answers, 4 some of several sandboxes failed,
130 interrupted; exec: the code of the command in the guest, 124 when it ran out of time.`

// cli is the tree of commands.
type cli struct {
	URL  string `name:"url" placeholder:"URL" help:"Daemon: http://host:port or a socket's path. Default: $$FORKD_URL, else this host's socket."`
	JSON bool   `name:"json" help:"Print results, and errors, as JSON."`

	Fork        forkCmd        `cmd:"" group:"sandboxes" help:"Start sandboxes from a snapshot, or from a running one."`
	Ls          lsCmd          `cmd:"" group:"sandboxes" help:"List the sandboxes."`
	Get         getCmd         `cmd:"" group:"sandboxes" help:"Show one sandbox."`
	Kill        killCmd        `cmd:"" group:"sandboxes" help:"Kill sandboxes."`
	Ping        pingCmd        `cmd:"" group:"sandboxes" help:"Make a round trip to a sandbox's agent."`
	Exec        execCmd        `cmd:"" group:"sandboxes" help:"Run a command in a sandbox."`
	Eval        evalCmd        `cmd:"" group:"sandboxes" help:"Run Python in a sandbox's resident interpreter."`
	Logs        logsCmd        `cmd:"" group:"sandboxes" help:"Show a sandbox's console."`
	Extend      extendCmd      `cmd:"" group:"sandboxes" help:"Move a sandbox's deadline."`
	Branch      branchCmd      `cmd:"" group:"sandboxes" help:"Freeze a running sandbox into a new snapshot while it goes on."`
	Suspend     suspendCmd     `cmd:"" group:"sandboxes" help:"Freeze sandboxes to disk and give their memory back."`
	Resume      resumeCmd      `cmd:"" group:"sandboxes" help:"Bring suspended sandboxes back."`
	Workspace   workspaceCmd   `cmd:"" group:"sandboxes" help:"Work with sandboxes that have a name."`
	Net         netCmd         `cmd:"" group:"sandboxes" help:"Show or change what a sandbox may reach, and what it tried in vain."`
	PortForward portForwardCmd `cmd:"" group:"sandboxes" help:"Reach ports of a sandbox from this side."`
	Stats       statsCmd       `cmd:"" group:"sandboxes" help:"Show what sandboxes use: memory, processor time, traffic."`

	Image           imageCmd           `cmd:"" group:"snapshots" help:"Build, list, remove and prune images."`
	Snapshot        snapshotCmd        `cmd:"" group:"snapshots" help:"Boot an image, warm it up and freeze it."`
	Images          imagesCmd          `cmd:"" group:"snapshots" help:"List the snapshots."`
	SnapshotInfo    snapshotInfoCmd    `cmd:"" group:"snapshots" help:"Show sizes, lineage and settings of a snapshot."`
	SnapshotDiff    snapshotDiffCmd    `cmd:"" group:"snapshots" help:"Run something in a child of a snapshot and freeze what it changed."`
	SnapshotCompact snapshotCompactCmd `cmd:"" group:"snapshots" help:"Store a snapshot anew so that it rests on no other."`
	SnapshotVerify  snapshotVerifyCmd  `cmd:"" group:"snapshots" help:"Hash a snapshot's files again and compare."`
	Tree            treeCmd            `cmd:"" group:"snapshots" help:"Show what rests on what."`
	SnapshotShare   snapshotShareCmd   `cmd:"" group:"snapshots" help:"Let all tenants fork snapshots."`
	Rmi             rmiCmd             `cmd:"" group:"snapshots" help:"Delete snapshots."`
	Pool            poolCmd            `cmd:"" group:"snapshots" help:"Show or set how many children of a snapshot are kept ready."`

	Pack    packCmd    `cmd:"" group:"snapshots" help:"Write a snapshot with all it needs to one file."`
	Unpack  unpackCmd  `cmd:"" group:"snapshots" help:"Take in a file that forkd pack wrote."`
	PackKey packKeyCmd `cmd:"" group:"snapshots" help:"Make a key to sign packs with."`

	Serve      serveCmd      `cmd:"" group:"daemon" help:"Run the daemon."`
	Doctor     doctorCmd     `cmd:"" group:"daemon" help:"Find out whether this machine can run forkd, and what mends it."`
	Version    versionCmd    `cmd:"" group:"daemon" help:"Show the versions of this program and of the daemon."`
	Events     eventsCmd     `cmd:"" group:"daemon" help:"Show what changes, as it changes."`
	Key        keyCmd        `cmd:"" group:"daemon" help:"Make and revoke API keys."`
	Audit      auditCmd      `cmd:"" group:"daemon" help:"Work with the record of requests."`
	Cleanup    cleanupCmd    `cmd:"" group:"daemon" help:"Remove what a dead daemon left."`
	Demo       demoCmd       `cmd:"" group:"daemon" help:"Show what forkd does, from an image to forks, with a daemon of its own."`
	Bench      benchCmd      `cmd:"" group:"daemon" help:"Measure forks of a snapshot."`
	Completion completionCmd `cmd:"" group:"daemon" help:"Print a completion script for a shell."`
}

// program is what commands run with.
type program struct {
	ctx            context.Context
	stdin          io.Reader
	stdout, stderr io.Writer
	env            map[string]string
	parts          parts
	cli            *cli
	model          *kong.Application
}

// Run runs one command line and returns its exit code.
func Run(ctx context.Context, args []string, stdin io.Reader, stdout, stderr io.Writer, env []string) int {
	return run(ctx, args, stdin, stdout, stderr, env, productParts())
}

// run is Run with a choice of the parts that a daemon is made of.
func run(ctx context.Context, args []string, stdin io.Reader, stdout, stderr io.Writer, env []string, with parts) (code int) {
	p := &program{ctx: ctx, stdin: stdin, stdout: stdout, stderr: stderr, env: envMap(env), parts: with, cli: &cli{}}
	defer func() {
		if r := recover(); r != nil {
			exit, ok := r.(exitCode) // how kong's --help ends
			if !ok {
				panic(r)
			}
			code = int(exit)
		}
	}()
	parser, err := kong.New(p.cli,
		kong.Name("forkd"), kong.Description(description), kong.Writers(stdout, stderr),
		kong.Exit(func(code int) { panic(exitCode(code)) }),
		kong.ConfigureHelp(kong.HelpOptions{Compact: true, NoExpandSubcommands: true}),
		kong.ExplicitGroups([]kong.Group{
			{Key: "sandboxes", Title: "Sandboxes"}, {Key: "snapshots", Title: "Images and snapshots"}, {Key: "daemon", Title: "The daemon and this program"},
		}),
	)
	if err != nil {
		panic(err) // a mistake in the tags above
	}
	p.model = parser.Model
	parsed, err := parser.Parse(args)
	if err != nil {
		return p.fail(usageError(err))
	}
	return p.fail(parsed.Run(p))
}

// exitCode carries a code through kong.
type exitCode int

// codedError is an error with an exit code and a hint of its own.
type codedError struct {
	code int
	err  error  // nil: there is nothing to say
	hint string // or ""
}

func (e *codedError) Error() string {
	if e.err == nil {
		return ""
	}
	return e.err.Error()
}

func (e *codedError) Unwrap() error { return e.err }

// usageError turns what the parser found into a message that leads to the right help.
func usageError(err error) error {
	help := "forkd --help"
	var parse *kong.ParseError
	if errors.As(err, &parse) && parse.Context != nil {
		if node := parse.Context.Selected(); node != nil {
			help = "forkd " + strings.TrimPrefix(node.Path(), "forkd ") + " --help"
		}
	}
	return &codedError{code: exitUsage, err: err, hint: "see `" + help + "`"}
}

// badUsage is a command line that the parser let through.
func badUsage(hint, format string, args ...any) error {
	return &codedError{code: exitUsage, err: fmt.Errorf(format, args...), hint: hint}
}

// fail says what went wrong, to people or to programs, and returns the exit code.
func (p *program) fail(err error) int {
	if err == nil {
		return exitOK
	}
	if errors.Is(err, context.Canceled) && p.ctx.Err() != nil {
		return exitInterrupted
	}
	code, shown := explain(err)
	if shown.Error == "" {
		return code
	}
	if p.cli.JSON {
		data, _ := json.Marshal(shown) // strings and numbers: it can't fail
		fmt.Fprintf(p.stderr, "%s\n", data)
		return code
	}
	fmt.Fprintf(p.stderr, "forkd: %s\n", printableLines(shown.Error))
	if shown.Hint != "" {
		fmt.Fprintf(p.stderr, "hint: %s\n", printableLines(shown.Hint))
	}
	return code
}

// explain finds the exit code and the words for an error.
func explain(err error) (int, api.Error) {
	shown := api.Error{Error: err.Error(), Code: "error"}
	var coded *codedError
	var partial *client.PartialError
	var answer *client.Error
	switch {
	case errors.As(err, &coded):
		shown.Hint = coded.hint
		if coded.code == exitUsage {
			shown.Code = "usage"
		}
		return coded.code, shown
	case errors.As(err, &partial):
		shown.Code = partial.Failures[0].Code
		shown.Hint = partial.Failures[0].Hint
		return exitPartial, shown
	case errors.As(err, &answer):
		shown.Code, shown.Hint, shown.RequestID = answer.Code, answer.Hint, answer.RequestID
		shown.RetryAfterSecs = int(answer.RetryAfter.Seconds())
		if answer.Code == client.CodeNoDaemon {
			return exitNoDaemon, shown
		}
	}
	return exitError, shown
}

// client connects to the daemon that the flags and the environment name.
func (p *program) client() (*client.Client, error) {
	return client.New(client.Config{URL: p.cli.URL, Getenv: p.getenv})
}

func (p *program) getenv(name string) string { return p.env[name] }

func envMap(env []string) map[string]string {
	m := make(map[string]string, len(env))
	for _, kv := range env {
		name, value, _ := strings.Cut(kv, "=")
		m[name] = value
	}
	return m
}
