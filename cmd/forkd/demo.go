package main

import (
	"errors"
	"fmt"
	"os"

	"github.com/forkd/forkd/internal/demo"
)

type demoCmd struct {
	daemonFlags
	N int `short:"n" default:"10" help:"Children of each kind, 1 to 1000."`
}

// Help says what it does to the machine.
func (c *demoCmd) Help() string {
	return "Starts a daemon of its own, builds an image (the first time, into the cache), freezes a warmed Python with numpy, forks it " +
		"cold and from a pool, checks that no two children share an identity, and leaves nothing but the cache."
}

// Run runs the demo. What it found out is printed also when something went wrong.
func (c *demoCmd) Run(p *program) error {
	if c.N < 1 || c.N > 1000 {
		return badUsage("give -n from 1 to 1000", "-n %d children can't be shown", c.N)
	}
	if c.Data != "" || c.RunDir != "" {
		return badUsage("leave --data and --run out", "the demo has directories of its own")
	}
	if err := c.fillDefaults(p.getenv); err != nil {
		return err
	}
	self, err := os.Executable()
	if err != nil {
		return fmt.Errorf("find this program: %w", err)
	}
	report, err := demo.Run(p.ctx, demo.Options{N: c.N, Program: self, Cache: c.Cache, Serve: c.serveFlags(), Progress: p.say})
	if report.N > 0 && report.Engine != "" {
		err = errors.Join(err, p.printDemo(report))
	}
	if err == nil {
		err = judge(report)
	}
	return err
}

// serveFlags passes on what the demo's daemon may use.
func (f *daemonFlags) serveFlags() []string {
	args := []string{"--engine", f.Engine, "--accel", f.Accel}
	if f.QEMU != "" {
		args = append(args, "--qemu", f.QEMU)
	}
	if f.MemoryBudgetMiB > 0 {
		args = append(args, "--memory-budget-mib", fmt.Sprint(f.MemoryBudgetMiB))
	}
	if f.CacheMemoryMiB > 0 {
		args = append(args, "--resident-mib", fmt.Sprint(f.CacheMemoryMiB))
	}
	if f.MaxLaunches > 0 {
		args = append(args, "--max-launches", fmt.Sprint(f.MaxLaunches))
	}
	return args
}

func (p *program) printDemo(r demo.Report) error {
	if p.cli.JSON {
		return p.printJSON(r)
	}
	latency := func(l demo.Latency, ratio float64) string {
		return fmt.Sprintf("%s half of the time, %s at most (99 %%); %d of %d answered; %.0f times faster than booting", millis(l.P50MS), millis(l.P99MS),
			l.N-l.Failed, l.N, ratio)
	}
	d := r.Distinct
	return p.facts([][2]string{
		{"engine", fmt.Sprintf("%s %s, %s", r.Engine, r.EngineVersion, r.Accel)},
		{"boot and warm-up", millis(r.BootWarmMS)},
		{"cold fork", latency(r.Cold, r.ColdRatio)},
		{"claim", latency(r.Claim, r.ClaimRatio)},
		{"memory of a child", fmt.Sprintf("%s of its own in the guest, %s for its process", size(r.AnonKiBP50<<10), size(r.PSSKiBP50<<10))},
		{"distinct among " + fmt.Sprint(r.N), fmt.Sprintf("urandom %d, uuid4 %d, openssl %d, random %d, numpy %d, hostname %d, machine-id %d",
			d.URandom, d.UUID4, d.OpenSSL, d.PythonRandom, d.NumpyRandom, d.Hostname, d.MachineID)},
		{"clock", fmt.Sprintf("off by %s at most", millis(r.ClockSkewMax))},
		{"left over", fmt.Sprint(r.LeftoverCount)},
		{"one child said", r.Example},
	})
}

// judge is an error when what a fork promises was not kept.
func judge(r demo.Report) error {
	for name, got := range map[string]int{"urandom": r.Distinct.URandom, "uuid4": r.Distinct.UUID4, "openssl": r.Distinct.OpenSSL,
		"python_random": r.Distinct.PythonRandom, "numpy_random": r.Distinct.NumpyRandom, "hostname": r.Distinct.Hostname, "machine_id": r.Distinct.MachineID} {
		if got != r.N {
			return fmt.Errorf("%d of %d children have a %s of their own", got, r.N, name)
		}
	}
	switch {
	case r.Cold.Failed+r.Claim.Failed > 0:
		return fmt.Errorf("%d cold and %d claimed children failed", r.Cold.Failed, r.Claim.Failed)
	case r.LeftoverCount > 0:
		return fmt.Errorf("%d things were left over: %+v", r.LeftoverCount, r.Leftovers)
	case r.ClockSkewMax >= 1000:
		return fmt.Errorf("a child's clock is off by %s", millis(r.ClockSkewMax))
	}
	return nil
}
