package vmmtest

import (
	"cmp"
	"context"
	"os"
	"testing"
	"time"

	"github.com/forkd/forkd/internal/vmm"
)

// Harness tells the conformance suite how to start an engine's machines. The guest must run the agent of internal/guest, and the
// commands below must work in it.
type Harness struct {
	Engine vmm.Engine
	Shape  vmm.Shape
	// Kernel, Initramfs and Rootfs are paths of the guest's image; empty where the engine needs none.
	Kernel, Initramfs, Rootfs string
	Cmdline                   []string

	Write    func(text string) []string // a command that remembers text in guest memory; nil: sh writes a file
	Read     []string                   // a command that prints what Write wrote last; nil: cat prints that file
	Print    func(text string) []string // a command that prints text to the guest's console; nil: sh does
	Shutdown []string                   // a command that ends the guest; nil: the kernel is told to reboot at once
	Panic    []string                   // a command that makes the guest's kernel panic; nil: it is told to

	BootTimeout time.Duration // from Boot to the agent's first answer; 0: 2 min
	Timeout     time.Duration // for any one step of a child; 0: 30 s
	Silence     time.Duration // how long a paused guest is watched for signs of life; 0: 300 ms
	Children    int           // siblings that run at once; 0: 3
	Steps       int           // of the random sequence; 0: 200
	Seed        uint64        // of the random sequence; 0: from the clock, and logged

	// Detach lets go of a machine's monitor without ending it, so that another Machine can take it over in the same process. Nil: that
	// can't be done, and Attach is tried only after the death of a whole process.
	Detach func(vmm.Machine) error
}

func (h Harness) withDefaults() Harness {
	h.BootTimeout = cmp.Or(h.BootTimeout, 2*time.Minute)
	h.Timeout = cmp.Or(h.Timeout, 30*time.Second)
	h.Silence = cmp.Or(h.Silence, 300*time.Millisecond)
	h.Children = cmp.Or(h.Children, 3)
	h.Steps = cmp.Or(h.Steps, 200)
	h.Seed = cmp.Or(h.Seed, uint64(time.Now().UnixNano()))
	if h.Write == nil {
		h.Write = func(text string) []string { return []string{"sh", "-c", "echo " + text + " >/root/vmmtest"} }
	}
	if h.Read == nil {
		h.Read = []string{"cat", "/root/vmmtest"}
	}
	if h.Print == nil {
		h.Print = func(text string) []string { return []string{"sh", "-c", "echo " + text + " >/dev/console"} }
	}
	if h.Panic == nil {
		h.Panic = []string{"sh", "-c", "echo c >/proc/sysrq-trigger"}
	}
	if h.Shutdown == nil {
		h.Shutdown = []string{"sh", "-c", "echo b >/proc/sysrq-trigger"}
	}
	return h
}

// Run is the conformance suite. It boots one parent, freezes it, and does the rest with children of it. It must not run in
// parallel with other tests of its process: it counts descriptors and child processes.
//
// The suite starts the test binary again, with the calling test's name as -test.run, to play the daemon that dies; so Run must
// be called by that test in the same way each time.
func Run(t *testing.T, h Harness) {
	s := &suite{h: h.withDefaults()}
	if playDaemonIfAsked(t, s) {
		return
	}
	info, err := s.h.Engine.Probe(t.Context())
	if err != nil {
		t.Fatalf("Probe: %v", err)
	}
	s.info = info
	s.addNetwork()
	t.Run("Probe", s.testProbe)
	t.Run("InvalidConfig", s.testInvalidConfig)
	t.Run("BootCancelled", s.testBootCancelled)
	if !t.Run("Freeze", s.testFreeze) {
		t.Fatal("no template to go on with")
	}
	t.Cleanup(s.template.close)
	t.Run("Children", s.testChildren)
	t.Run("MemoryIsolation", s.testMemoryIsolation)
	t.Run("Mappings", s.testMappings)
	t.Run("InheritedFiles", s.testInheritedFiles)
	t.Run("Overlay", s.testOverlay)
	t.Run("LiveBranch", s.testLiveBranch)
	t.Run("BytesBeforeResume", s.testBytesBeforeResume)
	t.Run("OneConnectionAtATime", s.testOneConnectionAtATime)
	t.Run("PauseStopsProgress", s.testPauseStopsProgress)
	t.Run("SaveTwice", s.testSaveTwice)
	t.Run("Kill", s.testKill)
	t.Run("KillPrepared", s.testKillPrepared)
	t.Run("KilledFromOutside", s.testKilledFromOutside)
	t.Run("GuestShutdown", s.testGuestShutdown)
	t.Run("GuestPanics", s.testGuestPanics)
	t.Run("Attach", s.testAttach)
	t.Run("AttachAfterDaemonDied", s.testAttachAfterDaemonDied)
	t.Run("AttachGone", s.testAttachGone)
	t.Run("PrepareCancelled", s.testPrepareCancelled)
	t.Run("LoadCancelled", s.testLoadCancelled)
	t.Run("GarbageState", s.testGarbageState)
	t.Run("Console", s.testConsole)
	t.Run("SendFile", s.testSendFile)
	t.Run("Network", s.testNetwork)
	t.Run("RandomSequence", s.testRandomSequence)
	t.Run("NoLeaks", s.testNoLeaks)
	t.Run("TemplateUnchanged", s.testTemplateUnchanged)
}

// suite is one run of the conformance suite.
type suite struct {
	h        Harness
	info     vmm.Info
	template template
}

// step bounds one step of a child.
func (s *suite) step(t *testing.T) context.Context {
	t.Helper()
	return bounded(t, s.h.Timeout)
}

func bounded(t *testing.T, d time.Duration) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), d)
	t.Cleanup(cancel)
	return ctx
}

// open opens a file of the guest's image; nil for no file.
func open(t *testing.T, path string) *os.File {
	t.Helper()
	if path == "" {
		return nil
	}
	f, err := os.Open(path)
	if err != nil {
		t.Fatalf("open the image: %v", err)
	}
	t.Cleanup(func() { f.Close() })
	return f
}
