package sandbox

import (
	"fmt"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/forkd/forkd/internal/vmm/vmmtest"
)

func waitPool(t *testing.T, d *daemon, tag string, ready int) {
	t.Helper()
	eventually(t, "pool of "+tag, func() string {
		st, err := d.Pool(t.Context(), tag)
		if err != nil || st.Ready != ready || st.Filling != 0 {
			return fmt.Sprintf("got %+v, %v, want %d ready", st, err, ready)
		}
		return ""
	})
}

func TestPoolClaim(t *testing.T) {
	d := newWorld(t).start(t, options{})
	d.snapshot(t, "py", func(r *SnapshotRequest) {
		r.PoolSize = 3
		r.WarmUp = []WarmUp{{WarmUpExec, "echo 'echo hook > /tmp/hooked' > /etc/forkd/on-fork.d/1"}}
	})
	waitPool(t, d, "py", 3)
	boxes := d.fork(t, "py", 4, func(r *ForkRequest) { r.Env = map[string]string{"A": "1"} })
	names := map[string]bool{}
	for i, b := range boxes {
		want := StartedByClaim
		if i == 3 {
			want = StartedCold
		}
		if b.Path != want {
			t.Errorf("child %d: got path %s, want %s", i, b.Path, want)
		}
		if got := d.sh(t, b.ID, "env"); got != "A=1\nBASE=1" {
			t.Errorf("env of child %d: got %q", i, got)
		}
		if got := d.sh(t, b.ID, "hostname"); got != b.ID {
			t.Errorf("hostname of child %d: got %q, want %q", i, got, b.ID)
		}
		if got := d.sh(t, b.ID, "cat /tmp/hooked"); got != "hook" {
			t.Errorf("hook in child %d: got %q, want that it ran", i, got)
		}
		names[d.sh(t, b.ID, "cat /etc/machine-id")+d.sh(t, b.ID, "urandom")] = true
		pong, err := d.Ping(t.Context(), b.ID)
		if skew := time.Since(pong.GuestTime).Abs(); err != nil || skew > time.Second {
			t.Errorf("clock of child %d: got a skew of %v, %v", i, skew, err)
		}
	}
	if len(names) != 4 {
		t.Errorf("got %d distinct identities, want 4", len(names))
	}
	waitPool(t, d, "py", 3) // it refills
	d.checkTidy(t, 7, "py")
}

func TestPoolMembersDontRunHooks(t *testing.T) {
	d := newWorld(t).start(t, options{})
	d.snapshot(t, "py", func(r *SnapshotRequest) {
		r.WarmUp = []WarmUp{{WarmUpExec, "echo 'exit 1' > /etc/forkd/on-fork.d/1"}}
		r.PoolSize = 1
	})
	waitPool(t, d, "py", 1)
	results, err := d.Fork(t.Context(), ForkRequest{Tag: "py", N: 1})
	if err != nil {
		t.Fatal(err)
	}
	checkCode(t, "a child whose hook fails", results[0].Err, CodeIdentityFailed)
	waitPool(t, d, "py", 1)
	d.checkTidy(t, 1, "py")
}

func TestPoolResize(t *testing.T) {
	d := newWorld(t).start(t, options{})
	d.snapshot(t, "py", nil)
	for _, size := range []int{3, 1, 0, 2} {
		st, err := d.SetPool(t.Context(), "py", size)
		if err != nil || st.Size != size {
			t.Fatalf("SetPool %d: got %+v, %v", size, st, err)
		}
		waitPool(t, d, "py", size)
		d.checkTidy(t, size, "py")
	}
	_, err := d.SetPool(t.Context(), "py", -1)
	checkCode(t, "negative size", err, CodeInvalidArgument)
	_, err = d.SetPool(t.Context(), "nope", 1)
	checkCode(t, "unknown tag", err, CodeSnapshotNotFound)
	_, err = d.Pool(t.Context(), "nope")
	checkCode(t, "Pool of an unknown tag", err, CodeSnapshotNotFound)
}

func TestPoolReplacesMembersThatDie(t *testing.T) {
	d := newWorld(t).start(t, options{})
	d.snapshot(t, "py", func(r *SnapshotRequest) { r.PoolSize = 2 })
	waitPool(t, d, "py", 2)
	live, err := d.fake.Live()
	if err != nil {
		t.Fatal(err)
	}
	if err := syscall.Kill(live[0].PID, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	eventually(t, "replacement", func() string {
		now, err := d.fake.Live()
		st, _ := d.Pool(t.Context(), "py")
		if err != nil || len(now) != 2 || st.Ready != 2 || now[0].PID == live[0].PID || now[1].PID == live[0].PID {
			return fmt.Sprintf("%v, %+v, %v", now, st, err)
		}
		return ""
	})
	d.checkTidy(t, 2, "py")
}

func TestClaimFallsBack(t *testing.T) {
	tests := []struct {
		name   string
		pool   int
		path   Path
		faults []vmmtest.Fault // resumes: one for each member that is claimed, then one for a cold start
		want   string          // how the child started; "" when it fails
	}{
		{"to another member", 2, PathAny, []vmmtest.Fault{{Step: vmmtest.StepResume, Call: 1, Action: vmmtest.Fail}}, StartedByClaim},
		{"when the member dies", 2, PathAny, []vmmtest.Fault{{Step: vmmtest.StepResume, Call: 1, Action: vmmtest.Die}}, StartedByClaim},
		{"to another member of the pool asked for", 2, PathPool, []vmmtest.Fault{{Step: vmmtest.StepResume, Call: 1, Action: vmmtest.Fail}}, StartedByClaim},
		{"to a cold start", 1, PathAny, []vmmtest.Fault{{Step: vmmtest.StepResume, Call: 1, Action: vmmtest.Fail}}, StartedCold},
		{"not when only the pool was asked for", 1, PathPool, []vmmtest.Fault{{Step: vmmtest.StepResume, Call: 1, Action: vmmtest.Fail}}, ""},
		{"nowhere", 1, PathAny, []vmmtest.Fault{{Step: vmmtest.StepResume, Action: vmmtest.Fail}}, ""},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			d := newWorld(t).start(t, options{})
			d.snapshot(t, "py", func(r *SnapshotRequest) { r.PoolSize = tt.pool })
			waitPool(t, d, "py", tt.pool)
			d.stopRefills()
			d.fake.Inject(tt.faults...)
			results, err := d.Fork(t.Context(), ForkRequest{Tag: "py", N: 1, Path: tt.path})
			d.fake.Inject()
			if err != nil {
				t.Fatal(err)
			}
			got := ""
			if results[0].Err == nil {
				got = results[0].Sandbox.Path
				d.sh(t, results[0].Sandbox.ID, "true")
			}
			if got != tt.want {
				t.Errorf("started %q (%v), want %q", got, results[0].Err, tt.want)
			}
		})
	}
}

