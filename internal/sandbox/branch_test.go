package sandbox

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/forkd/forkd/internal/failpoint"
	"github.com/forkd/forkd/internal/memory"
	"github.com/forkd/forkd/internal/vmm/vmmtest"
)

// branch branches a sandbox and waits until the snapshot is on disk.
func (d *daemon) branch(t *testing.T, id, tag string, change func(*BranchRequest)) Snapshot {
	t.Helper()
	req := BranchRequest{Tag: tag, Wait: true}
	if change != nil {
		change(&req)
	}
	s, err := d.Branch(t.Context(), id, req)
	if err != nil {
		t.Fatalf("Branch %s of %s: %v", tag, id, err)
	}
	return s
}

// mark writes something into a sandbox's memory: a file, and a page of its own.
func (d *daemon) mark(t *testing.T, id, text string) {
	t.Helper()
	d.sh(t, id, fmt.Sprintf("echo %s > /tmp/mark; poke 1048576 %s", text, text))
}

// checkMark compares a sandbox's memory with what was written into it or what it came from.
func (d *daemon) checkMark(t *testing.T, id, want string) {
	t.Helper()
	if got := d.sh(t, id, fmt.Sprintf("cat /tmp/mark; peek 1048576 %d", len(want))); got != want+"\n"+want {
		t.Errorf("memory of sandbox %s: got %q, want %q twice", id, got, want)
	}
}

func TestBranch(t *testing.T) {
	for _, mode := range []BranchMode{"", BranchLive, BranchDiff, BranchFull} {
		t.Run("mode "+string(mode), func(t *testing.T) {
			t.Parallel()
			d := newWorld(t).start(t, options{})
			base := d.snapshot(t, "base", nil)
			src := d.fork(t, "base", 1, func(r *ForkRequest) { r.Env = map[string]string{"MINE": "2"} })[0]
			d.mark(t, src.ID, "one")
			s := d.branch(t, src.ID, "tip", func(r *BranchRequest) { r.Mode = mode })
			d.mark(t, src.ID, "two")

			if s.Status != StatusReady || !s.Bootable || s.BranchedFrom != src.ID || s.Pause <= 0 || s.DiffTime < s.Pause || s.DiffLogicalBytes == 0 {
				t.Errorf("branch: got %+v", s)
			}
			wantParent := base.ID
			if mode == BranchFull {
				wantParent = ""
			}
			if s.ParentID != wantParent || s.Warning != "" {
				t.Errorf("branch: got parent %q, warning %q, want parent %q", s.ParentID, s.Warning, wantParent)
			}
			if mode != BranchFull && s.PhysicalBytes > 300<<10 {
				t.Errorf("branch: got %d bytes on disk, want no more than what changed", s.PhysicalBytes)
			}
			check := func(d *daemon) {
				child := d.fork(t, "tip", 2, nil)[1]
				d.checkMark(t, child.ID, "one")
				env := d.sh(t, child.ID, "env")
				if !strings.Contains(env, "MINE=2") || !strings.Contains(env, "BASE=1") {
					t.Errorf("environment of a child of the branch: got %q, want what its source had", env)
				}
				if got := d.sh(t, child.ID, "instance"); got != child.ID {
					t.Errorf("instance id of the child: got %s, want its own", got)
				}
			}
			check(d)
			d.checkMark(t, src.ID, "two")
			if b, err := d.Sandbox(t.Context(), src.ID); err != nil || b.BranchCount != 1 || b.State != StateRunning {
				t.Errorf("source: got %+v, %v", b, err)
			}
			if err := d.VerifySnapshot(t.Context(), "tip"); err != nil {
				t.Errorf("VerifySnapshot: %v", err)
			}
			w := d.w
			d.stop(t)
			d = w.start(t, options{})
			check(d) // from disk
			again, err := d.Snapshot(t.Context(), "tip")
			if err != nil || again.Pause != s.Pause || again.DiffLogicalBytes != s.DiffLogicalBytes {
				t.Errorf("after a restart: got %+v, %v, want the figures of %+v", again, err, s)
			}
		})
	}
}

