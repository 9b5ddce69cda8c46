// Package vmmtest tests engines, and stands in for one where no guest can run.
//
// Run is the conformance suite: every implementation of vmm.Engine passes it, the fake of this package included. An engine's own
// package calls it with a Harness that says how to start its machines.
//
// NewFake returns an engine for tests of everything above the engines. Its machines run no guest, but they are real processes:
// pids, start times, pidfds, orphans, kill -9 and private mappings of a sealed memfd are the kernel's own. A machine is this
// very test binary, started again with an environment variable; so the binary's TestMain must be, or begin with, Main:
//
//	func TestMain(m *testing.M) { vmmtest.Main(m) }
//
// A program whose main isn't testing's calls RunMachineIfAsked first thing.
//
// The package is for tests only: nothing that is shipped imports it.
package vmmtest

import (
	"os"
	"testing"
)

// machineEnv holds a machine's configuration, as JSON, in the environment of the process that shall be that machine.
const machineEnv = "FORKD_FAKE_MACHINE"

// Main is a TestMain: it runs the machine that this process was started as, or else the tests.
func Main(m *testing.M) {
	RunMachineIfAsked()
	os.Exit(m.Run())
}

// RunMachineIfAsked runs the fake machine, and never returns, when this process was started as one.
func RunMachineIfAsked() {
	config, asked := os.LookupEnv(machineEnv)
	if !asked {
		return
	}
	os.Exit(machineMain(config))
}
