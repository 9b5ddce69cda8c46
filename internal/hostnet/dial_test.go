package hostnet

import (
	"context"
	"errors"
	"io"
	"net"
	"net/netip"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/forkd/forkd/internal/netns"
)

// threads is how many threads this process has.
func threads(t *testing.T) int {
	t.Helper()
	list, err := os.ReadDir("/proc/self/task")
	if err != nil {
		t.Fatal(err)
	}
	return len(list)
}

// connecting is how many sockets of a slot's namespace wait for somebody to accept.
func connecting(t *testing.T, s *Slot) (n int) {
	t.Helper()
	var list []byte
	err := netns.Do(s.ns, func() (err error) {
		list, err = os.ReadFile("/proc/thread-self/net/tcp")
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(list)) {
		if f := strings.Fields(line); len(f) > 3 && f[3] == "02" { // SYN_SENT
			n++
		}
	}
	return n
}

// TestDialsWaitWithoutThreads: a guest that accepts nothing keeps no thread of the daemon, however many connections wait for it, and they end with
// who wanted them.
func TestDialsWaitWithoutThreads(t *testing.T) {
	if outside(t) {
		return
	}
	s := acquire(t, open(t, Config{}))
	const many = 60
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	before := threads(t)
	var dials sync.WaitGroup
	for range many {
		dials.Go(func() {
			if conn, err := s.Dial(ctx, 80); err == nil || !errors.Is(err, context.Canceled) {
				t.Errorf("Dial = %v, %v, want that it was cancelled", conn, err)
			}
		})
	}
	for deadline := time.Now().Add(time.Minute); connecting(t, s) < many; time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("%d connections wait, want %d", connecting(t, s), many)
		}
	}
	if n := threads(t); n > before+many/2 {
		t.Errorf("while %d connections wait there are %d threads, and were %d before", many, n, before)
	}
	cancel()
	dials.Wait()
}

// TestDial: what Dial returns is a connection of TCP to somebody in the namespace.
func TestDial(t *testing.T) {
	if outside(t) {
		return
	}
	s := acquire(t, open(t, Config{}))
	in(t, s, "nft", "flush", "ruleset")
	in(t, s, "ip", "addr", "add", guestAddr.String()+"/32", "dev", "lo")
	var guest net.Listener
	err := netns.Do(s.ns, func() (err error) {
		guest, err = net.Listen("tcp4", netip.AddrPortFrom(guestAddr, 0).String())
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	defer guest.Close()
	go func() {
		c, err := guest.Accept()
		if err != nil {
			return
		}
		defer c.Close()
		_, _ = io.Copy(c, c)
	}()
	conn, err := s.Dial(t.Context(), guest.Addr().(*net.TCPAddr).Port)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	if _, err := io.WriteString(conn, "hello"); err != nil {
		t.Fatal(err)
	}
	if err := conn.(*net.TCPConn).CloseWrite(); err != nil {
		t.Fatal(err)
	}
	if back, err := io.ReadAll(conn); err != nil || string(back) != "hello" {
		t.Errorf("it said %q, %v", back, err)
	}
	s.destroy()
	if conn, err := s.Dial(t.Context(), 80); err == nil {
		t.Errorf("Dial when the slot is gone = %v", conn)
	}
}
