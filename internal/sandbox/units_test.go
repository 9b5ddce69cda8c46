package sandbox

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
)

func TestDeadlineHeap(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var mu sync.Mutex
		var got []string
		begin := time.Now()
		d := newDeadlines(func(id string) {
			mu.Lock()
			defer mu.Unlock()
			got = append(got, fmt.Sprintf("%s at %v", id, time.Since(begin)))
		})
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan struct{})
		go func() { d.run(ctx); close(done) }()

		d.set("never", time.Time{})
		d.set("late", begin.Add(time.Hour))
		d.set("early", begin.Add(time.Minute))
		d.set("moved", begin.Add(2*time.Minute))
		d.set("removed", begin.Add(3*time.Minute))
		time.Sleep(30 * time.Second)
		d.set("moved", begin.Add(4*time.Minute))
		d.set("removed", time.Time{})
		time.Sleep(2 * time.Hour)
		d.set("past", begin)
		synctest.Wait()
		cancel()
		<-done
		want := []string{"early at 1m0s", "moved at 4m0s", "late at 1h0m0s", "past at 2h0m30s"}
		if diff := cmp.Diff(got, want); diff != "" {
			t.Errorf("expiries (-got +want):\n%s", diff)
		}
	})
}

func TestDeadlinesWaitForTheirCalls(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ended := false
		d := newDeadlines(func(string) {
			time.Sleep(time.Minute)
			ended = true
		})
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan struct{})
		go func() { d.run(ctx); close(done) }()
		d.set("a", time.Now())
		synctest.Wait()
		cancel()
		<-done
		if !ended {
			t.Error("run returned before its calls of expire")
		}
	})
}

func TestGateIsFairAndPrefersUsers(t *testing.T) {
	g := newGate(2, 10)
	held := []*ticket{g.enqueue("a"), g.enqueue("a")}
	low := g.enqueueLow()
	var order []int
	var mu sync.Mutex
	var wg sync.WaitGroup
	tickets := make([]*ticket, 5)
	for i := range tickets {
		tickets[i] = g.enqueue("a")
	}
	for i, tk := range tickets {
		wg.Go(func() {
			if err := tk.wait(t.Context()); err != nil {
				t.Error(err)
			}
			mu.Lock()
			order = append(order, i)
			mu.Unlock()
		})
	}
	for i := range tickets { // one at a time
		held[0].release()
		<-tickets[i].granted
		held[0] = tickets[i]
		eventually(t, "its turn", func() string {
			mu.Lock()
			defer mu.Unlock()
			if len(order) != i+1 {
				return fmt.Sprint(order)
			}
			return ""
		})
		select {
		case <-low.granted:
			t.Fatal("background work got a slot while users waited")
		default:
		}
	}
	wg.Wait()
	if !slices.IsSorted(order) {
		t.Errorf("got order %v", order)
	}
	held[0].release()
	<-low.granted
	if second := g.enqueueLow(); ready(second) {
		t.Error("background work took the last slot")
	}
}

func ready(tk *ticket) bool {
	select {
	case <-tk.granted:
		return true
	default:
		return false
	}
}

// Who asks for much waits for himself: the others' turns come between his.
func TestGateTakesTurns(t *testing.T) {
	g := newGate(1, 2)
	held := g.enqueue("a")
	owners := map[*ticket]string{}
	var all []*ticket
	for _, owner := range []string{"a", "a", "a", "a", "b", "c", "b"} {
		tk := g.enqueue(owner)
		owners[tk] = owner
		all = append(all, tk)
	}
	if !g.full("a") || !g.full("b") || g.full("c") || g.full("nobody") {
		t.Errorf("full: a %v, b %v, c %v, nobody %v", g.full("a"), g.full("b"), g.full("c"), g.full("nobody"))
	}
	all[1].release() // gives up
	all = slices.Delete(all, 1, 2)
	var got string
	for range len(all) {
		held.release()
		i := slices.IndexFunc(all, ready)
		if i < 0 {
			t.Fatalf("after %s nobody has a turn", got)
		}
		held = all[i]
		got += owners[held]
		all = slices.Delete(all, i, i+1)
	}
	held.release()
	if got != "abcaba" {
		t.Errorf("got turns %s, want abcaba", got)
	}
	if active, queued := g.load(); active != 0 || queued != 0 || g.lanes.Len() != 0 || len(g.byOwner) != 0 {
		t.Errorf("left: %d active, %d queued, %d lanes", active, queued, g.lanes.Len())
	}
}

