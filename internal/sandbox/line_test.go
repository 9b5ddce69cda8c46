package sandbox

import (
	"context"
	"errors"
	"io"
	"net"
	"os"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/forkd/forkd/internal/vmm"
)

// socketPair returns the two ends of a Unix stream.
func socketPair(t *testing.T) (ours, theirs net.Conn) {
	t.Helper()
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	var conns [2]net.Conn
	for i, fd := range fds {
		f := os.NewFile(uintptr(fd), "pair")
		if conns[i], err = net.FileConn(f); err != nil {
			t.Fatal(err)
		}
		_ = f.Close()
		t.Cleanup(func() { _ = conns[i].Close() })
	}
	return conns[0], conns[1]
}

// still says that nothing comes for a moment.
func still[T any](t *testing.T, what string, c <-chan T) {
	t.Helper()
	select {
	case <-c:
		t.Errorf("%s came too early", what)
	case <-time.After(50 * time.Millisecond):
	}
}

func TestLineIsHeld(t *testing.T) {
	ours, theirs := socketPair(t)
	l := &line{}
	conn := l.connect(ours)
	read := make(chan string, 1)
	go func() { // ends with the connection
		b := make([]byte, 16)
		for {
			n, err := conn.Read(b)
			if err != nil {
				return
			}
			read <- string(b[:n])
		}
	}()
	for round := range 3 {
		if err := l.hold(t.Context()); err != nil {
			t.Fatal(err)
		}
		if err := l.hold(t.Context()); !errors.Is(err, errLineHeld) {
			t.Errorf("hold of a held line: got %v, want errLineHeld", err)
		}
		wrote := make(chan error, 1)
		go func() { _, err := conn.Write([]byte("question")); wrote <- err }()
		if _, err := theirs.Write([]byte("answer")); err != nil {
			t.Fatal(err)
		}
		still(t, "a write", wrote)
		still(t, "a read", read)
		l.free()
		l.free()
		if err := <-wrote; err != nil {
			t.Errorf("round %d: write after it was held: %v", round, err)
		}
		if got := <-read; got != "answer" {
			t.Errorf("round %d: read after it was held: got %q", round, got)
		}
		b := make([]byte, 16)
		if n, err := theirs.Read(b); err != nil || string(b[:n]) != "question" {
			t.Errorf("round %d: the other side got %q, %v", round, b[:n], err)
		}
	}
}

func TestLineWaitsUntilAllIsTaken(t *testing.T) {
	ours, theirs := socketPair(t)
	l := &line{}
	conn := l.connect(ours)
	if _, err := conn.Write([]byte("question")); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if err := l.hold(ctx); !errors.Is(err, errLineBusy) {
		t.Errorf("hold before all was taken: got %v, want errLineBusy", err)
	}
	held := make(chan error, 1)
	go func() { held <- l.hold(t.Context()) }() // the first one left it free
	still(t, "hold", held)
	if _, err := theirs.Read(make([]byte, 16)); err != nil {
		t.Fatal(err)
	}
	if err := <-held; err != nil {
		t.Errorf("hold once all was taken: %v", err)
	}
	l.free()
}

func TestLineIsTorn(t *testing.T) {
	ours, _ := socketPair(t)
	l := &line{}
	if l.intact() {
		t.Error("a line without a connection is intact")
	}
	conn := l.connect(ours)
	if !l.intact() {
		t.Error("a new connection is not intact")
	}
	if err := conn.SetWriteDeadline(time.Now().Add(20 * time.Millisecond)); err != nil {
		t.Fatal(err)
	}
	if n, err := conn.Write(make([]byte, 8<<20)); err == nil {
		t.Fatalf("write of more than fits: got %d, %v", n, err)
	}
	if l.intact() {
		t.Error("a line on which a write broke off is intact")
	}
	again, _ := socketPair(t)
	mended := l.connect(again)
	if l.intact() {
		t.Error("a new connection mends nothing before its first write")
	}
	if _, err := mended.Write([]byte("padding, and a frame")); err != nil || !l.intact() {
		t.Errorf("after the first write on a new connection: %v, intact %v", err, l.intact())
	}
	if err := mended.Close(); err != nil {
		t.Fatal(err)
	}
	if err := l.hold(t.Context()); err != nil {
		t.Errorf("hold of a closed connection: %v", err)
	}
	l.free()
}

