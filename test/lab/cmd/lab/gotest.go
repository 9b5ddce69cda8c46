package main

import (
	"context"

	"github.com/forkd/forkd/test/lab"
)

// goTestCmd runs one package's tests.
type goTestCmd struct {
	Where  string   `enum:"auto,host,lab" default:"auto" help:"Where to run: ${enum}."`
	Engine string   `enum:"qemu-kvm,firecracker" default:"qemu-kvm" help:"What runs machines: ${enum}."`
	Env    []string `short:"e" placeholder:"K=V" help:"A variable for the tests."`
	Args   []string `arg:"" passthrough:"" help:"The package, as ./test/e2e, and flags for its test binary, such as -test.run=X."`

	Monitors monitors `embed:""`
}

// Help says what the tests are told.
func (*goTestCmd) Help() string {
	return "The tests are told by their environment: FORKD_VM_TESTS=1, FORKD_E2E_ENGINE, FORKD_E2E_IMAGES: where images are, FORKD_BIN: the forkd to test, FORKD_FIRECRACKER, and FORKD_JAILER."
}

// Run runs the tests.
func (g *goTestCmd) Run(ctx context.Context, c *cli) error {
	j := job{pkg: g.Args[0], engine: g.Engine, jailed: g.Monitors.jail(g.Engine), flags: g.Args[1:], env: g.Env}
	return c.runJobs(ctx, place(ctx, g.Where), g.Monitors, []job{j}, lab.ErrUnavailable)
}