func TestGateGivenUp(t *testing.T) {
	g := newGate(1, 1)
	first, second, third := g.enqueue("a"), g.enqueue("a"), g.enqueue("a")
	if !g.full("a") {
		t.Error("full: got false with two waiting, want true")
	}
	ctx, cancel := context.WithCancelCause(t.Context())
	cancel(errStopped)
	if err := second.wait(ctx); !errors.Is(err, errStopped) {
		t.Errorf("wait: got %v, want the cause", err)
	}
	second.release()
	second.release()
	first.release()
	if !ready(third) {
		t.Error("a place that was given up is in the way")
	}
	third.release()
	if active, queued := g.load(); active != 0 || queued != 0 {
		t.Errorf("load: got %d, %d, want nothing", active, queued)
	}
}

func TestAdmissionWithBudget(t *testing.T) {
	a := &admission{budget: 100}
	each := need{start: 20, growth: 10}
	grants, err := a.take(10, each)
	if err != nil || len(grants) != 3 {
		t.Fatalf("got %d grants, %v, want 3", len(grants), err)
	}
	grants[0].settle() // a budget counts whole machines
	if more, _ := a.take(1, each); len(more) != 0 {
		t.Error("got another grant, want none")
	}
	grants[1].release()
	grants[1].release()
	grants[2].settle()
	grants[2].release()
	if budget, held := a.stats(); budget != 100 || held != 30 {
		t.Errorf("stats: got %d, %d, want 100, 30", budget, held)
	}
	grants[0].release()
	grants[0].settle()
	if _, held := a.stats(); held != 0 {
		t.Errorf("held: got %d, want 0", held)
	}
}

func TestAdmissionWithHostMemory(t *testing.T) {
	available := int64(200)
	a := &admission{reserve: 50, available: func() (int64, error) { return available, nil }}
	each := need{start: 20, growth: 10}
	grants, err := a.take(10, each)
	if err != nil || len(grants) != 5 {
		t.Fatalf("got %d grants, %v, want 5", len(grants), err)
	}
	for _, g := range grants {
		g.settle()
		available -= 20 // it took what it needs
	}
	if free, _ := a.free(); free != 0 {
		t.Errorf("free: got %d, want 0", free)
	}
	grants[0].release()
	available += 20
	if more, _ := a.take(5, each); len(more) != 1 {
		t.Errorf("got %d grants after one was released, want 1", len(more))
	}
	a.available = func() (int64, error) { return 0, errors.New("no /proc") }
	if _, err := a.take(1, each); err == nil {
		t.Error("got no error without knowing what is available")
	}
}

func TestMemAvailable(t *testing.T) {
	n, err := memAvailable()
	if err != nil || n < 1<<20 {
		t.Errorf("got %d, %v, want some memory", n, err)
	}
}

func TestCleanupRunsBackwards(t *testing.T) {
	var got []string
	boom := errors.New("boom")
	c := &cleanup{}
	for _, name := range []string{"a", "b", "c"} {
		c.add(func() error {
			got = append(got, name)
			if name == "b" {
				return boom
			}
			return nil
		})
	}
	if err := c.run(); !errors.Is(err, boom) {
		t.Errorf("run: got %v, want boom", err)
	}
	if err := c.run(); err != nil {
		t.Errorf("second run: got %v", err)
	}
	if diff := cmp.Diff(got, []string{"c", "b", "a"}); diff != "" {
		t.Errorf("order (-got +want):\n%s", diff)
	}
	c.add(func() error { return boom })
	c.release()
	if err := c.run(); err != nil {
		t.Errorf("run after release: got %v", err)
	}
}

func TestCodeOf(t *testing.T) {
	e := newError(CodeQueueFull, errors.New("cause"), "hint", "message %d", 1)
	tests := []struct {
		name string
		err  error
		want Code
	}{
		{"nil", nil, ""},
		{"foreign", errors.New("x"), CodeInternal},
		{"ours", e, CodeQueueFull},
		{"wrapped", fmt.Errorf("x: %w", e), CodeQueueFull},
		{"joined", errors.Join(errors.New("x"), e), CodeQueueFull},
	}
	for _, tt := range tests {
		if got := CodeOf(tt.err); got != tt.want {
			t.Errorf("%s: got %q, want %q", tt.name, got, tt.want)
		}
	}
	if got, want := e.Error(), "message 1: cause"; got != want {
		t.Errorf("Error: got %q, want %q", got, want)
	}
}
