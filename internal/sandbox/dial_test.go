package sandbox

import (
	"context"
	"errors"
	"net"
	"testing"
)

// deafNetwork is one of a guest that accepts nothing.
type deafNetwork struct {
	Network
	begun chan struct{}
}

func (n deafNetwork) Dial(ctx context.Context, _ int) (net.Conn, error) {
	n.begun <- struct{}{}
	<-ctx.Done()
	return nil, ctx.Err()
}

// TestDialsAreBounded: of connections to a guest that accepts none, so many wait and no more, and their places are free when they end.
func TestDialsAreBounded(t *testing.T) {
	t.Parallel()
	n := deafNetwork{begun: make(chan struct{}, maxDials)}
	c := newChild("sb1", "", nil)
	c.network = n
	for range 2 {
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error, maxDials)
		for range maxDials {
			go func() {
				_, err := c.dial(ctx, 80)
				done <- err
			}()
			<-n.begun
		}
		if _, err := c.dial(ctx, 80); !errors.Is(err, errDials) {
			t.Errorf("one more = %v, want that it is not tried", err)
		}
		cancel()
		for range maxDials {
			if err := <-done; !errors.Is(err, context.Canceled) {
				t.Errorf("dial = %v, want that it was cancelled", err)
			}
		}
	}
}
