package sandbox

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/forkd/forkd/internal/failpoint"
	"github.com/forkd/forkd/internal/memory"
	"github.com/forkd/forkd/internal/vmm/vmmtest"
)

func (d *daemon) suspend(t *testing.T, id string) Sandbox {
	t.Helper()
	b, err := d.Suspend(t.Context(), id, false)
	if err != nil {
		t.Fatalf("Suspend %s: %v", id, err)
	}
	return b
}

func (d *daemon) resume(t *testing.T, id string) Sandbox {
	t.Helper()
	b, err := d.Resume(t.Context(), id)
	if err != nil {
		t.Fatalf("Resume %s: %v", id, err)
	}
	return b
}

// restart stops the daemon and starts another one.
func (d *daemon) restart(t *testing.T) *daemon {
	t.Helper()
	w := d.w
	d.stop(t)
	return w.start(t, options{})
}

func TestSuspendAndResume(t *testing.T) {
	for _, restart := range []bool{false, true} {
		t.Run(fmt.Sprintf("restart %v", restart), func(t *testing.T) {
			t.Parallel()
			d := newWorld(t).start(t, options{})
			d.snapshot(t, "base", nil)
			box := d.fork(t, "base", 1, func(r *ForkRequest) {
				r.Env, r.Metadata, r.Timeout = map[string]string{"MINE": "2"}, map[string]string{"k": "v"}, time.Hour
			})[0]
			d.mark(t, box.ID, "one")
			machineID := d.sh(t, box.ID, "cat /etc/machine-id")
			random := d.sh(t, box.ID, "urandom")

			s := d.suspend(t, box.ID)
			if s.State != StateSuspended || s.SuspendedAt.IsZero() || s.PID != 0 || !s.Deadline.IsZero() || s.Metadata["k"] != "v" {
				t.Errorf("suspended: got %+v", s)
			}
			d.checkTidy(t, 0, "base", "state")
			if used := d.cache.Stats(); used.Images != 1 {
				t.Errorf("%d images are resident, want that of the snapshot only", used.Images)
			}
			_, err := d.Exec(t.Context(), box.ID, ExecRequest{Args: []string{"true"}})
			checkCode(t, "Exec while suspended", err, CodeInvalidState)
			_, err = d.Suspend(t.Context(), box.ID, false)
			checkCode(t, "Suspend again", err, CodeInvalidState)
			_, err = d.Branch(t.Context(), box.ID, BranchRequest{Tag: "x"})
			checkCode(t, "Branch while suspended", err, CodeInvalidState)
			_, err = d.Usage(t.Context(), box.ID)
			checkCode(t, "Usage while suspended", err, CodeInvalidState)
			for _, mode := range []DeleteMode{DeleteSafe, DeleteCascade} {
				checkCode(t, "DeleteSnapshot of what it rests on", d.DeleteSnapshot(t.Context(), "base", mode), CodeSnapshotInUse)
			}
			if list, err := d.Snapshots(t.Context()); err != nil || len(list) != 1 {
				t.Errorf("Snapshots: got %+v, %v: what a sandbox is suspended to is nobody's business", list, err)
			}
			if restart {
				d = d.restart(t)
			}

			before := time.Now()
			r := d.resume(t, box.ID)
			if r.State != StateRunning || !r.SuspendedAt.IsZero() || r.PID == 0 || r.Metadata["k"] != "v" || r.Env["MINE"] != "2" {
				t.Errorf("resumed: got %+v", r)
			}
			if left := r.Deadline.Sub(before); left < 59*time.Minute || left > time.Hour+time.Minute {
				t.Errorf("deadline: %v are left, want about an hour", left)
			}
			d.checkMark(t, box.ID, "one")
			if got := d.sh(t, box.ID, "cat /etc/machine-id"); got != machineID {
				t.Errorf("machine id: got %s, want %s as before", got, machineID)
			}
			if got := d.sh(t, box.ID, "hostname"); got != box.ID {
				t.Errorf("host name: got %s, want %s as before", got, box.ID)
			}
			if got := d.sh(t, box.ID, "env"); !strings.Contains(got, "MINE=2") || !strings.Contains(got, "BASE=1") {
				t.Errorf("environment: got %q", got)
			}
			if got := d.sh(t, box.ID, "urandom"); got == random {
				t.Errorf("random numbers: got %s again", got)
			}
			pong, err := d.Ping(t.Context(), box.ID)
			if err != nil || pong.GuestTime.Before(before) {
				t.Errorf("clock: got %v, %v, want it fresh", pong.GuestTime, err)
			}
			_, err = d.Resume(t.Context(), box.ID)
			checkCode(t, "Resume of what runs", err, CodeInvalidState)
			d.branch(t, box.ID, "tip", nil)
			d.checkMark(t, d.fork(t, "tip", 1, nil)[0].ID, "one")
			if err := d.Kill(t.Context(), box.ID); err != nil {
				t.Fatal(err)
			}
			d.checkTidy(t, 1, "base", "tip")
		})
	}
}

