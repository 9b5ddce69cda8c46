package vmmtest

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"
)

// ErrInjected is what an injected failure wraps.
var ErrInjected = errors.New("injected failure")

// Step is a point of a machine's life where a Fault can strike.
type Step string

// Steps on the host's side: one call of an engine's or a machine's method each.
const (
	StepProbe   Step = "probe"
	StepBoot    Step = "boot"
	StepPrepare Step = "prepare"
	StepLoad    Step = "load"
	StepAttach  Step = "attach"
	StepPause   Step = "pause"
	StepResume  Step = "resume"
	StepSave    Step = "save"
	StepDial    Step = "dial"
)

// Steps on the guest's side, in children only: Fault.Call counts the children that were loaded, not the requests.
const (
	StepGuest    Step = "guest"    // Fail, Stall: nothing that is sent to a guest port is answered
	StepIdentify Step = "identify" // Fail: the identity is refused; Stall: it is never acknowledged; Die: the machine dies of it
	StepExec     Step = "exec"     // as StepIdentify, for commands
	StepEval     Step = "eval"     // as StepIdentify, for eval
)

// guestSteps are those that a machine carries out itself.
var guestSteps = []Step{StepGuest, StepIdentify, StepExec, StepEval}

// Action is what a Fault does.
type Action string

// Actions.
const (
	Fail     Action = "fail"      // an error, and nothing was done
	FailLate Action = "fail_late" // it is done, and yet an error is returned
	Stall    Action = "stall"     // nothing happens until the caller's context ends, or for Fault.For where that is set
	Die      Action = "die"       // the monitor is killed by SIGKILL from outside, then the step is tried
)

// Fault is one injected failure.
type Fault struct {
	Step   Step
	Call   int // the how manieth call of the step, from 1, over all machines of the engine; 0: every call
	Action Action
	Err    error         // returned instead of ErrInjected
	For    time.Duration // length of a Stall, after which the step goes on
}

// faults counts calls and picks the faults for them.
type faults struct {
	mu    sync.Mutex
	list  []Fault
	calls map[Step]int
}

func newFaults(list []Fault) *faults {
	return &faults{list: append([]Fault(nil), list...), calls: map[Step]int{}}
}

// replace sets the faults and starts to count anew.
func (f *faults) replace(list []Fault) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.list = append([]Fault(nil), list...)
	f.calls = map[Step]int{}
}

// count returns how often each step was called.
func (f *faults) count() map[Step]int {
	f.mu.Lock()
	defer f.mu.Unlock()
	counts := make(map[Step]int, len(f.calls))
	for step, n := range f.calls {
		counts[step] = n
	}
	return counts
}

// next counts a call of step and returns the fault that shall strike it.
func (f *faults) next(step Step) (Fault, bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.calls[step]++
	for _, fault := range f.list {
		if fault.Step == step && (fault.Call == 0 || fault.Call == f.calls[step]) {
			return fault, true
		}
	}
	return Fault{}, false
}

// guest returns the faults that the child which is being loaded carries out itself.
func (f *faults) guest() map[Step]Action {
	actions := map[Step]Action{}
	for _, step := range guestSteps {
		if fault, ok := f.next(step); ok {
			actions[step] = fault.Action
		}
	}
	return actions
}

// around runs do as one call of step, with what is injected there. die kills the monitor that the step is about; it may be nil.
func (f *faults) around(ctx context.Context, step Step, die func(), do func() error) error {
	fault, ok := f.next(step)
	if !ok {
		return do()
	}
	failure := fmt.Errorf("fake %s: %w", step, ErrInjected)
	if fault.Err != nil {
		failure = fmt.Errorf("fake %s: %w", step, fault.Err)
	}
	switch fault.Action {
	case Fail:
		return failure
	case FailLate:
		if err := do(); err != nil {
			return err
		}
		return failure
	case Stall:
		if err := stall(ctx, fault.For); err != nil {
			return fmt.Errorf("fake %s: %w", step, err)
		}
	case Die:
		if die != nil {
			die()
		}
	}
	return do()
}

// stall waits for d, or for ever where d is 0, and returns the context's error when that ended first.
func stall(ctx context.Context, d time.Duration) error {
	var over <-chan time.Time
	if d > 0 {
		timer := time.NewTimer(d)
		defer timer.Stop()
		over = timer.C
	}
	select {
	case <-over:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}
