package main

import (
	"context"
	"fmt"

	"github.com/forkd/forkd/internal/bench/enginebench"
	"github.com/forkd/forkd/internal/thread"
)

type benchEngineCmd struct {
	Engine      string `enum:"firecracker" default:"firecracker" help:"Engine to measure: ${enum}."`
	Firecracker string `name:"firecracker" env:"FORKD_FIRECRACKER" placeholder:"FILE" help:"The Firecracker binary. Default: the one in $$PATH."`
	Confined    bool   `help:"Confine each Firecracker, as a daemon that is root does; it costs a start a millisecond or two."`
	Jailer      string `placeholder:"FILE" help:"Start each Firecracker through its jailer."`
	Branches    int    `default:"100" help:"Branches of each size of guest."`
	Only        string `enum:",start,branch,share" default:"" help:"Measure only starts, branches, or what children share."`
}

// Help says what is measured.
func (c *benchEngineCmd) Help() string {
	return "Measures the engine alone, with guests of a few hundred bytes instead of a kernel: it runs on every KVM that runs a guest at all. " +
		"No daemon is needed, and none is asked. Needs root for live branches."
}

// Run measures an engine. A torn branch makes it fail, and so does a control that is not torn.
func (c *benchEngineCmd) Run(p *program) error {
	if c.Branches < 1 || c.Branches > 1000 {
		return badUsage("choose 1 to 1000", "--branches %d: that can't be measured", c.Branches)
	}
	thread.Widen() // as in a daemon
	ctx, cancel := context.WithTimeout(p.ctx, benchLimit)
	defer cancel()
	r, err := enginebench.Run(ctx, enginebench.Options{Binary: c.Firecracker, Confined: c.Confined, Jailer: c.Jailer, Branches: c.Branches, Only: c.Only, Progress: p.say})
	if err != nil {
		return err
	}
	if p.cli.JSON {
		err = p.printJSON(r)
	} else {
		err = p.printBenchEngine(r)
	}
	for _, b := range r.Branches {
		switch {
		case err != nil:
		case b.Torn > 0:
			err = fmt.Errorf("%d of %d branches of %d MiB were torn", b.Torn, b.Branches, b.MemMiB)
		case b.ControlTorn == 0:
			err = fmt.Errorf("none of %d branches of %d MiB that were not protected was torn: the measurement shows nothing", b.Control, b.MemMiB)
		}
	}
	return err
}

func (p *program) printBenchEngine(r enginebench.Report) error {
	fmt.Fprintf(p.stdout, "%s %s, %d CPUs, %s; confined: %s\n", r.Engine, r.Version, r.CPUs, r.CPU, r.Confined)
	var starts, branches [][]string
	for _, s := range r.Starts {
		all := ""
		if s.From == "cold" {
			all = millis(s.AllMaxMS)
		}
		starts = append(starts, []string{s.From, fmt.Sprint(s.N), millis(s.P50MS), millis(s.P90MS), millis(s.MaxMS), all})
	}
	for _, b := range r.Branches {
		branches = append(branches, []string{fmt.Sprintf("%d MiB", b.MemMiB), fmt.Sprintf("%d MiB", b.DirtyMiB), millis(b.PauseP50MS), millis(b.PauseP90MS),
			millis(b.PauseMaxMS), millis(b.StillP50MS), millis(b.StillP90MS), fmt.Sprintf("%d of %d", b.Torn, b.Branches), fmt.Sprintf("%d of %d", b.ControlTorn, b.Control)})
	}
	if len(starts) > 0 {
		fmt.Fprintln(p.stdout)
		if err := p.table([]string{"START → ANSWER", "AT ONCE", "P50", "P90", "MAX", "ALL, MAX"}, starts); err != nil {
			return err
		}
	}
	if len(branches) > 0 {
		fmt.Fprintln(p.stdout)
		if err := p.table([]string{"BRANCH OF", "REWRITTEN", "PAUSE P50", "P90", "MAX", "GUEST STOOD STILL P50", "P90", "TORN", "UNPROTECTED, TORN"}, branches); err != nil {
			return err
		}
	}
	if s := r.Share; s != nil {
		fmt.Fprintf(p.stdout, "\n%d children of %d MiB that touch %d MiB each: %.1f MiB a child over the image, PSS %.1f MiB\n",
			s.Children, s.MemMiB, s.TouchedMiB, s.PerChildMiB, s.ChildPSSMiB)
	}
	return nil
}