// TestSuspendAgain makes sure that states don't pile up, and that each is complete by itself.
func TestSuspendAgain(t *testing.T) {
	d := newWorld(t).start(t, options{})
	d.snapshot(t, "base", nil)
	box := d.fork(t, "base", 1, nil)[0]
	for i := range 4 {
		d.sh(t, box.ID, fmt.Sprintf("echo %d > /tmp/f%d; poke %d page%d", i, i, 1<<20+8192*i, i))
		d.suspend(t, box.ID)
		d.checkTidy(t, 0, "base", "state")
		if i == 2 {
			d = d.restart(t)
		}
		d.resume(t, box.ID)
		d.checkTidy(t, 1, "base", "state")
		for n := range i + 1 {
			if got := d.sh(t, box.ID, fmt.Sprintf("cat /tmp/f%d; peek %d 5", n, 1<<20+8192*n)); got != fmt.Sprintf("%d\npage%d", n, n) {
				t.Errorf("after suspension %d: what was written before suspension %d: got %q", i, n, got)
			}
		}
		if i == 1 {
			d = d.restart(t) // while it runs
		}
	}
	s := d.branch(t, box.ID, "tip", nil)
	if s.ParentTag != "base" {
		t.Errorf("branch: got parent %q, want base", s.ParentTag)
	}
	if err := d.DeleteSnapshot(t.Context(), "base", DeleteForce); CodeOf(err) != CodeSnapshotInUse {
		t.Errorf("DeleteSnapshot: got %v", err)
	}
	d.suspend(t, box.ID)
	if err := d.DeleteSnapshot(t.Context(), "tip", DeleteSafe); err != nil {
		t.Fatal(err)
	}
	if err := d.DeleteSnapshot(t.Context(), "base", DeleteForce); err != nil { // kills it
		t.Fatal(err)
	}
	d.checkTidy(t, 0)
}

func TestKillSuspended(t *testing.T) {
	for _, restart := range []bool{false, true} {
		t.Run(fmt.Sprintf("restart %v", restart), func(t *testing.T) {
			d := newWorld(t).start(t, options{})
			d.snapshot(t, "base", nil)
			box := d.fork(t, "base", 1, nil)[0]
			d.suspend(t, box.ID)
			if restart {
				d = d.restart(t)
			}
			if err := d.Kill(t.Context(), box.ID); err != nil {
				t.Fatal(err)
			}
			_, err := d.Resume(t.Context(), box.ID)
			checkCode(t, "Resume", err, CodeSandboxNotFound)
			d.checkTidy(t, 0, "base")
			if err := d.DeleteSnapshot(t.Context(), "base", DeleteSafe); err != nil {
				t.Error(err)
			}
			d.checkTidy(t, 0)
		})
	}
}

