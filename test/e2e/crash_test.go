package e2e

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/forkd/forkd/api"
	"github.com/forkd/forkd/client"
)

// remember puts something of its own into every guest, and checkRemembered finds it there again.
func (d *daemon) remember(guests []*guest) {
	d.t.Helper()
	d.each(guests, func(i int, g *guest) error {
		if _, err := g.tryPy(fmt.Sprintf("mine = %d", i)); err != nil {
			return err
		}
		_, err := g.trySh(fmt.Sprintf("echo %d >/root/mine", i))
		return err
	})
}

func (d *daemon) checkRemembered(guests []*guest) {
	d.t.Helper()
	d.each(guests, func(i int, g *guest) error {
		got, err := g.tryPy(`mine, open("/root/mine").read().strip()`)
		if want := fmt.Sprintf("(%d, '%d')", i, i); err == nil && got != want {
			err = fmt.Errorf("remembers %s, want %s", got, want)
		}
		return err
	})
}

// TestDaemonKilled kills the daemon while it does everything at once. The next one knows what is true, and nothing is lost or left.
func TestDaemonKilled(t *testing.T) {
	t.Parallel()
	d := ownDaemon(t, setup{})
	const n, pool = 20, 3
	guests := d.fork(n)
	d.remember(guests)
	d.fillPool(pyTag, pool)
	snapshot, fork := d.snapshotUnderWay(), d.forkUnderWay()
	d.kill9()
	for what, failed := range map[string]<-chan error{"fork": fork, "snapshot": snapshot} {
		if err := <-failed; !client.IsCode(err, client.CodeNoDaemon) {
			t.Errorf("the %s that was under way when the daemon was killed: got %v, want no answer", what, err)
		}
	}
	if got := len(machinesIn(d.run)); got < n+pool {
		t.Errorf("%d monitors outlived the daemon, want at least %d", got, n+pool)
	}

	d.start(setup{})
	var listed []client.Sandbox
	d.mustJSON(&listed, "ls")
	lives := map[string]bool{}
	for _, s := range listed {
		lives[s.ID] = s.State == api.SandboxInfoStateRunning
	}
	for _, g := range guests {
		if !lives[g.ID] {
			t.Errorf("%v is not listed as running", g)
		}
	}
	d.checkRemembered(guests)
	// Of the fork that was under way children may have been ready: they are listed, and answer.
	for _, s := range listed {
		if g := (&guest{s, d}); !slices.ContainsFunc(guests, func(known *guest) bool { return known.ID == g.ID }) {
			if err := g.ping(); err != nil {
				t.Errorf("%v was never handed out, is listed, and does not answer: %v", g, err)
			}
			g.kill()
		}
	}
	d.awaitPool(pyTag, pool)
	d.checkTidy()
	d.checkSandboxes(guests...)
	if tags := d.must("images", "-q"); tags != pyTag {
		t.Errorf("snapshots after the restart: %q, want %s alone", tags, pyTag)
	}
	if got := d.fork1(fromPool).py("6 * 7"); got != "42" {
		t.Errorf("6 * 7 in a new child: %s", got)
	}
}

// forkUnderWay begins a fork of many and returns when one of them is being started. The channel gets how it ended.
func (d *daemon) forkUnderWay() <-chan error {
	d.t.Helper()
	ended := make(chan error, 1)
	go func() {
		_, err := d.client.Fork(d.t.Context(), client.ForkRequest{SnapshotTag: pyTag, N: client.Int(50), Path: api.ForkRequestPathCold})
		ended <- err
	}()
	eventually(d.t, callLimit, func() error {
		list, err := d.client.Sandboxes(d.t.Context(), false)
		if err == nil && !slices.ContainsFunc(list, func(s client.Sandbox) bool { return s.State == api.SandboxInfoStateStarting }) {
			err = errors.New("no fork is under way")
		}
		return err
	})
	return ended
}

