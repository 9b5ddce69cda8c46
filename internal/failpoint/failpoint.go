// Package failpoint makes a named step of production code fail, stall or kill the whole process, so that tests can show what a
// crash there leaves behind.
//
// A component that has such steps names them in constants of its own, takes a *Set in its configuration and calls Hit at each. A
// nil Set does nothing and costs a comparison, which is what a daemon has that was started without the environment variable:
//
//	FORKD_FAILPOINT='sandbox.fork.loaded@3=kill,snapshot.publish=error' forkd serve
//
// A clause is NAME[@N]=ACTION: at the Nth hit of the point NAME (at every hit without N) do ACTION, which is one of
//
//	kill         the process gets SIGKILL and goes no further
//	error        Hit returns an error that wraps ErrInjected
//	panic        Hit panics
//	stall:TIME   Hit waits that long (a Go duration), or until its context ends and then returns the context's error
//
// There are no globals: whoever reads the variable passes the Set on. It isn't for faults of dependencies (a full disk, a broken
// monitor): those have fakes of their own.
package failpoint

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"
)

// Variable is the environment variable that a daemon reads a Set from.
const Variable = "FORKD_FAILPOINT"

// ErrInjected is wrapped by the errors of points that fail.
var ErrInjected = errors.New("injected failure")

// Set holds what shall happen at which points, and counts hits. A nil Set is inert. It is safe for concurrent use.
type Set struct {
	mu    sync.Mutex
	rules []rule
	hits  map[string]int
	order []string // names in the order of their first hits
}

// rule is one clause. With nth 0 it applies to every hit.
type rule struct {
	name string
	nth  int
	do   func(ctx context.Context) error
}

// New returns a Set that only counts hits, until On adds to it.
func New() *Set { return &Set{hits: map[string]int{}} }

// Parse reads the clauses of a Set. It returns nil for an empty string.
func Parse(spec string) (*Set, error) {
	if strings.TrimSpace(spec) == "" {
		return nil, nil
	}
	s := New()
	for clause := range strings.SplitSeq(spec, ",") {
		r, err := parseRule(strings.TrimSpace(clause))
		if err != nil {
			return nil, fmt.Errorf("failpoint %q: %w; want NAME[@N]=kill|error|panic|stall:TIME", clause, err)
		}
		s.rules = append(s.rules, r)
	}
	return s, nil
}

func parseRule(clause string) (rule, error) {
	where, action, ok := strings.Cut(clause, "=")
	if !ok {
		return rule{}, errors.New("no action")
	}
	name, count, counted := strings.Cut(where, "@")
	if name == "" {
		return rule{}, errors.New("no name")
	}
	r := rule{name: name}
	if counted {
		n, err := strconv.Atoi(count)
		if err != nil || n < 1 {
			return rule{}, fmt.Errorf("%q isn't the number of a hit", count)
		}
		r.nth = n
	}
	var err error
	r.do, err = parseAction(name, action)
	return r, err
}

func parseAction(name, action string) (func(context.Context) error, error) {
	verb, arg, hasArg := strings.Cut(action, ":")
	switch {
	case verb == "stall" && hasArg:
		d, err := time.ParseDuration(arg)
		if err != nil || d < 0 {
			return nil, fmt.Errorf("%q isn't a duration", arg)
		}
		return func(ctx context.Context) error { return stall(ctx, d) }, nil
	case hasArg:
	case verb == "kill":
		return func(context.Context) error { return killSelf() }, nil
	case verb == "error":
		return func(context.Context) error { return fmt.Errorf("at %s: %w", name, ErrInjected) }, nil
	case verb == "panic":
		return func(context.Context) error { panic("failpoint " + name) }, nil
	}
	return nil, fmt.Errorf("unknown action %q", action)
}

// killSelf ends the process as kill -9 does. It doesn't return.
func killSelf() error {
	if err := syscall.Kill(os.Getpid(), syscall.SIGKILL); err != nil {
		return fmt.Errorf("kill this process: %w", err)
	}
	select {} // the signal may take a moment, and nothing may happen in it
}

func stall(ctx context.Context, d time.Duration) error {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// On adds a rule: do runs at the nth hit of the point name, or at every hit when nth is 0, and Hit returns its error.
// Preconditions: s isn't nil.
func (s *Set) On(name string, nth int, do func(ctx context.Context) error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.rules = append(s.rules, rule{name: name, nth: nth, do: do})
}

// Hit says that the point name was reached. It does what the rules say there, the first one that applies only.
func (s *Set) Hit(ctx context.Context, name string) error {
	if s == nil {
		return nil
	}
	if do := s.match(name); do != nil {
		return do(ctx)
	}
	return nil
}

func (s *Set) match(name string) func(context.Context) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.hits[name]++
	n := s.hits[name]
	if n == 1 {
		s.order = append(s.order, name)
	}
	for _, r := range s.rules {
		if r.name == name && (r.nth == 0 || r.nth == n) {
			return r.do
		}
	}
	return nil
}

// Passed returns the points that were hit, in the order of their first hits.
func (s *Set) Passed() []string {
	if s == nil {
		return nil
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.order)
}

// Hits returns how often the point name was hit.
func (s *Set) Hits(name string) int {
	if s == nil {
		return 0
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.hits[name]
}

// Check returns an error when a rule is about a point that isn't in known: such a rule would never do anything.
func (s *Set) Check(known ...string) error {
	if s == nil {
		return nil
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, r := range s.rules {
		if !slices.Contains(known, r.name) {
			return fmt.Errorf("failpoint %q: there is no such point; there are %s", r.name, strings.Join(known, ", "))
		}
	}
	return nil
}
