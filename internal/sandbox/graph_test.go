package sandbox

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// diff makes a snapshot of another one in which a command was run.
func (d *daemon) diff(t *testing.T, from, tag, command string) Snapshot {
	t.Helper()
	s, err := d.SnapshotDiff(t.Context(), DiffRequest{From: from, Tag: tag, Steps: []WarmUp{{WarmUpExec, command}}}, nil)
	if err != nil {
		t.Fatalf("SnapshotDiff %s of %s: %v", tag, from, err)
	}
	return s
}

func TestSnapshotDiff(t *testing.T) {
	d := newWorld(t).start(t, options{})
	d.snapshot(t, "base", func(r *SnapshotRequest) {
		r.WarmUp = []WarmUp{{WarmUpExec, "echo base > /tmp/base; poke 1048576 base"}}
	})
	var steps []string
	s, err := d.SnapshotDiff(t.Context(), DiffRequest{From: "base", Tag: "tip", Env: map[string]string{"MORE": "1"},
		Steps: []WarmUp{{WarmUpExec, "echo tip > /tmp/tip; poke 1056768 tip"}, {WarmUpEval, "x = 5"}}}, func(p Progress) { steps = append(steps, p.Step) })
	if err != nil {
		t.Fatal(err)
	}
	if s.ParentTag != "base" || s.Status != StatusReady || !s.Bootable || s.BranchedFrom != "" || s.BootWarm == 0 || s.DiffLogicalBytes == 0 || s.Warning != "" {
		t.Errorf("SnapshotDiff: got %+v", s)
	}
	if got := strings.Join(steps, " "); got != "fork warm_up warm_up exercise freeze store" {
		t.Errorf("progress: got %s", got)
	}
	d.checkTidy(t, 0, "base", "tip")
	for range 2 {
		box := d.fork(t, "tip", 1, nil)[0]
		if got := d.sh(t, box.ID, "cat /tmp/base /tmp/tip; peek 1048576 4; peek 1056768 3"); got != "base\ntip\nbasetip" {
			t.Errorf("memory of a child: got %q", got)
		}
		if got := d.sh(t, box.ID, "env"); !strings.Contains(got, "MORE=1") || !strings.Contains(got, "BASE=1") {
			t.Errorf("environment of a child: got %q", got)
		}
		if res, err := d.Eval(t.Context(), box.ID, EvalRequest{Code: "x"}); err != nil || res.Result != "5" {
			t.Errorf("interpreter of a child: got %+v, %v", res, err)
		}
		d = d.restart(t)
	}
	man, err := d.snapshots.Get(s.ID)
	if err != nil || len(man.Recipe.WarmUp) != 3 || man.Recipe.WarmUp[2].Code != "x = 5" {
		t.Errorf("recipe: got %+v, %v", man.Recipe, err)
	}
	for name, tt := range map[string]struct {
		req  DiffRequest
		want Code
	}{
		"unknown":    {DiffRequest{From: "none", Tag: "x", Steps: []WarmUp{{WarmUpExec, "true"}}}, CodeSnapshotNotFound},
		"exists":     {DiffRequest{From: "base", Tag: "tip", Steps: []WarmUp{{WarmUpExec, "true"}}}, CodeSnapshotExists},
		"no steps":   {DiffRequest{From: "base", Tag: "x"}, CodeInvalidArgument},
		"bad tag":    {DiffRequest{From: "base", Tag: "x y", Steps: []WarmUp{{WarmUpExec, "true"}}}, CodeInvalidTag},
		"fails":      {DiffRequest{From: "base", Tag: "x", Steps: []WarmUp{{WarmUpExec, "stderr no; exit 3"}}}, CodeWarmUpFailed},
		"dies":       {DiffRequest{From: "base", Tag: "x", Steps: []WarmUp{{WarmUpExec, "crash"}}}, CodeWarmUpFailed},
		"powers off": {DiffRequest{From: "base", Tag: "x", Steps: []WarmUp{{WarmUpExec, "poweroff; sleep 5"}}}, CodeWarmUpFailed},
	} {
		_, err := d.SnapshotDiff(t.Context(), tt.req, nil)
		checkCode(t, name, err, tt.want)
	}
	d.checkTidy(t, 2, "base", "tip") // the children live
}