// TestHeldLineIsGivenUp gives up what waits for a line that is held: the connection is not touched before it is free.
func TestHeldLineIsGivenUp(t *testing.T) {
	ours, theirs := socketPair(t)
	l := &line{}
	conn := l.connect(ours)
	if err := l.hold(t.Context()); err != nil {
		t.Fatal(err)
	}
	wrote, read, seen := make(chan error, 2), make(chan error, 1), make(chan error, 1)
	write := func() { _, err := conn.Write([]byte("question")); wrote <- err }
	go write()
	go func() { _, err := conn.Read(make([]byte, 16)); read <- err }()
	go func() { _, err := theirs.Read(make([]byte, 16)); seen <- err }()
	still(t, "a write", wrote)
	if err := conn.SetWriteDeadline(time.Unix(1, 0)); err != nil {
		t.Fatal(err)
	}
	go write()
	// The first one waits for a deadline that was none when it began to: the one that is set counts.
	for range 2 {
		if err := <-wrote; !errors.Is(err, os.ErrDeadlineExceeded) {
			t.Errorf("write past its deadline: got %v", err)
		}
	}
	if err := conn.SetWriteDeadline(time.Now().Add(20 * time.Millisecond)); err != nil {
		t.Fatal(err)
	}
	if write(); !errors.Is(<-wrote, os.ErrDeadlineExceeded) {
		t.Error("write up to its deadline: got no error")
	}
	if err := conn.SetWriteDeadline(time.Time{}); err != nil {
		t.Fatal(err)
	}
	go write()
	still(t, "a write without a deadline", wrote)
	still(t, "a read", read)
	for range 2 {
		if err := conn.Close(); err != nil {
			t.Errorf("Close: %v", err)
		}
	}
	for what, c := range map[string]chan error{"write": wrote, "read": read} {
		if err := <-c; !errors.Is(err, net.ErrClosed) {
			t.Errorf("%s on a closed connection: got %v", what, err)
		}
	}
	still(t, "the end of the connection", seen)
	if !l.intact() {
		t.Error("nothing was sent, and the line is torn")
	}
	l.free()
	if err := <-seen; !errors.Is(err, io.EOF) {
		t.Errorf("the other side: got %v, want the end", err)
	}
}

// TestHeldLineIsNotDialled makes no connection while the line is held, and waits for one under way.
func TestHeldLineIsNotDialled(t *testing.T) {
	dialled := make(chan net.Conn)
	tapped := &tap{Machine: dialer(dialled)}
	if err := tapped.hold(t.Context()); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	failed := make(chan error, 1)
	go func() { _, err := tapped.Dial(ctx, vmm.PortControl); failed <- err }()
	still(t, "a connection", failed)
	cancel()
	if err := <-failed; !errors.Is(err, context.Canceled) {
		t.Errorf("Dial that was given up: got %v", err)
	}
	tapped.free()
	go func() { _, err := tapped.Dial(t.Context(), vmm.PortControl); failed <- err }()
	still(t, "a connection", failed)
	held := make(chan error, 1)
	go func() { held <- tapped.hold(t.Context()) }()
	still(t, "hold", held)
	ours, _ := socketPair(t)
	dialled <- ours
	if err := <-failed; err != nil {
		t.Errorf("Dial: %v", err)
	}
	if err := <-held; err != nil {
		t.Errorf("hold: %v", err)
	}
	tapped.free()
}

// dialer is a machine that is connected to when somebody gives it a connection.
func dialer(conns chan net.Conn) vmm.Machine { return dialling{conns: conns} }

type dialling struct {
	vmm.Machine
	conns chan net.Conn
}

func (d dialling) Dial(ctx context.Context, _ uint32) (net.Conn, error) {
	select {
	case c := <-d.conns:
		return c, nil
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	}
}