// snapshotUnderWay begins a snapshot and returns when its warm-up runs.
func (d *daemon) snapshotUnderWay() <-chan error {
	d.t.Helper()
	ended, warm := make(chan error, 1), make(chan struct{})
	var once sync.Once
	go func() {
		_, err := d.client.CreateSnapshot(d.t.Context(), client.SnapshotRequest{Tag: "half", Image: bareImage, MemMiB: 128,
			WarmUp: []client.WarmUp{{Kind: "exec", Code: "sleep 3600"}}}, func(p client.Progress) {
			if p.Step == "warm_up" {
				once.Do(func() { close(warm) })
			}
		})
		ended <- err
	}()
	select {
	case <-warm:
	case err := <-ended:
		d.t.Fatalf("the snapshot ended before its warm-up: %v", err)
	case <-time.After(callLimit):
		d.t.Fatal("the snapshot's warm-up did not begin")
	}
	return ended
}

// awaitEnd waits until a sandbox has ended and checks how, and that it is gone for those who want something of it.
func (g *guest) awaitEnd(state api.SandboxInfoState, reason ...string) {
	t := g.d.t
	t.Helper()
	var info client.Sandbox
	eventually(t, tidyLimit, func() (err error) {
		if info, err = g.now(); err == nil && info.EndedAtUnix == nil {
			err = fmt.Errorf("%v is %s", g, info.State)
		}
		return err
	})
	if info.State != state {
		t.Errorf("state of %v: got %s, want %s", g, info.State, state)
	}
	for _, word := range reason {
		if !strings.Contains(info.Reason, word) {
			t.Errorf("reason of the end of %v: got %q, want %q in it", g, info.Reason, word)
		}
	}
	_, err := g.exec(client.ExecRequest{Args: []string{"true"}})
	wantError(t, "exec in a sandbox that ended", err, 410, "sandbox_gone", g.ID)
	eventually(t, tidyLimit, func() error { // its process and its directory go last
		if listed := g.d.must("ls", "-q"); strings.Contains(listed, g.ID) {
			return fmt.Errorf("forkd ls lists %v, which has ended", g)
		}
		return nil
	})
	if listed := g.d.must("ls", "-a"); !strings.Contains(listed, g.ID) {
		t.Errorf("forkd ls -a does not list %v, which has ended a moment ago", g)
	}
}

func killProcess(t *testing.T, pid int) {
	t.Helper()
	if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
		t.Fatalf("kill process %d: %v", pid, err)
	}
}

// TestMonitorsKilled kills single monitors: of a sandbox, of a pool member, of one that was taken over, and while no daemon runs.
func TestMonitorsKilled(t *testing.T) {
	t.Parallel()
	d := ownDaemon(t, setup{})
	guests := d.fork(4)
	d.remember(guests)
	d.fillPool(pyTag, 1)

	killProcess(t, guests[0].PID)
	guests[0].awaitEnd(api.SandboxInfoStateFailed, "monitor", "killed")
	for name, pid := range machinesIn(d.run) {
		if !slices.ContainsFunc(guests, func(g *guest) bool { return g.ID == name }) {
			killProcess(t, pid) // of the pool
			eventually(t, tidyLimit, func() error {
				if machinesIn(d.run)[name] != 0 {
					return errors.New("the pool's member is still there")
				}
				return nil
			})
		}
	}
	d.awaitPool(pyTag, 1)
	d.checkTidy()

	d.kill9()
	killProcess(t, guests[1].PID)
	d.start(setup{})
	guests[1].awaitEnd(api.SandboxInfoStateFailed, "lost while the daemon was down")
	killProcess(t, guests[2].PID)
	guests[2].awaitEnd(api.SandboxInfoStateFailed, "monitor")
	d.checkSandboxes(guests[3])
	if got := guests[3].py("mine"); got != "3" {
		t.Errorf("the sibling of those that were killed remembers %s, want 3", got)
	}
	d.awaitPool(pyTag, 1)
	d.checkTidy()
	// What ended can be forgotten, once.
	guests[0].kill()
	err := d.client.Kill(t.Context(), guests[0].ID)
	wantError(t, "second kill", err, 404, "sandbox_not_found", guests[0].ID)
}

