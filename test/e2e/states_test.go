package e2e

import (
	"context"
	"fmt"
	"strings"
	"testing"

	"github.com/forkd/forkd/api"
	"github.com/forkd/forkd/client"
)

// told collects a daemon's events as lines, until the test ends.
type told struct {
	lines chan string
}

func (d *daemon) listen() *told {
	d.t.Helper()
	ctx, cancel := context.WithCancel(context.WithoutCancel(d.t.Context()))
	stream, err := d.client.Events(ctx)
	if err != nil {
		d.t.Fatal(err)
	}
	out := &told{lines: make(chan string, 1000)}
	done := make(chan struct{})
	go func() {
		defer close(done)
		for e, err := range stream.All() {
			if err != nil {
				return
			}
			out.lines <- strings.Join([]string{string(e.Kind), e.SandboxID, e.State, string(e.Condition), e.Reason}, " ")
		}
	}()
	d.t.Cleanup(func() {
		cancel()
		_ = stream.Close()
		<-done
	})
	return out
}

// await waits for an event that begins so.
func (o *told) await(t *testing.T, format string, args ...any) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), callLimit)
	defer cancel()
	want, seen := fmt.Sprintf(format, args...), []string{}
	for {
		select {
		case line := <-o.lines:
			if strings.HasPrefix(line, want) {
				return
			}
			seen = append(seen, line)
		case <-ctx.Done():
			t.Fatalf("no event began with %q: %q", want, seen)
		}
	}
}

// TestShortOfEverything has a guest run out of memory, then of disk, and then its kernel panics: the command that died of it says so, and so do
// the sandbox, an event and a counter.
func TestShortOfEverything(t *testing.T) {
	d := sharedDaemon(t)
	sibling, g := d.fork1(), d.fork1()
	events := d.listen()

	before := d.metrics()[`forkd_oom_kills_total{where="guest"}`]
	res, err := g.exec(client.ExecRequest{Args: []string{"sh", "-c", "python3 -c 'a = []\nwhile True: a.append(bytearray(b\"x\") * (1 << 20))'; exit $?"}})
	if err != nil || !res.OOMKilled || res.ExitCode != 128+9 {
		t.Errorf("a command that takes all memory: got %+v, %v, want it killed for that", res, err)
	}
	events.await(t, "sandbox_condition %s running guest_oom the guest had no memory left: its kernel has killed 1 program, last python3", g.ID)
	g.awaitConditions("guest_oom")
	if got := d.metrics()[`forkd_oom_kills_total{where="guest"}`] - before; got != 1 {
		t.Errorf("%v kills were counted, want 1", got)
	}

	if res, err = g.exec(client.ExecRequest{Args: []string{"dd", "if=/dev/zero", "of=/root/big", "bs=1M", "count=1000"}}); err != nil || !res.DiskFull || res.ExitCode == 0 {
		t.Errorf("a command that fills the disk: got %+v, %v, want it to fail for that", res, err)
	}
	events.await(t, "sandbox_condition %s running disk_full the guest's disk is full: ", g.ID)
	g.awaitConditions("guest_oom", "disk_full")
	g.sh("rm /root/big")
	events.await(t, "sandbox_condition_over %s running disk_full ", g.ID)
	g.awaitConditions("guest_oom")

	_, err = g.exec(client.ExecRequest{Args: []string{"sh", "-c", "echo c >/proc/sysrq-trigger"}})
	const why = "the guest's kernel panicked: sysrq triggered crash"
	if err == nil || !strings.Contains(err.Error(), why) {
		t.Errorf("a command that makes the kernel panic: got %v, want %q", err, why)
	}
	events.await(t, "sandbox_state %s failed  %s", g.ID, why)
	g.awaitEnd(api.SandboxInfoStateFailed, why)
	if s, err := sibling.now(); err != nil || len(s.Conditions) > 0 {
		t.Errorf("a sibling: %+v, %v, want it well", s.Conditions, err)
	}
	d.checkSandboxes(sibling)
}

// awaitConditions waits until these, and no others, are the matter with a sandbox.
func (g *guest) awaitConditions(want ...string) {
	g.d.t.Helper()
	eventually(g.d.t, callLimit, func() error {
		s, err := g.now()
		if err != nil {
			return err
		}
		var kinds []string
		for _, c := range s.Conditions {
			kinds = append(kinds, string(c.Kind))
		}
		if strings.Join(kinds, " ") != strings.Join(want, " ") {
			return fmt.Errorf("%s has the conditions %q, want %q", g, kinds, want)
		}
		return nil
	})
}
