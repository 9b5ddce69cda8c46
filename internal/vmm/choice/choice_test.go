package choice

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/forkd/forkd/internal/vmm"
)

// stub is an engine that only answers Probe.
type stub struct {
	vmm.Engine
	name   string
	err    error
	probes int
}

func (s *stub) Probe(context.Context) (vmm.Info, error) {
	s.probes++
	return vmm.Info{Engine: s.name}, s.err
}

func TestChoice(t *testing.T) {
	away := func(name string) *stub {
		return &stub{name: name, err: fmt.Errorf("no %s here: %w", name, vmm.ErrUnavailable)}
	}
	there := func(name string) *stub { return &stub{name: name} }
	for _, tt := range []struct {
		name  string
		first *stub
		next  *stub
		want  string
	}{
		{"the best", there("a"), there("b"), "a"},
		{"the other", away("a"), there("b"), "b"},
		{"none", away("a"), away("b"), ""},
		{"broken", &stub{name: "a", err: errors.New("out of memory")}, there("b"), ""},
	} {
		t.Run(tt.name, func(t *testing.T) {
			e := New(nil, Candidate{"a", tt.first}, Candidate{"b", tt.next})
			info, err := e.Probe(t.Context())
			if info.Engine != tt.want || (err == nil) != (tt.want != "") {
				t.Fatalf("chose %q (%v), want %q", info.Engine, err, tt.want)
			}
			if tt.name == "none" && (!errors.Is(err, vmm.ErrUnavailable) || !strings.Contains(err.Error(), "no a here") || !strings.Contains(err.Error(), "no b here")) {
				t.Errorf("%v: want why each is not to be had", err)
			}
			tt.first.err = nil // it comes too late
			if again, _ := e.Probe(t.Context()); tt.want != "" && again.Engine != tt.want {
				t.Errorf("then chose %q", again.Engine)
			}
		})
	}
}