// TestGuestEnds: guests end in their own ways, and their sandboxes with them, with a reason and the last words on the console.
func TestGuestEnds(t *testing.T) {
	d := sharedDaemon(t)
	tests := []struct {
		name, command, console string
		state                  api.SandboxInfoState
		reason                 string
	}{
		{"powers off", "echo o >/proc/sysrq-trigger; sleep 60", "", api.SandboxInfoStateStopped, "the guest shut down"},
		{"reboots", "echo b >/proc/sysrq-trigger; sleep 60", "", api.SandboxInfoStateStopped, "the guest shut down"},
		{"panics", "echo c >/proc/sysrq-trigger; sleep 60", "Kernel panic", api.SandboxInfoStateFailed, "the guest's kernel panicked: sysrq triggered crash"},
		{"kills its agent", "kill -ABRT 1; sleep 60", "Attempted to kill init", api.SandboxInfoStateFailed, "the guest's kernel panicked: Attempted to kill init"},
	}
	sibling := d.fork1()
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			d := d.in(t)
			g := d.fork1()
			// Which of the two it is depends on what is seen first: the end of the guest, or of its connection.
			_, err := g.exec(client.ExecRequest{Args: []string{"sh", "-c", tt.command}})
			if !client.IsCode(err, "sandbox_gone") && !client.IsCode(err, "guest_unreachable") {
				t.Errorf("the command that ended the guest: got %v, want the sandbox gone", err)
			}
			g.awaitEnd(tt.state, tt.reason)
			if console := d.must("logs", g.ID); !strings.Contains(console, tt.console) {
				t.Errorf("the console lacks %q:\n%s", tt.console, console)
			}
			d.checkTidy()
		})
	}
	if got := sibling.py("6 * 7"); got != "42" {
		t.Errorf("a sibling of guests that ended answers %s, want 42", got)
	}
}

// TestDrain stops the daemon politely while it is busy: what is under way is done, what is new is refused, sandboxes go on.
func TestDrain(t *testing.T) {
	t.Parallel()
	d := ownDaemon(t, setup{})
	guests := d.fork(2)
	d.remember(guests)
	d.fillPool(pyTag, 1)
	ended := make(chan error, 1)
	go func() {
		out, err := guests[0].trySh("echo >/root/begun; sleep 8; echo done")
		if err == nil && out != "done" {
			err = fmt.Errorf("got %q, want done", out)
		}
		ended <- err
	}()
	eventually(t, callLimit, func() error { _, err := guests[0].trySh("test -e /root/begun"); return err })
	d.ask()
	if err := <-ended; err != nil {
		t.Errorf("the command that ran when the daemon was told to stop: %v", err)
	}
	if err := d.awaitStop(); err != nil {
		t.Fatal(err)
	}
	if _, err := d.client.Sandboxes(t.Context(), false); !client.IsCode(err, client.CodeNoDaemon) {
		t.Errorf("request to a daemon that has stopped: %v", err)
	}
	if got := len(machinesIn(d.run)); got != len(guests) {
		t.Errorf("%d monitors are there after the daemon stopped, want those of the %d sandboxes", got, len(guests))
	}

	d.start(setup{args: []string{"--drain-timeout", "1s"}})
	d.checkSandboxes(guests...)
	d.checkRemembered(guests)
	snapshot := d.snapshotUnderWay()
	go func() { _, err := guests[0].trySh("echo > /root/long; sleep 3600"); ended <- err }()
	eventually(t, callLimit, func() error { _, err := guests[0].trySh("test -e /root/long"); return err })
	d.stop()
	for what, failed := range map[string]<-chan error{"command": ended, "snapshot": snapshot} {
		if err := <-failed; !client.IsCode(err, "shutting_down") {
			t.Errorf("a %s that outlasts the drain timeout: got %v, want the code shutting_down", what, err)
		}
	}
	if got := len(machinesIn(d.run)); got != len(guests) {
		t.Errorf("%d monitors are there after the daemon stopped, want those of the %d sandboxes", got, len(guests))
	}
	d.start(setup{})
	d.checkSandboxes(guests...)
	d.checkRemembered(guests)
	d.checkTidy()
}