// TestBranchOfBranch goes down ten times, by turns through sandboxes that were forked from a branch, from a running sandbox, and that live on.
func TestBranchOfBranch(t *testing.T) {
	w := newWorld(t)
	d := w.start(t, options{})
	d.snapshot(t, "base", nil)
	box := d.fork(t, "base", 1, nil)[0]
	want := "base"
	for i := range 10 {
		tag := fmt.Sprintf("b%d", i)
		d.sh(t, box.ID, fmt.Sprintf("echo %s > /tmp/f%d; poke %d %s", tag, i, 1<<20+i*8192, tag))
		s := d.branch(t, box.ID, tag, nil)
		if s.ParentTag != want {
			t.Fatalf("%s: got parent %q, want %q", tag, s.ParentTag, want)
		}
		switch i % 3 {
		case 0:
			box = d.fork(t, tag, 1, nil)[0]
			want = tag
		case 1: // the same goes on: its next difference is to the same base
		case 2:
			res, err := d.ForkRunning(t.Context(), box.ID, ForkRunningRequest{N: 1})
			if err != nil || res.Results[0].Err != nil {
				t.Fatalf("ForkRunning: %+v, %v", res, err)
			}
			box = *res.Results[0].Sandbox // and so is this one's: its own is not kept
		}
	}
	check := func(d *daemon) {
		box := d.fork(t, "b9", 1, nil)[0]
		for i := range 10 {
			tag := fmt.Sprintf("b%d", i)
			if got := d.sh(t, box.ID, fmt.Sprintf("cat /tmp/f%d; peek %d 2", i, 1<<20+i*8192)); got != tag+"\n"+tag {
				t.Errorf("what was written before %s: got %q", tag, got)
			}
		}
	}
	check(d)
	d.stop(t)
	check(w.start(t, options{}))
}

func TestBranchWithoutWait(t *testing.T) {
	points := failpoint.New()
	release := make(chan struct{})
	points.On(pointBranchStaged, 1, func(ctx context.Context) error { <-release; return nil })
	d := newWorld(t).start(t, options{failpoints: points})
	d.snapshot(t, "base", nil)
	src := d.fork(t, "base", 1, nil)[0]
	d.mark(t, src.ID, "one")
	s, err := d.Branch(t.Context(), src.ID, BranchRequest{Tag: "tip"})
	if err != nil || s.Status != StatusWriting || s.Bootable || s.Pause == 0 {
		t.Fatalf("Branch: got %+v, %v", s, err)
	}
	d.mark(t, src.ID, "two")
	child := d.fork(t, "tip", 1, nil)[0] // from memory
	d.checkMark(t, child.ID, "one")
	grandchild := d.fork(t, "tip", 1, nil)[0]
	if got, err := d.Snapshot(t.Context(), "tip"); err != nil || got.Status != StatusWriting || got.ParentTag != "base" || got.Pause == 0 {
		t.Errorf("Snapshot while it is written: got %+v, %v", got, err)
	}
	checkCode(t, "DeleteSnapshot while it is written", d.DeleteSnapshot(t.Context(), "tip", DeleteSafe), CodeInvalidState)
	checkCode(t, "DeleteSnapshot of what it rests on", d.DeleteSnapshot(t.Context(), "base", DeleteForce), CodeSnapshotInUse)
	if _, err := d.SetPool(t.Context(), "tip", 1); CodeOf(err) != CodeInvalidState {
		t.Errorf("SetPool while it is written: got %v", err)
	}
	if recs, err := d.db.Snapshots(t.Context()); err != nil || recs[1].Status != "writing" {
		t.Errorf("records: got %+v, %v", recs, err)
	}
	deep := make(chan Snapshot)
	go func() { deep <- d.branch(t, grandchild.ID, "deep", nil) }() // waits for what it rests on
	close(release)
	if s := <-deep; s.ParentTag != "tip" {
		t.Errorf("branch of a child of a branch that was being written: got parent %s, want tip", s.ParentTag)
	}
	eventually(t, "status", func() string {
		if got, err := d.Snapshot(t.Context(), "tip"); err != nil || got.Status != StatusReady || !got.Bootable {
			return fmt.Sprintf("got %+v, %v", got, err)
		}
		return ""
	})
}

