package vmmtest_test

import (
	"context"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/forkd/forkd/internal/vmm"
	"github.com/forkd/forkd/internal/vmm/vmmtest"
)

// brokenVariable makes TestBrokenEngine run the suite on an engine with that flaw.
const brokenVariable = "FORKD_TEST_BROKEN"

// flaws are what the suite must find, with the test of the suite that must fail.
func flaws() map[string]string {
	return map[string]string{
		"pause does nothing":                  "PauseStopsProgress",
		"kill leaves a file":                  "Kill",
		"kill of a prepared does nothing":     "KillPrepared",
		"a crash is reported as our kill":     "KilledFromOutside",
		"attach takes any process":            "AttachGone",
		"attach gives another process's name": "Attach",
		"boot goes on without its context":    "BootCancelled",
		"prepare goes on without its context": "PrepareCancelled",
		"load leaves the process on failure":  "GarbageState",
		"dial closes at once":                 "OneConnectionAtATime",
		"descriptors leak":                    "NoLeaks",
		"resume before it is asked for":       "BytesBeforeResume",
		"the console is empty":                "Console",
	}
}

func TestSuiteFindsFlaws(t *testing.T) {
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	for flaw, finder := range flaws() {
		t.Run(flaw, func(t *testing.T) {
			t.Parallel()
			cmd := exec.CommandContext(t.Context(), self, "-test.run=^TestBrokenEngine$/^(Freeze|"+finder+")$", "-test.timeout=60s")
			cmd.Env = append(os.Environ(), brokenVariable+"="+flaw)
			out, err := cmd.CombinedOutput()
			if err == nil || !strings.Contains(string(out), "--- FAIL: TestBrokenEngine/"+finder) {
				t.Errorf("the suite passed an engine of which %s, or failed for another reason (%v):\n%s", flaw, err, out)
			}
		})
	}
}

// TestBrokenEngine is for TestSuiteFindsFlaws.
func TestBrokenEngine(t *testing.T) {
	flaw, asked := os.LookupEnv(brokenVariable)
	if !asked {
		t.Skip("only run by TestSuiteFindsFlaws")
	}
	h := fakeHarness(t, vmmtest.FakeOptions{})
	h.Engine = &brokenEngine{h.Engine, flaw}
	h.Timeout = 2 * time.Second
	vmmtest.Run(t, h)
}

type brokenEngine struct {
	vmm.Engine
	flaw string
}

func (e *brokenEngine) Boot(ctx context.Context, cfg vmm.BootConfig) (vmm.Machine, error) {
	if e.flaw == "boot goes on without its context" {
		ctx = context.WithoutCancel(ctx)
	}
	return e.Engine.Boot(ctx, cfg)
}

func (e *brokenEngine) Prepare(ctx context.Context, cfg vmm.PrepareConfig) (vmm.Prepared, error) {
	switch e.flaw {
	case "prepare goes on without its context":
		ctx = context.WithoutCancel(ctx)
	case "descriptors leak":
		f, _ := os.Open("/")
		leaked = append(leaked, f)
	}
	p, err := e.Engine.Prepare(ctx, cfg)
	if err != nil {
		return nil, err
	}
	return &brokenPrepared{p, e}, nil
}

// leaked keeps files from being closed by the garbage collector.
var leaked []*os.File

func (e *brokenEngine) Attach(ctx context.Context, p vmm.Process) (vmm.Machine, error) {
	if e.flaw == "attach takes any process" {
		p.StartTicks-- // the suite asks for one tick too many
	}
	m, err := e.Engine.Attach(ctx, p)
	if err == nil && e.flaw == "attach gives another process's name" {
		return &brokenMachine{m, e.flaw}, nil
	}
	return m, err
}

type brokenPrepared struct {
	vmm.Prepared
	engine *brokenEngine
}

func (p *brokenPrepared) Kill() error {
	if p.engine.flaw == "kill of a prepared does nothing" {
		return nil
	}
	return p.Prepared.Kill()
}

func (p *brokenPrepared) Load(ctx context.Context, state *os.File) (vmm.Machine, error) {
	flaw := p.engine.flaw
	if info, err := state.Stat(); flaw == "load leaves the process on failure" && err == nil && info.Size() == 0 {
		return nil, context.Canceled
	}
	m, err := p.Prepared.Load(ctx, state)
	if err != nil {
		return nil, err
	}
	if flaw == "resume before it is asked for" {
		err = m.Resume(ctx)
	}
	return &brokenMachine{m, flaw}, err
}

type brokenMachine struct {
	vmm.Machine
	flaw string
}

func (m *brokenMachine) Pause(ctx context.Context) error {
	if m.flaw == "pause does nothing" {
		return nil
	}
	return m.Machine.Pause(ctx)
}

func (m *brokenMachine) Dial(ctx context.Context, port uint32) (net.Conn, error) {
	conn, err := m.Machine.Dial(ctx, port)
	if err == nil && m.flaw == "dial closes at once" {
		conn.Close()
	}
	return conn, err
}

func (m *brokenMachine) Exit() vmm.Exit {
	exit := m.Machine.Exit()
	if m.flaw == "a crash is reported as our kill" {
		exit.Reason = vmm.ExitKilled
	}
	return exit
}

func (m *brokenMachine) Process() vmm.Process {
	p := m.Machine.Process()
	if m.flaw == "attach gives another process's name" {
		p.PID++
	}
	return p
}

func (m *brokenMachine) Kill() error {
	err := m.Machine.Kill()
	if err == nil && m.flaw == "kill leaves a file" {
		return os.WriteFile(filepath.Join(m.Machine.Process().Dir, "left"), nil, 0o600)
	}
	return err
}

func (m *brokenMachine) Console(ctx context.Context) ([]byte, error) {
	if m.flaw == "the console is empty" {
		return nil, nil
	}
	return m.Machine.(vmm.Console).Console(ctx)
}