func TestShutdownLeavesSuspended(t *testing.T) {
	w := newWorld(t)
	d := w.start(t, options{killAll: true})
	d.snapshot(t, "base", nil)
	boxes := d.fork(t, "base", 2, nil)
	d.mark(t, boxes[0].ID, "one")
	d.suspend(t, boxes[0].ID)
	d.stop(t)
	d = w.start(t, options{})
	list, err := d.Sandboxes(t.Context())
	if err != nil || len(list) != 1 || list[0].State != StateSuspended {
		t.Fatalf("Sandboxes: got %+v, %v, want the suspended one", list, err)
	}
	d.resume(t, boxes[0].ID)
	d.checkMark(t, boxes[0].ID, "one")
}

// TestManySuspended suspends many sandboxes at once and has another daemon resume them at once.
func TestManySuspended(t *testing.T) {
	d := newWorld(t).start(t, options{})
	d.snapshot(t, "base", nil)
	boxes := d.fork(t, "base", 12, nil)
	var wg sync.WaitGroup
	for i, b := range boxes {
		wg.Go(func() {
			d.mark(t, b.ID, fmt.Sprintf("box%d", i))
			d.suspend(t, b.ID)
		})
	}
	wg.Wait()
	d.checkTidy(t, 0, make([]string, 13)...)
	d = d.restart(t)
	if got := d.Stats().Suspended; got != 12 {
		t.Errorf("suspended: got %d, want 12", got)
	}
	for i, b := range boxes {
		wg.Go(func() {
			d.resume(t, b.ID)
			d.checkMark(t, b.ID, fmt.Sprintf("box%d", i))
		})
	}
	wg.Wait()
	d.checkTidy(t, 12, make([]string, 13)...)
}

func TestDeadlineStandsStill(t *testing.T) {
	d := newWorld(t).start(t, options{})
	d.snapshot(t, "base", nil)
	box := d.fork(t, "base", 1, func(r *ForkRequest) { r.Timeout = 1500 * time.Millisecond })[0]
	d.suspend(t, box.ID)
	time.Sleep(1700 * time.Millisecond) // its deadline passes
	if b, err := d.Sandbox(t.Context(), box.ID); err != nil || b.State != StateSuspended {
		t.Fatalf("past its deadline: got %+v, %v, want it suspended", b, err)
	}
	d.resume(t, box.ID)
	if _, err := d.Ping(t.Context(), box.ID); err != nil {
		t.Errorf("Ping: %v", err)
	}
	eventually(t, "deadline", func() string {
		if b, err := d.Sandbox(t.Context(), box.ID); err != nil || b.State != StateStopped {
			return fmt.Sprintf("got %+v, %v, want it stopped", b, err)
		}
		return ""
	})
	d.checkTidy(t, 0, "base")

	box = d.fork(t, "base", 1, nil)[0]
	d.suspend(t, box.ID)
	if _, err := d.Extend(t.Context(), box.ID, time.Hour); err != nil {
		t.Fatal(err)
	}
	d = d.restart(t)
	if b := d.resume(t, box.ID); time.Until(b.Deadline) < 59*time.Minute {
		t.Errorf("extended while suspended: got deadline %v, want it in an hour", b.Deadline)
	}
}

func TestAutoSuspend(t *testing.T) {
	d := newWorld(t).start(t, options{})
	d.snapshot(t, "base", nil)
	const idle = 300 * time.Millisecond
	box := d.fork(t, "base", 1, func(r *ForkRequest) { r.AutoSuspend, r.AutoResume = idle, true })[0]
	stays := d.fork(t, "base", 1, nil)[0]
	asleep := func() string {
		if b, err := d.Sandbox(t.Context(), box.ID); err != nil || b.State != StateSuspended {
			return fmt.Sprintf("got %+v, %v, want it suspended", b, err)
		}
		return ""
	}
	d.mark(t, box.ID, "one")
	d.sh(t, box.ID, "sleep 0.8") // in use for longer than that
	if b, err := d.Sandbox(t.Context(), box.ID); err != nil || b.State != StateRunning || b.AutoSuspend != idle || !b.AutoResume {
		t.Errorf("after a long request: got %+v, %v, want it running", b, err)
	}
	eventually(t, "idle", asleep)
	d.checkMark(t, box.ID, "one") // resumes it
	eventually(t, "idle again", asleep)
	var wg sync.WaitGroup
	for range 4 { // one resumption for all
		wg.Go(func() { d.checkMark(t, box.ID, "one") })
	}
	wg.Wait()
	if _, err := d.Branch(t.Context(), box.ID, BranchRequest{Tag: "tip", Wait: true}); err != nil {
		t.Error(err)
	}
	eventually(t, "idle after a branch", asleep)
	if _, err := d.Branch(t.Context(), box.ID, BranchRequest{Tag: "tip2", Wait: true}); err != nil { // resumes it
		t.Error(err)
	}
	d = d.restart(t)
	eventually(t, "idle after a restart", asleep)
	if b, err := d.Sandbox(t.Context(), stays.ID); err != nil || b.State != StateRunning {
		t.Errorf("one without the setting: got %+v, %v", b, err)
	}
	d.checkMark(t, box.ID, "one")
}

