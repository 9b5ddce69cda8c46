package relay

import (
	"context"
	"io"
	"net"
	"strings"
	"testing"
)

// pair is a TCP connection: both ends of it.
func pair(t *testing.T) (client, server *net.TCPConn) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	c, err := net.Dial("tcp", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	s, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close(); s.Close() })
	return c.(*net.TCPConn), s.(*net.TCPConn)
}

// joined are two ends with a relay between them, which ends with ctx.
func joined(t *testing.T, ctx context.Context) (near, far *net.TCPConn, done chan struct{}) {
	t.Helper()
	near, a := pair(t)
	far, b := pair(t)
	done = make(chan struct{})
	go func() { defer close(done); Join(ctx, a, b) }()
	return near, far, done
}

// The end of what one side says leaves the other its word.
func TestHalfClose(t *testing.T) {
	near, far, done := joined(t, t.Context())
	text := strings.Repeat("question ", 100_000)
	go func() { _, _ = io.WriteString(near, text); _ = near.CloseWrite() }()
	if got, err := io.ReadAll(far); err != nil || string(got) != text {
		t.Fatalf("%d bytes arrived of %d: %v", len(got), len(text), err)
	}
	go func() { _, _ = io.WriteString(far, text); _ = far.CloseWrite() }()
	if got, err := io.ReadAll(near); err != nil || string(got) != text {
		t.Fatalf("%d bytes came back of %d: %v", len(got), len(text), err)
	}
	<-done
}

// A connection that breaks ends both ways, and so does the context.
func TestBreak(t *testing.T) {
	near, far, done := joined(t, t.Context())
	_ = far.SetLinger(0) // a reset
	_ = far.Close()
	if _, err := io.ReadAll(near); err != nil {
		t.Logf("the near end sees %v", err)
	}
	<-done

	ctx, cancel := context.WithCancel(t.Context())
	near, _, done = joined(t, ctx)
	cancel()
	<-done
	if n, err := near.Read(make([]byte, 1)); err == nil {
		t.Errorf("%d bytes came after the end", n)
	}
}