// stopRefills takes all launch slots that background work could have.
func (d *daemon) stopRefills() {
	d.launches.mu.Lock()
	defer d.launches.mu.Unlock()
	d.launches.lowActive += 1 << 20
}

func TestRefillsWaitForUsers(t *testing.T) {
	d := newWorld(t).start(t, options{limits: Limits{Launches: 1}})
	d.snapshot(t, "py", nil)
	blocker := d.launches.enqueue("")
	if _, err := d.SetPool(t.Context(), "py", 2); err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	wg.Go(func() { d.fork(t, "py", 3, func(r *ForkRequest) { r.Path = PathCold }) })
	eventually(t, "users to wait", func() string {
		if _, queued := d.launches.load(); queued != 3 {
			return fmt.Sprintf("%d wait", queued)
		}
		return ""
	})
	blocker.release()
	wg.Wait()
	if st, err := d.Pool(t.Context(), "py"); err != nil || st.Ready != 0 {
		t.Errorf("the pool was filled while users waited: %+v, %v", st, err)
	}
	waitPool(t, d, "py", 2)
}

func TestRefillsWaitForClaims(t *testing.T) {
	d := newWorld(t).start(t, options{})
	d.snapshot(t, "py", nil)
	f, release, err := d.useLive(t.Context(), "py")
	if err != nil {
		t.Fatal(err)
	}
	defer release()
	p := d.newPool(f, 0)
	p.lacking = time.Now().Add(time.Hour) // its patience does not end
	claim := d.claims.enqueue("")
	yielded := make(chan struct{})
	go func() {
		defer close(yielded)
		p.yield()
	}()
	eventually(t, "the refill to wait", func() string {
		d.claims.mu.Lock()
		defer d.claims.mu.Unlock()
		if d.claims.calm == nil {
			return "it does not"
		}
		return ""
	})
	select {
	case <-yielded:
		t.Fatal("a refill did not wait for a claim that goes on")
	default:
	}
	claim.release()
	<-yielded

	other := d.claims.enqueue("")
	defer other.release()
	p.lacking = time.Now().Add(-patience)
	p.yield() // it has waited long enough
}

func TestPoolStopsWhenThereIsNoMemory(t *testing.T) {
	l := Limits{MonitorOverhead: 10 << 20, GuestPrivate: 1 << 20, MemoryBudget: 2 * 11 << 20}
	d := newWorld(t).start(t, options{limits: l})
	d.snapshot(t, "py", func(r *SnapshotRequest) { r.PoolSize = 5 })
	eventually(t, "pool", func() string {
		st, err := d.Pool(t.Context(), "py")
		if err != nil || st.Ready != 2 || !strings.Contains(st.Problem, "memory") {
			return fmt.Sprintf("got %+v, %v, want 2 ready and a problem with memory", st, err)
		}
		return ""
	})
	d.checkTidy(t, 2, "py")
}

func TestPoolSurvivesARestart(t *testing.T) {
	w := newWorld(t)
	d := w.start(t, options{})
	d.snapshot(t, "py", func(r *SnapshotRequest) { r.PoolSize = 2 })
	waitPool(t, d, "py", 2)
	d.stop(t)
	d.checkTidy(t, 0, "py") // members end with the daemon
	d = w.start(t, options{})
	waitPool(t, d, "py", 2)
}

func TestForksGoBeforePools(t *testing.T) {
	l := Limits{MonitorOverhead: 10 << 20, GuestPrivate: 1 << 20, MemoryBudget: 4 * 11 << 20}
	d := newWorld(t).start(t, options{limits: l})
	d.snapshot(t, "a", func(r *SnapshotRequest) { r.PoolSize = 3 })
	d.snapshot(t, "b", nil)
	waitPool(t, d, "a", 3)
	boxes := d.fork(t, "b", 3, nil) // there is room for one beside the pool
	if st, err := d.Pool(t.Context(), "a"); err != nil || st.Ready != 1 {
		t.Errorf("pool: got %+v, %v, want 1 ready", st, err)
	}
	for _, b := range boxes {
		if err := d.Kill(t.Context(), b.ID); err != nil {
			t.Error(err)
		}
	}
	waitPool(t, d, "a", 3) // there is room again
	d.checkTidy(t, 3, "a", "b")
}