func TestSuspendDuringRequest(t *testing.T) {
	for _, resume := range []bool{false, true} {
		t.Run(fmt.Sprintf("auto-resume %v", resume), func(t *testing.T) {
			points := failpoint.New()
			release := make(chan struct{})
			points.On(pointSuspendCaptured, 1, func(context.Context) error { <-release; return nil })
			d := newWorld(t).start(t, options{failpoints: points})
			d.snapshot(t, "base", nil)
			box := d.fork(t, "base", 1, func(r *ForkRequest) { r.AutoResume = resume })[0]
			d.mark(t, box.ID, "one")
			result := make(chan error, 1)
			go func() {
				_, err := d.Exec(context.Background(), box.ID, ExecRequest{Args: []string{"sleep", "30"}})
				result <- err
			}()
			eventually(t, "request", func() string {
				b, _ := d.live(box.ID)
				b.mu.Lock()
				defer b.mu.Unlock()
				if b.active != 1 {
					return fmt.Sprintf("%d active", b.active)
				}
				return ""
			})
			done := make(chan Sandbox)
			go func() { done <- d.suspend(t, box.ID) }()
			eventually(t, "suspension", func() string {
				if points.Hits(pointSuspendCaptured) == 0 {
					return "not begun"
				}
				return ""
			})
			late := make(chan error, 1)
			go func() {
				_, err := d.Ping(context.Background(), box.ID)
				late <- err
			}()
			if !resume {
				checkCode(t, "a request while it is being suspended", <-late, CodeInvalidState)
			}
			close(release)
			<-done
			checkCode(t, "the request that was under way", <-result, CodeInvalidState)
			if resume {
				if err := <-late; err != nil {
					t.Errorf("a request while it is being suspended: got %v, want it resumed", err)
				}
			}
		})
	}
}

// TestSuspendFailures makes everything fail that a suspension needs; the sandbox runs on, and nothing is left.
func TestSuspendFailures(t *testing.T) {
	type failure struct {
		point string
		fault vmmtest.Fault
	}
	failures := map[string]failure{}
	for _, point := range slices.Concat(memory.Points(), []string{pointBranchPaused, pointBranchSaved, pointSuspendRecorded, pointSuspendCaptured, pointSuspendStaged, pointSuspendPublished}) {
		failures[point] = failure{point: point}
	}
	for _, step := range []vmmtest.Step{vmmtest.StepPause, vmmtest.StepSave} {
		for _, action := range []vmmtest.Action{vmmtest.Fail, vmmtest.FailLate, vmmtest.Die} {
			failures[fmt.Sprintf("%s %s", step, action)] = failure{fault: vmmtest.Fault{Step: step, Call: 1, Action: action}}
		}
	}
	for name, f := range failures {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			points := failpoint.New()
			d := newWorld(t).start(t, options{failpoints: points})
			d.snapshot(t, "base", nil)
			box := d.fork(t, "base", 1, func(r *ForkRequest) { r.Timeout = time.Hour })[0]
			d.mark(t, box.ID, "one")
			points.On(f.point, 1, func(context.Context) error { return failpoint.ErrInjected })
			if f.point == "" {
				d.fake.Inject(f.fault)
			}
			_, err := d.Suspend(t.Context(), box.ID, false)
			d.fake.Inject()
			if f.point != "" && points.Hits(f.point) == 0 {
				return // of a window, which a suspension has none of
			}
			if err == nil {
				t.Error("got no error")
			}
			if f.fault.Action == vmmtest.Die {
				checkCode(t, "Suspend", err, CodeSandboxGone)
				d.checkTidy(t, 0, "base")
				return
			}
			d.checkMark(t, box.ID, "one")
			d.checkTidy(t, 1, "base")
			if b, err := d.Sandbox(t.Context(), box.ID); err != nil || b.State != StateRunning || b.Deadline.IsZero() {
				t.Errorf("sandbox: got %+v, %v", b, err)
			}
			d.suspend(t, box.ID)
			d.resume(t, box.ID)
			d.checkMark(t, box.ID, "one")
		})
	}
}