func TestBranchThatCannotBeWritten(t *testing.T) {
	for _, point := range []string{pointBranchStaged, pointBranchPublished, pointBranchReady} {
		t.Run(strings.TrimPrefix(point, "sandbox."), func(t *testing.T) {
			t.Parallel()
			points := failpoint.New()
			forked := make(chan struct{})
			points.On(point, 1, func(context.Context) error { <-forked; return failpoint.ErrInjected })
			d := newWorld(t).start(t, options{failpoints: points})
			d.snapshot(t, "base", nil)
			src := d.fork(t, "base", 1, nil)[0]
			d.mark(t, src.ID, "one")
			if _, err := d.Branch(t.Context(), src.ID, BranchRequest{Tag: "tip"}); err != nil {
				t.Fatal(err)
			}
			child := d.fork(t, "tip", 1, nil)[0]
			close(forked)
			eventually(t, "status", func() string {
				if s, err := d.Snapshot(t.Context(), "tip"); err != nil || s.Status != StatusFailed || s.Warning == "" {
					return fmt.Sprintf("got %+v, %v, want it failed", s, err)
				}
				return ""
			})
			if recs, err := d.db.Snapshots(t.Context()); err != nil || len(recs) != 1 {
				t.Errorf("records: got %+v, %v, want that of the base", recs, err)
			}
			_, err := d.Fork(t.Context(), ForkRequest{Tag: "tip", N: 1})
			checkCode(t, "Fork of what failed", err, CodeSnapshotNotFound)
			d.checkMark(t, child.ID, "one")
			// Its children go on, and are branched over what is kept.
			s := d.branch(t, child.ID, "again", nil)
			if s.ParentTag != "base" {
				t.Errorf("branch of a child: got parent %q, want base", s.ParentTag)
			}
			d.checkMark(t, d.fork(t, "again", 1, nil)[0].ID, "one")
			d.branch(t, src.ID, "tip", nil) // the tag is free
			if err := d.Kill(t.Context(), child.ID); err != nil {
				t.Fatal(err)
			}
		})
	}
}

func TestForkRunning(t *testing.T) {
	for _, tag := range []string{"", "kept"} {
		t.Run("tag "+tag, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t)
			d := w.start(t, options{})
			base := d.snapshot(t, "base", nil)
			src := d.fork(t, "base", 1, func(r *ForkRequest) { r.Env = map[string]string{"MINE": "2"} })[0]
			d.mark(t, src.ID, "one")
			res, err := d.ForkRunning(t.Context(), src.ID, ForkRunningRequest{N: 3, Tag: tag, Env: map[string]string{"MORE": "3"}, Metadata: map[string]string{"k": "v"}})
			if err != nil || len(res.Results) != 3 || res.Pause <= 0 || res.Tag != tag {
				t.Fatalf("ForkRunning: got %+v, %v", res, err)
			}
			d.mark(t, src.ID, "two")
			var ids []string
			for _, r := range res.Results {
				if r.Err != nil {
					t.Fatal(r.Err)
				}
				b := r.Sandbox
				ids = append(ids, b.ID)
				d.checkMark(t, b.ID, "one")
				env := d.sh(t, b.ID, "env")
				for _, want := range []string{"BASE=1", "MINE=2", "MORE=3"} {
					if !strings.Contains(env, want) {
						t.Errorf("environment: got %q, want %s in it", env, want)
					}
				}
				if b.Metadata["k"] != "v" || d.sh(t, b.ID, "hostname") != b.ID {
					t.Errorf("child: got %+v", b)
				}
			}
			if a, b := d.sh(t, ids[0], "urandom"), d.sh(t, ids[1], "urandom"); a == b {
				t.Errorf("two children draw the same random numbers: %s", a)
			}
			dirs := 1
			if tag != "" {
				dirs = 2
				eventually(t, "status", func() string {
					if s, err := d.Snapshot(t.Context(), tag); err != nil || s.Status != StatusReady {
						return fmt.Sprintf("got %+v, %v", s, err)
					}
					return ""
				})
			}
			d.checkTidy(t, 4, make([]string, dirs)...)

			// A child outlives the daemon, and can still be branched.
			d.mark(t, ids[0], "three")
			d.stop(t)
			d = w.start(t, options{})
			d.checkMark(t, ids[1], "one")
			s := d.branch(t, ids[0], "grand", nil)
			if want := map[string]string{"": "base", "kept": "kept"}[tag]; s.ParentTag != want {
				t.Errorf("branch of a child: got parent %q, want %q", s.ParentTag, want)
			}
			checkCode(t, "DeleteSnapshot of the base", d.DeleteSnapshot(t.Context(), "base", DeleteSafe), CodeSnapshotInUse)
			d.stop(t)
			d = w.start(t, options{})
			d.checkMark(t, d.fork(t, "grand", 1, nil)[0].ID, "three")
			d.checkMark(t, src.ID, "two")
			for _, id := range ids {
				if err := d.Kill(t.Context(), id); err != nil {
					t.Fatal(err)
				}
			}
			if tag == "" && d.cache.Resident(res.SnapshotID) {
				t.Errorf("the instant is still resident without its children")
			}
			if d.cache.Resident(base.ID) != true {
				t.Errorf("the base is not resident")
			}
		})
	}
}

