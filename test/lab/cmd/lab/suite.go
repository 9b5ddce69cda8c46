package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"slices"
	"time"

	"github.com/forkd/forkd/test/lab"
)

// suiteCmd runs what needs KVM, cgroup v2 or systemd: the engine contract's suite, the ways of a user and the snapshot graph end to end, limits,
// and the service.
type suiteCmd struct {
	Where   string   `enum:"auto,host,lab" default:"auto" help:"Where to run: ${enum}."`
	Engine  []string `enum:"qemu-kvm,firecracker" default:"qemu-kvm,firecracker" help:"What runs machines: ${enum}, or both."`
	Short   bool     `help:"Only what every make test has room for."`
	Only    string   `name:"run" placeholder:"REGEXP" help:"Only tests that match, as with go test."`
	Require bool     `help:"Fail where something can't be had, instead of skipping its tests."`

	Monitors monitors `embed:""`
}

// Tests end to end. The short set is a way of a user through everything; all of it takes so long that it is had by asking for it.
const (
	shortTests = `^TestMainPath$`
	longTests  = `^(TestMainPath|TestConfined|TestLimits|TestSiblingsAreIndividuals|TestBranchesAreOfOneInstant|TestSnapshotGraph|TestSuspended|TestMonitorsKilled|TestDaemonKilled|TestDrain|TestGuestEnds|TestEval|TestExec|TestStateIsTheChildsOwn|TestNetworkPolicies)$`

	contractTests = `Conformance$`
	jailedTests   = `^(TestMainPath|TestMonitorsKilled|TestDaemonKilled)$`
	serviceTest   = `^(TestService|TestFirecrackerGuide)$`
)

// jobs are what is run for an engine.
func (s *suiteCmd) jobs(engine string) []job {
	e2e := func(what, tests string, limit time.Duration) job {
		return job{pkg: "./test/e2e", what: what, engine: engine, flags: []string{"-test.run=" + tests, "-test.timeout=" + limit.String(), "-test.parallel=1"}}
	}
	if s.Only != "" {
		j := e2e("", s.Only, time.Hour)
		j.jailed = s.Monitors.jail(engine)
		return []job{j}
	}
	service := e2e("service", serviceTest, 20*time.Minute)
	switch {
	case s.Short && engine == s.Engine[0]:
		return []job{e2e("", shortTests, 20*time.Minute), service}
	case s.Short:
		return []job{e2e("", shortTests, 20*time.Minute)}
	}
	jobs := []job{e2e("contract", contractTests, 40*time.Minute), e2e("", longTests, 2*time.Hour), service}
	if s.Monitors.jail(engine) {
		j := e2e("jailer", jailedTests, time.Hour)
		j.jailed = true
		jobs = append(jobs, j)
	}
	return jobs
}

// Run runs the suite.
func (s *suiteCmd) Run(ctx context.Context, c *cli) error {
	where := place(ctx, s.Where)
	var skip error
	if !s.Require {
		skip = lab.ErrUnavailable
	}
	// Control groups have nothing to do with an engine.
	jobs := []job{{pkg: "./internal/limits", what: "cgroup v2", flags: []string{"-test.timeout=5m"}}}
	if s.Only != "" {
		jobs = nil
	}
	for _, engine := range s.Engine {
		if engine == firecrackerEngine {
			path, err := exec.LookPath(s.Monitors.Firecracker)
			if err != nil {
				why := errors.New("no Firecracker at hand: FORKD_FIRECRACKER=FILE or --firecracker FILE names one, then: make test-firecracker")
				if s.Require {
					return why
				}
				if err := printSkip(job{pkg: "./test/e2e", engine: engine}.title(where), why); err != nil {
					return err
				}
				continue
			}
			s.Monitors.Firecracker = path
		}
		jobs = append(jobs, s.jobs(engine)...)
	}
	if !slices.ContainsFunc(jobs, func(j job) bool { return j.engine != "" }) {
		return nil
	}
	return c.runJobs(ctx, where, s.Monitors, jobs, skip)
}

// place is where tests run: on the host if it has all they need.
func place(ctx context.Context, asked string) string {
	if asked != "auto" {
		return asked
	}
	if why := hostServes(ctx); why != nil {
		fmt.Fprintf(os.Stderr, "lab: not on this host: %v\n", why)
		return "lab"
	}
	return "host"
}
