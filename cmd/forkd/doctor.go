package main

import (
	"context"
	"log/slog"
	"os"
	"os/exec"
	"time"

	"golang.org/x/sys/unix"

	"github.com/forkd/forkd/internal/hostcheck"
	"github.com/forkd/forkd/internal/hostnet"
	"github.com/forkd/forkd/internal/sandbox"
	"github.com/forkd/forkd/internal/vmm/firecracker"
	"github.com/forkd/forkd/internal/vmm/probeguest"
	"github.com/forkd/forkd/internal/vmm/qemu"
)

// doctorLimit bounds all checks together; a KVM that hangs is part of what they find out.
const doctorLimit = 2 * time.Minute

type doctorCmd struct {
	daemonFlags
}

// Help says what the marks mean.
func (c *doctorCmd) Help() string {
	return "Looks at this machine, not at a daemon. ok: as it should be; warn: forkd works, but something it can do is not to be had " +
		"or slower; fail: forkd does not work, and the exit code is 1. What mends it stands below each."
}

// Run prints the checks.
func (c *doctorCmd) Run(p *program) error {
	if err := c.fillDefaults(p.getenv); err != nil {
		return err
	}
	binary := c.QEMU
	if binary == "" {
		binary = qemu.DefaultBinary
	}
	options := hostcheck.Options{DataDir: c.Data, KVM: func(context.Context) error { return probeguest.Check() }}
	options.Network, options.Closed = hostnet.Try, hostnet.Closed
	options.Confinement = func() (string, error) { return c.tryConfinement(binary) }
	options.Limits = c.tryLimits
	options.Firecracker = c.describeFirecracker
	if _, err := exec.LookPath(binary); err == nil {
		options.KVM = func(ctx context.Context) error { return qemu.KVMWorks(ctx, binary) }
	}
	ctx, cancel := context.WithTimeout(p.ctx, doctorLimit)
	defer cancel()
	checks := hostcheck.Run(ctx, hostcheck.Local(), options)
	worst := hostcheck.Worst(checks)
	if err := p.printChecks(checks, worst); err != nil {
		return err
	}
	if worst == hostcheck.Fail {
		return &codedError{code: exitError}
	}
	return nil
}

func (p *program) printChecks(checks []hostcheck.Check, worst hostcheck.Status) error {
	if p.cli.JSON {
		return p.printJSON(map[string]any{"status": worst, "checks": checks})
	}
	var rows [][]string
	for _, check := range checks {
		rows = append(rows, []string{string(check.Status), check.Name, check.Detail})
		if check.Fix != "" {
			rows = append(rows, []string{"", "", "→ " + check.Fix})
		}
	}
	return p.table([]string{"STATUS", "CHECK", "DETAIL"}, rows)
}

// describeFirecracker says what a daemon with these flags would run.
func (c *doctorCmd) describeFirecracker(ctx context.Context) (string, error) {
	users, err := c.confinement(slog.New(slog.DiscardHandler))
	if err != nil {
		return "", err
	}
	if err := c.checkJailer(ctx, users, slog.New(slog.DiscardHandler)); err != nil {
		return "", err
	}
	options := firecracker.Options{Binary: c.Firecracker, Jailer: c.Jailer, Users: users}
	if dir := sandbox.TrialsDir(c.RunDir); os.MkdirAll(dir, 0o700) == nil && unix.Access(dir, unix.W_OK) == nil { // else it is not ours
		options.Trials = dir
	}
	return firecracker.New(options).Describe(ctx)
}