func TestCompact(t *testing.T) {
	d := newWorld(t).start(t, options{})
	d.snapshot(t, "base", nil)
	d.diff(t, "base", "mid", "echo mid > /tmp/mid; poke 1048576 mid")
	d.diff(t, "mid", "tip", "echo tip > /tmp/tip; poke 1056768 tip")
	s, err := d.Compact(t.Context(), "tip", "flat")
	if err != nil || s.ParentID != "" || s.Status != StatusReady || !s.Bootable || s.Tag != "flat" {
		t.Fatalf("Compact: got %+v, %v", s, err)
	}
	_, err = d.Compact(t.Context(), "tip", "flat")
	checkCode(t, "Compact to a tag that exists", err, CodeSnapshotExists)
	_, err = d.Compact(t.Context(), "none", "x")
	checkCode(t, "Compact of nothing", err, CodeSnapshotNotFound)
	old := d.fork(t, "tip", 1, nil)[0]
	d.mark(t, old.ID, "one")
	if err := d.Kill(t.Context(), old.ID); err != nil {
		t.Fatal(err)
	}
	if err := d.DeleteSnapshot(t.Context(), "base", DeleteCascade); err != nil {
		t.Fatal(err)
	}
	d.checkTidy(t, 0, "flat")
	for range 2 {
		box := d.fork(t, "flat", 1, nil)[0]
		if got := d.sh(t, box.ID, "cat /tmp/mid /tmp/tip; peek 1048576 3; peek 1056768 3"); got != "mid\ntip\nmidtip" {
			t.Errorf("memory of a child: got %q", got)
		}
		d = d.restart(t)
	}
}

// shape draws a tree: tags (or ? for none), the number of sandboxes, and children in parentheses.
func shape(nodes []TreeNode) string {
	var out []string
	for _, n := range nodes {
		s := n.Snapshot.Tag
		if s == "" {
			s = "?"
		}
		if len(n.Sandboxes) > 0 {
			s += fmt.Sprintf("+%d", len(n.Sandboxes))
		}
		if len(n.Children) > 0 {
			s += "(" + shape(n.Children) + ")"
		}
		out = append(out, s)
	}
	return strings.Join(out, " ")
}

