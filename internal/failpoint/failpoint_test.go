package failpoint_test

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/forkd/forkd/internal/failpoint"
)

// victimVariable makes the test binary hit a point and then print that it survived.
const victimVariable = "FORKD_TEST_VICTIM"

func TestMain(m *testing.M) {
	if spec, ok := os.LookupEnv(victimVariable); ok {
		set, err := failpoint.Parse(spec)
		if err == nil {
			err = set.Hit(context.Background(), "step")
		}
		os.Stdout.WriteString("survived\n")
		if err != nil {
			os.Exit(3)
		}
		os.Exit(0)
	}
	os.Exit(m.Run())
}

func TestParseErrors(t *testing.T) {
	tests := []struct{ name, spec, want string }{
		{"no action", "a", "no action"},
		{"empty action", "a=", "unknown action"},
		{"unknown action", "a=explode", "unknown action"},
		{"argument to kill", "a=kill:9", "unknown action"},
		{"no name", "=kill", "no name"},
		{"count of zero", "a@0=kill", "number of a hit"},
		{"negative count", "a@-1=kill", "number of a hit"},
		{"count that is no number", "a@x=kill", "number of a hit"},
		{"empty count", "a@=kill", "number of a hit"},
		{"stall without a time", "a=stall", "unknown action"},
		{"stall with a wrong time", "a=stall:5", "duration"},
		{"negative stall", "a=stall:-1s", "duration"},
		{"second clause", "a=kill,b", "no action"},
		{"trailing comma", "a=kill,", "no action"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			set, err := failpoint.Parse(tt.spec)
			if err == nil || !strings.Contains(err.Error(), tt.want) {
				t.Fatalf("Parse(%q): got error %v, want one with %q", tt.spec, err, tt.want)
			}
			if set != nil {
				t.Errorf("Parse(%q): got a set beside the error", tt.spec)
			}
		})
	}
}

func TestNilSetIsInert(t *testing.T) {
	set, err := failpoint.Parse(" ")
	if set != nil || err != nil {
		t.Fatalf("Parse of blanks: got %v, %v, want nil, nil", set, err)
	}
	if err := set.Hit(t.Context(), "a"); err != nil {
		t.Errorf("Hit: got %v, want nil", err)
	}
	if err := set.Check(); err != nil {
		t.Errorf("Check: got %v, want nil", err)
	}
	if got := set.Hits("a"); got != 0 {
		t.Errorf("Hits: got %d, want 0", got)
	}
	if got := set.Passed(); got != nil {
		t.Errorf("Passed: got %v, want nil", got)
	}
	if n := testing.AllocsPerRun(100, func() { _ = set.Hit(t.Context(), "a") }); n != 0 {
		t.Errorf("Hit of a nil set: got %v allocations, want 0", n)
	}
}

func TestErrorAtTheNthHit(t *testing.T) {
	set, err := failpoint.Parse("a@2=error, b=error")
	if err != nil {
		t.Fatal(err)
	}
	var got []bool
	for _, name := range []string{"a", "a", "a", "b", "b", "c"} {
		got = append(got, errors.Is(set.Hit(t.Context(), name), failpoint.ErrInjected))
	}
	if diff := cmp.Diff([]bool{false, true, false, true, true, false}, got); diff != "" {
		t.Errorf("which hits failed (-want +got):\n%s", diff)
	}
}

func TestErrorNamesThePoint(t *testing.T) {
	set, err := failpoint.Parse("fork.loaded=error")
	if err != nil {
		t.Fatal(err)
	}
	if err := set.Hit(t.Context(), "fork.loaded"); err == nil || !strings.Contains(err.Error(), "fork.loaded") {
		t.Errorf("Hit: got %v, want an error that names the point", err)
	}
}

func TestPanic(t *testing.T) {
	set, err := failpoint.Parse("a=panic")
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if got := recover(); got != "failpoint a" {
			t.Errorf("recovered: got %v, want failpoint a", got)
		}
	}()
	_ = set.Hit(t.Context(), "a")
	t.Error("Hit returned")
}

func TestStall(t *testing.T) {
	set, err := failpoint.Parse("a=stall:1m")
	if err != nil {
		t.Fatal(err)
	}
	t.Run("for its time", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			begin := time.Now()
			if err := set.Hit(t.Context(), "a"); err != nil {
				t.Errorf("Hit: got %v, want nil", err)
			}
			if got := time.Since(begin); got != time.Minute {
				t.Errorf("stalled for %v, want 1m", got)
			}
		})
	})
	t.Run("until the context ends", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			ctx, cancel := context.WithTimeout(t.Context(), time.Second)
			defer cancel()
			if err := set.Hit(ctx, "a"); !errors.Is(err, context.DeadlineExceeded) {
				t.Errorf("Hit: got %v, want deadline exceeded", err)
			}
		})
	})
}

func TestPassedInOrder(t *testing.T) {
	set := failpoint.New()
	for _, name := range []string{"b", "a", "b", "c"} {
		if err := set.Hit(t.Context(), name); err != nil {
			t.Fatal(err)
		}
	}
	if diff := cmp.Diff([]string{"b", "a", "c"}, set.Passed()); diff != "" {
		t.Errorf("Passed (-want +got):\n%s", diff)
	}
	if got := set.Hits("b"); got != 2 {
		t.Errorf("Hits(b): got %d, want 2", got)
	}
}

func TestOn(t *testing.T) {
	set, boom := failpoint.New(), errors.New("boom")
	set.On("a", 2, func(context.Context) error { return boom })
	if err := set.Hit(t.Context(), "a"); err != nil {
		t.Errorf("first hit: got %v, want nil", err)
	}
	if err := set.Hit(t.Context(), "a"); !errors.Is(err, boom) {
		t.Errorf("second hit: got %v, want %v", err, boom)
	}
}

func TestCheck(t *testing.T) {
	set, err := failpoint.Parse("a=kill,typo=kill")
	if err != nil {
		t.Fatal(err)
	}
	if err := set.Check("a", "typo"); err != nil {
		t.Errorf("Check with all points known: got %v, want nil", err)
	}
	if err := set.Check("a", "b"); err == nil || !strings.Contains(err.Error(), `"typo"`) || !strings.Contains(err.Error(), "a, b") {
		t.Errorf("Check: got %v, want an error that names the wrong point and those there are", err)
	}
}

func TestKill(t *testing.T) {
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	tests := []struct {
		name, spec string
		killed     bool
	}{
		{"at the point", "step=kill", true},
		{"at a later hit", "step@2=kill", false},
		{"at another point", "other=kill", false},
		{"nowhere", "", false},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			cmd := exec.CommandContext(t.Context(), self)
			cmd.Env = append(os.Environ(), victimVariable+"="+tt.spec)
			out, err := cmd.Output()
			status, ok := cmd.ProcessState.Sys().(syscall.WaitStatus)
			if got := ok && status.Signaled() && status.Signal() == syscall.SIGKILL; got != tt.killed {
				t.Errorf("killed by SIGKILL: got %v (%v), want %v", got, err, tt.killed)
			}
			if got := strings.Contains(string(out), "survived"); got == tt.killed {
				t.Errorf("went on after the point: got %v, want %v", got, !tt.killed)
			}
		})
	}
}
