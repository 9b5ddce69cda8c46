package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"github.com/forkd/forkd/internal/demo"
)

// demoLimit is enough for an image from nothing on a slow machine.
const demoLimit = 45 * time.Minute

type demoCmd struct {
	N     int      `short:"n" default:"10" help:"Children of each kind."`
	Cache string   `placeholder:"DIR" env:"FORKD_CACHE" help:"Where the image is kept for the next time. Default: $$XDG_CACHE_HOME/forkd, else ~/.cache/forkd."`
	Accel string   `enum:"auto,kvm,tcg" default:"auto" help:"KVM, emulation, or KVM if a test guest runs on it: ${enum}."`
	QEMU  string   `name:"qemu" placeholder:"FILE" help:"The QEMU binary. Default: the one in $$PATH."`
	Serve []string `name:"serve-arg" placeholder:"ARG" help:"A further argument for the demo's daemon; may be repeated."`
}

// Run runs the demo with a daemon of its own. Failures among the children and leftovers make it fail.
func (c *demoCmd) Run(p *program) error {
	if c.N < 1 || c.N > 1000 {
		return badUsage("choose 1 to 1000", "-n %d: not a number of children that can be started", c.N)
	}
	if c.Cache == "" {
		base := p.getenv("XDG_CACHE_HOME")
		if base == "" {
			base = filepath.Join(p.getenv("HOME"), ".cache")
		}
		c.Cache = filepath.Join(base, "forkd")
	}
	self, err := os.Executable()
	if err != nil {
		return fmt.Errorf("find the program itself: %w", err)
	}
	ctx, cancel := context.WithTimeout(p.ctx, demoLimit)
	defer cancel()
	args := append([]string{"--accel", c.Accel}, c.Serve...)
	if c.QEMU != "" {
		args = append(args, "--qemu", c.QEMU)
	}
	r, err := demo.Run(ctx, demo.Options{N: c.N, Program: self, Cache: c.Cache, Serve: args, Progress: p.say})
	if p.cli.JSON {
		err = errors.Join(p.printJSON(r), err)
	} else if err == nil {
		err = p.printDemo(r)
	}
	if err == nil {
		err = judge(r)
	}
	return err
}

// judge is an error when something that a fork promises was not kept.
func judge(r demo.Report) error {
	if r.Cold.Failed > 0 || r.Claim.Failed > 0 || r.LeftoverCount > 0 {
		return fmt.Errorf("%d cold and %d claimed children failed, %d things were left over", r.Cold.Failed, r.Claim.Failed, r.LeftoverCount)
	}
	d := r.Distinct
	if least := min(d.URandom, d.UUID4, d.OpenSSL, d.PythonRandom, d.NumpyRandom, d.Hostname, d.MachineID); least < r.N {
		return fmt.Errorf("children share what must be their own: %+v among %d", d, r.N)
	}
	if r.ClockSkewMax >= 1000 {
		return fmt.Errorf("a child's clock is off by %s", millis(r.ClockSkewMax))
	}
	return nil
}

func (p *program) printDemo(r demo.Report) error {
	of := func(n int) string { return fmt.Sprintf("%d of %d", n, r.N) }
	fmt.Fprintln(p.stdout)
	if err := p.table([]string{"REQUEST → FIRST ANSWER", "CHILDREN", "FAILED", "P50", "P99", "FASTER THAN BOOTING"}, [][]string{
		{"boot and warm up a parent", "1", "0", millis(r.BootWarmMS), "", ""},
		{"fork, cold", fmt.Sprint(r.Cold.N), fmt.Sprint(r.Cold.Failed), millis(r.Cold.P50MS), millis(r.Cold.P99MS), fmt.Sprintf("%.0f×", r.ColdRatio)},
		{"fork, from the pool", fmt.Sprint(r.Claim.N), fmt.Sprint(r.Claim.Failed), millis(r.Claim.P50MS), millis(r.Claim.P99MS), fmt.Sprintf("%.0f×", r.ClaimRatio)},
	}); err != nil {
		return err
	}
	d := r.Distinct
	fmt.Fprintln(p.stdout)
	return p.facts([][2]string{
		{"engine", fmt.Sprintf("%s %s, %s", r.Engine, r.EngineVersion, r.Accel)},
		{"memory a child adds", size(r.AnonKiBP50<<10) + " of the guest's, " + size(r.PSSKiBP50<<10) + " with its monitor and its share of the parent's"},
		{"distinct", fmt.Sprintf("urandom %s, uuid4 %s, OpenSSL %s, random %s, numpy %s, hostname %s, machine-id %s", of(d.URandom), of(d.UUID4), of(d.OpenSSL),
			of(d.PythonRandom), of(d.NumpyRandom), of(d.Hostname), of(d.MachineID))},
		{"clock", fmt.Sprintf("at most %.1f ms off the host's", r.ClockSkewMax)},
		{"left behind", fmt.Sprint(r.LeftoverCount)},
		{"one of them said", r.Example},
	})
}