// TestResumeFailures makes a resumption fail; the sandbox is suspended as before.
func TestResumeFailures(t *testing.T) {
	d := newWorld(t).start(t, options{limits: Limits{LaunchTimeout: 4 * time.Second}})
	d.snapshot(t, "base", nil)
	box := d.fork(t, "base", 1, nil)[0]
	d.mark(t, box.ID, "one")
	d.suspend(t, box.ID)
	for _, step := range []vmmtest.Step{vmmtest.StepPrepare, vmmtest.StepLoad, vmmtest.StepResume, vmmtest.StepIdentify} {
		for _, action := range []vmmtest.Action{vmmtest.Fail, vmmtest.Die} {
			d.fake.Inject(vmmtest.Fault{Step: step, Call: 1, Action: action})
			_, err := d.Resume(t.Context(), box.ID)
			d.fake.Inject()
			if err == nil && step == vmmtest.StepPrepare && action == vmmtest.Die { // there is nothing to kill yet
				d.suspend(t, box.ID)
				continue
			}
			if err == nil {
				t.Fatalf("%s %s: got no error", step, action)
			}
			if b, err := d.Sandbox(t.Context(), box.ID); err != nil || b.State != StateSuspended {
				t.Errorf("%s %s: got %+v, %v, want it suspended", step, action, b, err)
			}
			d.checkTidy(t, 0, "base", "state")
		}
	}
	d.resume(t, box.ID)
	d.checkMark(t, box.ID, "one")
}

// TestKillDuring kills a sandbox while it is being suspended or resumed.
func TestKillDuring(t *testing.T) {
	points := []string{pointSuspendRecorded, pointSuspendCaptured, pointSuspendStaged, pointSuspendPublished, pointSuspendMarked, pointSuspendEnded,
		pointResumePrepared, pointResumeLoaded, pointResumeIdentified, pointResumeRunning}
	for _, point := range points {
		t.Run(point, func(t *testing.T) {
			t.Parallel()
			set := failpoint.New()
			d := newWorld(t).start(t, options{failpoints: set})
			d.snapshot(t, "base", nil)
			box := d.fork(t, "base", 1, nil)[0]
			set.On(point, 1, func(context.Context) error { return d.Kill(context.Background(), box.ID) })
			_, err := d.Suspend(t.Context(), box.ID, false)
			if err == nil {
				_, err = d.Resume(t.Context(), box.ID)
			}
			if set.Hits(point) == 0 {
				t.Fatalf("the point was never passed: %v", err)
			}
			if _, err := d.Sandbox(t.Context(), box.ID); CodeOf(err) != CodeSandboxNotFound {
				t.Errorf("Sandbox: got %v", err)
			}
			d.checkTidy(t, 0, "base")
			if recs, err := d.db.Snapshots(t.Context()); err != nil || len(recs) != 1 {
				t.Errorf("records: got %+v, %v, want that of the base", recs, err)
			}
		})
	}
}