// TestUnkeptInstantGoes makes sure that an instant without a tag is gone with its last child.
func TestUnkeptInstantGoes(t *testing.T) {
	d := newWorld(t).start(t, options{})
	d.snapshot(t, "base", nil)
	src := d.fork(t, "base", 1, nil)[0]
	res, err := d.ForkRunning(t.Context(), src.ID, ForkRunningRequest{N: 2})
	if err != nil {
		t.Fatal(err)
	}
	if !d.cache.Resident(res.SnapshotID) {
		t.Fatal("the instant is not resident")
	}
	for i, r := range res.Results {
		if err := d.Kill(t.Context(), r.Sandbox.ID); err != nil {
			t.Fatal(err)
		}
		if got, want := d.cache.Resident(res.SnapshotID), i == 0; got != want {
			t.Errorf("after the end of child %d: resident %v, want %v", i, got, want)
		}
	}
}

func TestBranchesQueue(t *testing.T) {
	points := failpoint.New()
	release := make(chan struct{})
	points.On(memory.PointAhead, 1, func(ctx context.Context) error { <-release; return nil })
	d := newWorld(t).start(t, options{failpoints: points, limits: Limits{MaxBranches: 2, MaxBranchQueue: 2}})
	d.snapshot(t, "base", nil)
	boxes := d.fork(t, "base", 2, nil)
	var wg sync.WaitGroup
	start := func(id, tag string) {
		wg.Go(func() { d.branch(t, id, tag, nil) })
	}
	start(boxes[0].ID, "a1") // holds its window open
	eventually(t, "window", func() string {
		if points.Hits(memory.PointAhead) == 0 {
			return "not open"
		}
		return ""
	})
	start(boxes[0].ID, "a2")
	start(boxes[0].ID, "a3")
	eventually(t, "queue", func() string {
		if n := d.branching.Load(); n != 3 {
			return fmt.Sprintf("%d branches", n)
		}
		return ""
	})
	d.branch(t, boxes[1].ID, "b1", nil) // not behind those of another sandbox
	start(boxes[0].ID, "a4")
	eventually(t, "queue", func() string {
		if n := d.branching.Load(); n != 4 {
			return fmt.Sprintf("%d branches", n)
		}
		return ""
	})
	_, err := d.Branch(t.Context(), boxes[1].ID, BranchRequest{Tag: "b2", Wait: true})
	var refused *Error
	if !errors.As(err, &refused) || refused.Code != CodeBranchCap || refused.RetryAfter == 0 {
		t.Errorf("one too many: got %v, want too_many_branches with a time to try again", err)
	}
	close(release)
	wg.Wait()
	snaps, err := d.Snapshots(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	var tags []string
	for _, s := range snaps {
		tags = append(tags, s.Tag)
	}
	if want := []string{"a1", "a2", "a3", "a4", "b1", "base"}; !slices.Equal(tags, want) {
		t.Errorf("snapshots: got %v, want %v", tags, want)
	}
}

func TestManyBranches(t *testing.T) {
	d := newWorld(t).start(t, options{limits: Limits{MaxBranchQueue: 100}})
	d.snapshot(t, "base", nil)
	boxes := d.fork(t, "base", 4, nil)
	var wg sync.WaitGroup
	for i, b := range boxes {
		d.mark(t, b.ID, fmt.Sprintf("box%d", i))
		for n := range 4 {
			wg.Go(func() { d.branch(t, b.ID, fmt.Sprintf("t%d-%d", i, n), nil) })
		}
		wg.Go(func() {
			if _, err := d.ForkRunning(t.Context(), b.ID, ForkRunningRequest{N: 2}); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	for i := range boxes {
		d.checkMark(t, d.fork(t, fmt.Sprintf("t%d-3", i), 1, nil)[0].ID, fmt.Sprintf("box%d", i))
	}
	d.checkTidy(t, 4+8+4, make([]string, 17)...)
}

// TestBranchFailures makes everything fail that a branch needs; the source runs on, and nothing is left.
func TestBranchFailures(t *testing.T) {
	type failure struct {
		name   string
		point  string
		fault  vmmtest.Fault
		lethal bool // for the source
	}
	var failures []failure
	for _, point := range memory.Points() {
		failures = append(failures, failure{name: point, point: point})
	}
	for _, point := range []string{pointBranchRecorded, pointBranchPaused, pointBranchSaved, pointBranchCaptured} {
		failures = append(failures, failure{name: point, point: point})
	}
	for _, step := range []vmmtest.Step{vmmtest.StepPause, vmmtest.StepSave, vmmtest.StepResume} {
		for _, action := range []vmmtest.Action{vmmtest.Fail, vmmtest.FailLate, vmmtest.Die} {
			failures = append(failures, failure{name: fmt.Sprintf("%s %s", step, action), fault: vmmtest.Fault{Step: step, Call: 1, Action: action}, lethal: action == vmmtest.Die})
		}
	}
	failures = append(failures, failure{name: "never resumed", fault: vmmtest.Fault{Step: vmmtest.StepResume, Action: vmmtest.Fail}, lethal: true})
	// What fails when the source goes on already is told afterwards, if nobody waits.
	after := []string{memory.PointPaused, memory.PointHeld, memory.PointResumed, memory.PointSweep, memory.PointDone, pointBranchCaptured}
	for _, f := range failures {
		for _, req := range []BranchRequest{{Mode: BranchLive, Wait: true}, {Mode: BranchDiff, Wait: true}, {Mode: BranchLive}} {
			t.Run(fmt.Sprintf("%s %s wait %v", f.name, req.Mode, req.Wait), func(t *testing.T) {
				t.Parallel()
				points := failpoint.New()
				d := newWorld(t).start(t, options{failpoints: points})
				d.snapshot(t, "base", nil)
				src := d.fork(t, "base", 1, nil)[0]
				d.mark(t, src.ID, "one")
				if f.point != "" {
					points.On(f.point, 1, func(context.Context) error { return failpoint.ErrInjected })
				} else {
					d.fake.Inject(f.fault)
				}
				req.Tag = "tip"
				s, err := d.Branch(t.Context(), src.ID, req)
				if err == nil && s.Status == StatusWriting {
					s = d.written(t, "tip")
				}
				if err == nil && s.Status == StatusFailed && slices.Contains(after, f.point) {
					err = errors.New(s.Warning)
				}
				d.fake.Inject()
				passed := f.point == "" || points.Hits(f.point) > 0
				forgiven := f.fault.Step == vmmtest.StepResume && !f.lethal // the second try does it
				if passed && (err == nil) != forgiven {
					t.Errorf("Branch: got %v, want an error: %v", err, !forgiven)
				}
				want := []string{"base"}
				if err == nil {
					want = append(want, "tip")
				}
				if f.lethal {
					checkCode(t, "Branch", err, CodeSandboxGone)
					eventually(t, "end of the source", func() string {
						if b, err := d.Sandbox(t.Context(), src.ID); err != nil || b.State != StateFailed {
							return fmt.Sprintf("got %+v, %v, want it failed", b, err)
						}
						return ""
					})
					d.checkTidy(t, 0, want...)
					return
				}
				d.checkMark(t, src.ID, "one")
				d.checkTidy(t, 1, want...)
				if err != nil {
					d.branch(t, src.ID, "tip", nil)
				}
				d.checkMark(t, d.fork(t, "tip", 1, nil)[0].ID, "one")
			})
		}
	}
}

// written waits until a branch is on disk or never will be.
func (d *daemon) written(t *testing.T, tag string) (s Snapshot) {
	t.Helper()
	eventually(t, "the end of a branch", func() string {
		var err error
		if s, err = d.Snapshot(t.Context(), tag); err != nil || s.Status == StatusWriting {
			return fmt.Sprintf("got %+v, %v", s, err)
		}
		return ""
	})
	return s
}

func TestBranchRefused(t *testing.T) {
	d := newWorld(t).start(t, options{})
	d.snapshot(t, "base", nil)
	src := d.fork(t, "base", 1, nil)[0]
	for name, tt := range map[string]struct {
		id   string
		req  BranchRequest
		want Code
	}{
		"unknown sandbox": {"sbnone", BranchRequest{}, CodeSandboxNotFound},
		"bad tag":         {src.ID, BranchRequest{Tag: "a b"}, CodeInvalidTag},
		"bad mode":        {src.ID, BranchRequest{Mode: "warm"}, CodeInvalidArgument},
		"tag exists":      {src.ID, BranchRequest{Tag: "base"}, CodeSnapshotExists},
	} {
		for _, wait := range []bool{true, false} {
			tt.req.Wait = wait
			_, err := d.Branch(t.Context(), tt.id, tt.req)
			checkCode(t, name, err, tt.want)
		}
	}
	if s := d.branch(t, src.ID, "", nil); checkTag(s.Tag) != nil || s.Tag == "" {
		t.Errorf("branch without a tag: got tag %q", s.Tag)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := d.Branch(ctx, src.ID, BranchRequest{Tag: "gone", Wait: true}); err == nil {
		t.Error("branch that was given up: got no error")
	}
	if err := d.Kill(t.Context(), src.ID); err != nil {
		t.Fatal(err)
	}
	_, err := d.Branch(t.Context(), src.ID, BranchRequest{Tag: "gone", Wait: true})
	checkCode(t, "branch of what was killed", err, CodeSandboxNotFound)
	d.checkTidy(t, 0, "base", "branch")
}

// TestKillInWindow kills a source while its memory is being captured.
func TestKillInWindow(t *testing.T) {
	for _, point := range []string{memory.PointAhead, memory.PointPaused, memory.PointResumed, memory.PointSweep, pointBranchStaged} {
		t.Run(point, func(t *testing.T) {
			t.Parallel()
			points := failpoint.New()
			d := newWorld(t).start(t, options{failpoints: points})
			d.snapshot(t, "base", nil)
			src := d.fork(t, "base", 1, nil)[0]
			d.mark(t, src.ID, "one")
			points.On(point, 1, func(ctx context.Context) error { return d.Kill(context.WithoutCancel(ctx), src.ID) })
			_, err := d.Branch(t.Context(), src.ID, BranchRequest{Tag: "tip", Wait: true})
			if point == pointBranchStaged { // it has all it needs
				if err != nil {
					t.Fatal(err)
				}
				d.checkMark(t, d.fork(t, "tip", 1, nil)[0].ID, "one")
				return
			}
			checkCode(t, "Branch", err, CodeSandboxGone)
			d.checkTidy(t, 0, "base")
		})
	}
}

func TestBranchUnderLoad(t *testing.T) {
	d := newWorld(t).start(t, options{})
	d.snapshot(t, "base", nil)
	src := d.fork(t, "base", 1, nil)[0]
	ctx, stop := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	for i := range 3 {
		wg.Go(func() {
			for n := 0; ctx.Err() == nil; n++ {
				if got := d.sh(t, src.ID, fmt.Sprintf("dirty 100; echo %d-%d", i, n)); got != fmt.Sprintf("%d-%d", i, n) {
					t.Errorf("a request during branches: got %q", got)
				}
			}
		})
	}
	var last Snapshot
	for i := range 10 {
		last = d.branch(t, src.ID, fmt.Sprintf("b%d", i), nil)
	}
	stop()
	wg.Wait()
	if _, err := d.Ping(t.Context(), d.fork(t, last.Tag, 1, nil)[0].ID); err != nil {
		t.Error(err)
	}
}

// TestKillAfterPromise kills a source as soon as its branch was promised: it lives on until that is captured.
func TestKillAfterPromise(t *testing.T) {
	points := failpoint.New()
	d := newWorld(t).start(t, options{failpoints: points})
	d.snapshot(t, "base", nil)
	src := d.fork(t, "base", 1, nil)[0]
	d.mark(t, src.ID, "one")
	release := make(chan struct{})
	points.On(memory.PointResumed, 1, func(context.Context) error { <-release; return nil })
	if _, err := d.Branch(t.Context(), src.ID, BranchRequest{Tag: "tip"}); err != nil {
		t.Fatal(err)
	}
	killed := make(chan error, 1)
	go func() { killed <- d.Kill(context.Background(), src.ID) }()
	still(t, "the end of the source", killed)
	close(release)
	if err := <-killed; err != nil {
		t.Fatal(err)
	}
	d.checkMark(t, d.fork(t, "tip", 1, nil)[0].ID, "one")
}
