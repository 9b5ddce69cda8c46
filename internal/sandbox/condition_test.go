package sandbox

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/forkd/forkd/internal/guest/agentproto"
)

func TestConditionsTake(t *testing.T) {
	var c conditions
	now := time.Unix(1000, 0)
	step := func(n agentproto.Notice, wantBegun, wantOver string, wantKilled int) {
		t.Helper()
		begun, over, killed := c.take(n, now)
		text := func(list []Condition) string {
			var words []string
			for _, c := range list {
				words = append(words, fmt.Sprintf("%s %d", c.Kind, c.Count))
			}
			return strings.Join(words, ", ")
		}
		if text(begun) != wantBegun || text(over) != wantOver || killed != wantKilled {
			t.Errorf("%+v: got %q begun, %q over, %d killed, want %q, %q, %d", n, text(begun), text(over), killed, wantBegun, wantOver, wantKilled)
		}
		now = now.Add(time.Second)
	}
	step(agentproto.Notice{}, "", "", 0)
	step(agentproto.Notice{OOMKills: 2, Victim: "a"}, "guest_oom 2", "", 2)
	step(agentproto.Notice{OOMKills: 3, Victim: "b\x1b[2J\xff"}, "guest_oom 3", "", 1)
	step(agentproto.Notice{OOMKills: 3, DiskFull: true, DiskFree: 5 << 10, DiskSize: 8 << 20}, "disk_full 0", "", 0)
	step(agentproto.Notice{OOMKills: 3, DiskFull: true}, "", "", 0)
	want := []Condition{
		{Kind: ConditionGuestOOM, Since: time.Unix(1001, 0), Count: 3, Detail: "the guest had no memory left: its kernel has killed 3 programs, last b[2J"},
		{Kind: ConditionDiskFull, Since: time.Unix(1003, 0), Detail: "the guest's disk is full: 5 KiB of 8 MiB are free"},
	}
	if diff := cmp.Diff(c.list(), want); diff != "" {
		t.Errorf("conditions (-got +want):\n%s", diff)
	}
	step(agentproto.Notice{OOMKills: 3}, "", "disk_full 0", 0)
	step(agentproto.Notice{OOMKills: 1}, "guest_oom 1", "", 1) // of an earlier state
	step(agentproto.Notice{OOMKills: 1 << 31}, "guest_oom 2147483648", "", mostKills)
}

// TestConditions has a guest run out of memory and of disk, and its kernel panic: each is in the sandbox, told, and counted; no sibling has it.
func TestConditions(t *testing.T) {
	w := newWorld(t)
	d := w.start(t, options{})
	d.snapshot(t, "base", nil)
	boxes := d.fork(t, "base", 2, nil)
	id, sibling := boxes[0].ID, boxes[1].ID
	res, err := d.Exec(t.Context(), id, ExecRequest{Args: []string{"oom", "greedy"}})
	if err != nil || !res.OOMKilled || res.DiskFull || res.ExitCode != 137 {
		t.Errorf("a command that the kernel killed: got %+v, %v", res, err)
	}
	d.awaitConditions(t, id, "guest_oom: the guest had no memory left: its kernel has killed 1 program, last greedy")
	if res, err = d.Exec(t.Context(), id, ExecRequest{Args: []string{"filldisk"}}); err != nil || res.OOMKilled || !res.DiskFull {
		t.Errorf("a command that filled the disk: got %+v, %v", res, err)
	}
	d.awaitConditions(t, id, "guest_oom: ", "disk_full: the guest's disk is full")
	d.awaitConditions(t, sibling)

	// They are of the machine: a fork of it has its full disk, but has lost no program.
	if _, err := d.Branch(t.Context(), id, BranchRequest{Tag: "tip", Wait: true}); err != nil {
		t.Fatal(err)
	}
	child := d.fork(t, "tip", 1, nil)[0].ID
	if _, err := d.Exec(t.Context(), child, ExecRequest{Args: []string{"oom", "again"}}); err != nil {
		t.Error(err)
	}
	d.awaitConditions(t, child, "guest_oom: the guest had no memory left: its kernel has killed 1 program, last again")

	// The next daemon asks the guest.
	d.stop(t)
	d = w.start(t, options{})
	d.awaitConditions(t, id, "guest_oom: ", "disk_full: ")
	if s := d.Stats(); s.OOMGuest != 0 {
		t.Errorf("%d kills are counted that an earlier daemon counted", s.OOMGuest)
	}
	if _, err := d.Exec(t.Context(), id, ExecRequest{Args: []string{"cleardisk"}}); err != nil {
		t.Error(err)
	}
	d.awaitConditions(t, id, "guest_oom: ")
	d.events.await(t, id, EventConditionOver, "room again")

	_, err = d.Exec(t.Context(), id, ExecRequest{Args: []string{"panic", "attempted", "to", "kill", "init!"}})
	const why = "the guest's kernel panicked: attempted to kill init!"
	if err != nil && !strings.Contains(err.Error(), why) {
		t.Errorf("a command that made the kernel panic: got %v", err)
	}
	d.events.await(t, id, EventSandboxState, why)
	if b, err := d.Sandbox(t.Context(), id); err != nil || b.State != StateFailed || b.Reason != why {
		t.Errorf("after a panic: got %+v, %v", b, err)
	}
	eventually(t, "counts", func() string {
		if s := d.Stats(); s.Panics != 1 || s.Lost != 0 || s.Shutdowns != 0 {
			return fmt.Sprintf("%+v", s)
		}
		return ""
	})
}

// awaitConditions waits until a sandbox has conditions that begin so, and no others.
func (d *daemon) awaitConditions(t *testing.T, id string, want ...string) {
	t.Helper()
	eventually(t, "conditions", func() string {
		b, err := d.Sandbox(t.Context(), id)
		if err != nil {
			return err.Error()
		}
		fits := len(b.Conditions) == len(want)
		for i, w := range want {
			fits = fits && strings.HasPrefix(string(b.Conditions[i].Kind)+": "+b.Conditions[i].Detail, w)
		}
		if !fits {
			return fmt.Sprintf("got %+v, want %q", b.Conditions, want)
		}
		return ""
	})
}

// await waits for an event whose reason says so.
func (l *eventLog) await(t *testing.T, id string, kind EventKind, reason string) {
	t.Helper()
	eventually(t, string(kind), func() string {
		l.mu.Lock()
		defer l.mu.Unlock()
		for _, e := range l.list {
			if e.SandboxID == id && e.Kind == kind && strings.Contains(e.Reason, reason) {
				return ""
			}
		}
		return fmt.Sprintf("no event says %q: %+v", reason, l.list)
	})
}
