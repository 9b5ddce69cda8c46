package sandbox

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/forkd/forkd/internal/guest/agentproto"
)

// lateGuest answers the n-th identity with a clock that is behind by the n-th duration.
type lateGuest struct {
	behind []time.Duration
	err    error // after these
	got    []agentproto.Identity
}

func (g *lateGuest) Identify(_ context.Context, id agentproto.Identity) (agentproto.IdentityAck, error) {
	g.got = append(g.got, id)
	if len(g.got) > len(g.behind) {
		return agentproto.IdentityAck{}, g.err
	}
	return agentproto.IdentityAck{UnixNano: time.Now().Add(-g.behind[len(g.got)-1]).UnixNano()}, nil
}

// TestIdentifyCorrectsTheClock: a guest that got its identity late is told the time again, and nothing else changes for it.
func TestIdentifyCorrectsTheClock(t *testing.T) {
	t.Parallel()
	broken := errors.New("broken")
	tests := []struct {
		name   string
		behind []time.Duration
		err    error
		tries  int
	}{
		{"in time", []time.Duration{0}, nil, 1},
		{"late once", []time.Duration{2 * time.Second, 0}, nil, 2},
		{"late whatever is done", []time.Duration{time.Minute, time.Minute, time.Minute}, errLateClock, clockTries},
		{"refused", nil, broken, 1},
		{"refused the second time", []time.Duration{time.Minute}, broken, 2},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			g := &lateGuest{behind: tt.behind, err: tt.err}
			first := newIdentity("sb1", []string{"A=1"}, true)
			if err := identify(t.Context(), g, first); !errors.Is(err, tt.err) {
				t.Errorf("identify: got %v, want %v", err, tt.err)
			}
			if len(g.got) != tt.tries {
				t.Fatalf("the guest was given %d identities, want %d", len(g.got), tt.tries)
			}
			for _, again := range g.got[1:] {
				if again.RunHooks || again.UnixNano <= first.UnixNano {
					t.Errorf("second identity: hooks %v, time %d, want none and later than %d", again.RunHooks, again.UnixNano, first.UnixNano)
				}
				again.RunHooks, again.UnixNano = first.RunHooks, first.UnixNano
				if diff := cmp.Diff(again, first); diff != "" {
					t.Errorf("second identity (-got +first):\n%s", diff)
				}
			}
		})
	}
}
