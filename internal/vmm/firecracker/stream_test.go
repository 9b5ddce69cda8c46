package firecracker

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"sync"
	"testing"
	"time"

	"github.com/forkd/forkd/internal/guest/agentclient"
	"github.com/forkd/forkd/internal/guest/agentproto"
	"github.com/forkd/forkd/internal/vmm"
)

// newAgentChild restores a child of a fake Firecracker whose guest has an agent. It is paused.
func newAgentChild(t *testing.T) (vmm.Machine, *agentclient.Client) {
	t.Helper()
	h := newFakeHost(t, fakeOrders{Agent: true})
	h.freeze(t)
	m, err := h.child(t.Context(), t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	client := agentclient.New(func(ctx context.Context) (net.Conn, error) { return m.Dial(ctx, vmm.PortControl) }, agentclient.Options{})
	t.Cleanup(func() {
		if err := m.Kill(); err != nil {
			t.Errorf("Kill: %v", err)
		}
		client.Close()
	})
	return m, client
}

func limited(t *testing.T) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	t.Cleanup(cancel)
	return ctx
}

func TestStreamWaitsForTheGuest(t *testing.T) {
	m, client := newAgentChild(t)
	early, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
	defer cancel()
	answered := make(chan error, 1)
	go func() {
		_, err := client.Ping(limited(t))
		answered <- err
	}()
	select {
	case err := <-answered:
		t.Fatalf("a paused guest answered (%v)", err)
	case <-early.Done():
	}
	resume(t, m)
	if err := <-answered; err != nil {
		t.Errorf("what was written before the guest ran: %v", err)
	}
}

// TestStreamOutlivesFreezes freezes a guest again and again while commands run and large outputs are under way in both directions.
func TestStreamOutlivesFreezes(t *testing.T) {
	m, client := newAgentChild(t)
	resume(t, m)
	ctx := limited(t)
	var wg sync.WaitGroup
	stop := make(chan struct{})
	for i := range 4 {
		wg.Go(func() {
			for n := 0; ; n++ {
				select {
				case <-stop:
					return
				default:
				}
				in := bytes.Repeat(fmt.Appendf(nil, "%d-%d ", i, n), 10_000)
				res, err := client.Exec(ctx, agentproto.ExecRequest{Args: []string{"cat"}, Stdin: in, MaxOutput: 8 << 20})
				if err != nil || !bytes.Equal(res.Stdout, in) {
					t.Errorf("exec %d of %d: %d of %d bytes came back, %v", n, i, len(res.Stdout), len(in), err)
					return
				}
			}
		})
	}
	for range 30 {
		if err := life(ctx, m, tempFile(t)); err != nil {
			t.Error(err)
			break
		}
		time.Sleep(15 * time.Millisecond)
	}
	close(stop)
	wg.Wait()
}

// TestStreamLongCommand: a command that runs across a freeze, with nothing under way then, still gets its answer to the host.
func TestStreamLongCommand(t *testing.T) {
	m, client := newAgentChild(t)
	resume(t, m)
	done := make(chan error, 1)
	go func() {
		res, err := client.Exec(limited(t), agentproto.ExecRequest{Args: []string{"sh", "-c", "sleep 0.5; echo done"}, MaxOutput: 100})
		if err == nil && string(res.Stdout) != "done\n" {
			err = fmt.Errorf("output %q", res.Stdout)
		}
		done <- err
	}()
	time.Sleep(200 * time.Millisecond)
	if err := life(t.Context(), m, tempFile(t)); err != nil {
		t.Fatal(err)
	}
	if err := <-done; err != nil {
		t.Error(err)
	}
}

func TestStreamEndsWithTheMachine(t *testing.T) {
	m, client := newAgentChild(t)
	resume(t, m)
	if _, err := client.Ping(limited(t)); err != nil {
		t.Fatal(err)
	}
	done := make(chan error, 1)
	go func() {
		_, err := client.Exec(limited(t), agentproto.ExecRequest{Args: []string{"sleep", "60"}, MaxOutput: 100})
		done <- err
	}()
	time.Sleep(50 * time.Millisecond)
	if err := m.Kill(); err != nil {
		t.Fatal(err)
	}
	if err := <-done; !errors.Is(err, agentclient.ErrConnection) {
		t.Errorf("a command of a machine that was killed: %v, want ErrConnection", err)
	}
}

// TestStreamOneAtATime: a second connection waits until the first is closed.
func TestStreamOneAtATime(t *testing.T) {
	m, client := newAgentChild(t)
	resume(t, m)
	if _, err := client.Ping(limited(t)); err != nil {
		t.Fatal(err)
	}
	second := agentclient.New(func(ctx context.Context) (net.Conn, error) { return m.Dial(ctx, vmm.PortControl) }, agentclient.Options{})
	defer second.Close()
	answered := make(chan error, 1)
	go func() {
		_, err := second.Ping(limited(t))
		answered <- err
	}()
	select {
	case err := <-answered:
		t.Fatalf("the second connection was served beside the first (%v)", err)
	case <-time.After(100 * time.Millisecond):
	}
	client.Close()
	if err := <-answered; err != nil {
		t.Errorf("the second connection, after the first was closed: %v", err)
	}
}

// TestPauseLeavesTheGuestItsEars: a guest that was paused and resumed, or resumed twice, hears new connections.
func TestPauseLeavesTheGuestItsEars(t *testing.T) {
	m, client := newAgentChild(t)
	resume(t, m)
	for range 3 {
		if _, err := client.Ping(limited(t)); err != nil {
			t.Fatal(err)
		}
		client.Close()
		if err := errors.Join(m.Pause(t.Context()), m.Pause(t.Context()), m.Resume(t.Context()), m.Resume(t.Context())); err != nil {
			t.Fatal(err)
		}
		client = agentclient.New(func(ctx context.Context) (net.Conn, error) { return m.Dial(ctx, vmm.PortControl) }, agentclient.Options{})
	}
	client.Close()
}
