package memory

import (
	"context"
	"errors"
	"testing"

	"github.com/forkd/forkd/internal/vmm"
)

func TestProbe(t *testing.T) {
	needRoot(t)
	if got := Probe(); got.Live != nil || got.Calls != nil {
		t.Errorf("Probe() = %+v, want no errors on a host that the other tests run on", got)
	}
}

func TestAdoptRefuses(t *testing.T) {
	g, _ := idleGuest(t, guestConfig{})
	tests := map[string]struct {
		change func(*vmm.Process)
		want   error
	}{
		"no device inherited":     {func(p *vmm.Process) { p.UFFDDev = 0 }, ErrNotTracked},
		"not the device":          {func(p *vmm.Process) { p.UFFDDev = guestControlFD }, ErrNotTracked},
		"not a descriptor":        {func(p *vmm.Process) { p.UFFDDev = 999 }, ErrNotTracked},
		"another process by then": {func(p *vmm.Process) { p.StartTicks++ }, vmm.ErrGone},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			id := g.process
			tt.change(&id)
			if u, err := Adopt(t.Context(), id); !errors.Is(err, tt.want) {
				t.Errorf("Adopt = %v, %v, want %v", u, err, tt.want)
			}
		})
	}
	g.sane()
}

func TestAdoptInTime(t *testing.T) {
	g, _ := idleGuest(t, guestConfig{})
	g.do("spin")
	g.process.IdleThread = spinName
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := Adopt(ctx, g.process); !errors.Is(err, context.Canceled) {
		t.Errorf("with a context that is done, and a thread that can't be used: %v, want %v", err, context.Canceled)
	}
}