func (d *daemon) checkTree(t *testing.T, want string) {
	t.Helper()
	tree, err := d.Tree(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if got := shape(tree); got != want {
		t.Errorf("tree: got %s, want %s", got, want)
	}
}

func TestTreeAndDelete(t *testing.T) {
	d := newWorld(t).start(t, options{})
	d.checkTree(t, "")
	d.snapshot(t, "base", nil)
	d.snapshot(t, "other", nil)
	d.diff(t, "base", "a", "true")
	d.diff(t, "base", "b", "true")
	src := d.fork(t, "a", 1, nil)[0]
	d.branch(t, src.ID, "aa", nil)
	res, err := d.ForkRunning(t.Context(), src.ID, ForkRunningRequest{N: 2})
	if err != nil {
		t.Fatal(err)
	}
	d.suspend(t, res.Results[0].Sandbox.ID)
	leaf := d.fork(t, "aa", 1, nil)[0]
	for range 2 {
		d.checkTree(t, "base(a+3(aa+1) b) other")
		d = d.restart(t)
	}
	info, err := d.Snapshot(t.Context(), "a")
	if err != nil || fmt.Sprint(info.Ancestors, info.Dependents) != "[base] [aa]" {
		t.Errorf("family of a: got %v %v, %v", info.Ancestors, info.Dependents, err)
	}
	err = d.DeleteSnapshot(t.Context(), "base", DeleteSafe)
	checkCode(t, "DeleteSnapshot of the root", err, CodeSnapshotInUse)
	for _, name := range []string{"a", "aa", "b"} {
		if err == nil || !strings.Contains(err.Error(), name) {
			t.Errorf("DeleteSnapshot of the root: got %v, want it to name %s", err, name)
		}
	}
	checkCode(t, "cascade with sandboxes", d.DeleteSnapshot(t.Context(), "base", DeleteCascade), CodeSnapshotInUse)
	checkCode(t, "force with dependents", d.DeleteSnapshot(t.Context(), "a", DeleteForce), CodeSnapshotInUse)
	if err := d.Kill(t.Context(), leaf.ID); err != nil {
		t.Fatal(err)
	}
	for _, step := range []struct {
		tag  string
		mode DeleteMode
		want string
	}{
		{"aa", DeleteSafe, "base(a+3 b) other"},
		{"a", DeleteForce, "base(b) other"}, // with its sandboxes, the suspended one too
		{"base", DeleteCascade, "other"},
		{"other", DeleteSafe, ""},
	} {
		if err := d.DeleteSnapshot(t.Context(), step.tag, step.mode); err != nil {
			t.Fatalf("DeleteSnapshot %s: %v", step.tag, err)
		}
		d.checkTree(t, step.want)
	}
	d.checkTidy(t, 0)
}

// TestAddSnapshot adds a chain as it comes out of a pack: directories without a record.
func TestAddSnapshot(t *testing.T) {
	from := newWorld(t).start(t, options{})
	from.snapshot(t, "base", func(r *SnapshotRequest) { r.WarmUp = []WarmUp{{WarmUpExec, "echo base > /tmp/base"}} })
	mid := from.diff(t, "base", "mid", "echo mid > /tmp/mid")
	tip := from.diff(t, "mid", "tip", "echo tip > /tmp/tip")
	d := newWorld(t).start(t, options{})
	snapshots := func(d *daemon) string { return filepath.Join(d.w.data(), "snapshots") }
	if err := os.CopyFS(snapshots(d), os.DirFS(snapshots(from))); err != nil {
		t.Fatal(err)
	}

	checkCode(t, "unknown", d.AddSnapshot(t.Context(), "x", "snnone"), CodeSnapshotNotFound)
	if err := d.AddSnapshot(t.Context(), "moved", tip.ID); err != nil {
		t.Fatal(err)
	}
	checkCode(t, "again", d.AddSnapshot(t.Context(), "again", tip.ID), CodeSnapshotExists)
	for range 2 {
		d.checkTree(t, "?(?(moved))")
		box := d.fork(t, "moved", 1, nil)[0]
		if got := d.sh(t, box.ID, "cat /tmp/base /tmp/mid /tmp/tip"); got != "base\nmid\ntip" {
			t.Errorf("memory of a child: got %q", got)
		}
		if err := d.Kill(t.Context(), box.ID); err != nil {
			t.Fatal(err)
		}
		d = d.restart(t)
	}
	list, err := d.Snapshots(t.Context())
	if err != nil || len(list) != 1 || len(list[0].Ancestors) != 2 {
		t.Errorf("Snapshots: got %+v, %v", list, err)
	}
	if err := d.AddSnapshot(t.Context(), "middle", mid.ID); err != nil { // it came with the other one
		t.Fatal(err)
	}
	d.checkTree(t, "?(middle(moved))")
	d.diff(t, "middle", "side", "true")
	d = d.restart(t)
	d.checkTree(t, "?(middle(moved side))")

	id, release, err := d.Hold(t.Context(), "moved")
	if err != nil || id != tip.ID {
		t.Fatalf("Hold: got %s, %v", id, err)
	}
	checkCode(t, "DeleteSnapshot of what is held", d.DeleteSnapshot(t.Context(), "moved", DeleteForce), CodeSnapshotInUse)
	checkCode(t, "DeleteSnapshot of what that rests on", d.DeleteSnapshot(t.Context(), "middle", DeleteCascade), CodeSnapshotInUse)
	release()
	if err := d.DeleteSnapshot(t.Context(), "moved", DeleteSafe); err != nil {
		t.Fatal(err)
	}
	d.checkTree(t, "?(middle(side))")
	if err := d.DeleteSnapshot(t.Context(), "middle", DeleteCascade); err != nil { // and the root, which serves nothing any more
		t.Fatal(err)
	}
	d.checkTidy(t, 0)
	recs, err := d.db.Snapshots(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(len(recs), 0); diff != "" {
		t.Errorf("records (-got +want):\n%s", diff)
	}
}