func TestNames(t *testing.T) {
	d := newWorld(t).start(t, options{})
	d.snapshot(t, "base", nil)
	named := func(name string) func(*ForkRequest) { return func(r *ForkRequest) { r.Name = name } }
	box := d.fork(t, "base", 1, named("work"))[0]
	if b, err := d.SandboxByName(t.Context(), "work"); err != nil || b.ID != box.ID || b.Name != "work" {
		t.Errorf("SandboxByName: got %+v, %v", b, err)
	}
	res, err := d.Fork(t.Context(), ForkRequest{Tag: "base", N: 1, Name: "work"})
	if err == nil {
		err = res[0].Err
	}
	checkCode(t, "a second one with the name", err, CodeSandboxExists)
	for name, r := range map[string]ForkRequest{"two": {Tag: "base", N: 2, Name: "w"}, "bad": {Tag: "base", N: 1, Name: "a b"}, "idle": {Tag: "base", N: 1, AutoSuspend: 1}} {
		_, err := d.Fork(t.Context(), r)
		checkCode(t, name, err, CodeInvalidArgument)
	}
	d.suspend(t, box.ID)
	d = d.restart(t)
	if b, err := d.SandboxByName(t.Context(), "work"); err != nil || b.ID != box.ID || b.State != StateSuspended {
		t.Errorf("SandboxByName of a suspended one: got %+v, %v", b, err)
	}
	d.resume(t, box.ID)
	if _, err := d.Exec(t.Context(), box.ID, ExecRequest{Args: []string{"crash"}}); err == nil {
		t.Error("crash: got no error")
	}
	eventually(t, "end", func() string {
		if b, err := d.SandboxByName(t.Context(), "work"); err != nil || b.State != StateFailed {
			return fmt.Sprintf("got %+v, %v", b, err)
		}
		return ""
	})
	d.checkTidy(t, 0, "base")
	again := d.fork(t, "base", 1, named("work"))[0]
	if b, err := d.SandboxByName(t.Context(), "work"); err != nil || b.ID != again.ID {
		t.Errorf("SandboxByName of the second: got %+v, %v", b, err)
	}
	_, err = d.SandboxByName(t.Context(), "none")
	checkCode(t, "unknown name", err, CodeSandboxNotFound)
}

// TestGiveUpDuringSuspension gives up requests while the sandbox stands still: neither waits until it is on disk.
func TestGiveUpDuringSuspension(t *testing.T) {
	for _, point := range []string{pointBranchSaved, pointSuspendStaged} {
		t.Run(point, func(t *testing.T) {
			t.Parallel()
			points := failpoint.New()
			d := newWorld(t).start(t, options{failpoints: points})
			d.snapshot(t, "base", nil)
			b := d.fork(t, "base", 1, nil)[0]
			d.mark(t, b.ID, "one")
			ctx, giveUp := context.WithCancel(t.Context())
			failed := make(chan error, 1)
			go func() {
				_, err := d.Exec(ctx, b.ID, ExecRequest{Args: []string{"hang"}, Timeout: time.Minute})
				failed <- err
			}()
			eventually(t, "the request", func() string {
				box, _ := d.live(b.ID)
				box.mu.Lock()
				defer box.mu.Unlock()
				if box.active == 0 {
					return "not under way"
				}
				return ""
			})
			still(t, "the end of the request", failed)
			reached, release := make(chan struct{}), make(chan struct{})
			points.On(point, 1, func(context.Context) error { close(reached); <-release; return failpoint.ErrInjected })
			suspended := make(chan error, 1)
			go func() { _, err := d.Suspend(context.Background(), b.ID, false); suspended <- err }()
			<-reached
			giveUp()
			select {
			case err := <-failed:
				if !errors.Is(err, context.Canceled) {
					t.Errorf("the request: got %v", err)
				}
			case <-time.After(5 * time.Second):
				t.Error("the request that was given up waits for the suspension")
			}
			close(release)
			if err := <-suspended; !errors.Is(err, failpoint.ErrInjected) {
				t.Errorf("Suspend: got %v", err)
			}
			d.checkMark(t, b.ID, "one")
		})
	}
}
