package sandbox

import (
	"context"
	"errors"
	"net"
	"os"
	"testing"
	"time"

	"golang.org/x/sys/unix"
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
	l.connect(ours)
	read := make(chan string, 1)
	go func() { // ends with the connection
		b := make([]byte, 16)
		for {
			n, err := l.read(ours, b)
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
		go func() { _, err := l.write(ours, []byte("question")); wrote <- err }()
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
	l.connect(ours)
	if _, err := l.write(ours, []byte("question")); err != nil {
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
	l.connect(ours)
	if !l.intact() {
		t.Error("a new connection is not intact")
	}
	if err := ours.SetWriteDeadline(time.Now().Add(20 * time.Millisecond)); err != nil {
		t.Fatal(err)
	}
	if n, err := l.write(ours, make([]byte, 8<<20)); err == nil {
		t.Fatalf("write of more than fits: got %d, %v", n, err)
	}
	if l.intact() {
		t.Error("a line on which a write broke off is intact")
	}
	again, _ := socketPair(t)
	l.connect(again)
	if l.intact() {
		t.Error("a new connection mends nothing before its first write")
	}
	if _, err := l.write(again, []byte("padding, and a frame")); err != nil || !l.intact() {
		t.Errorf("after the first write on a new connection: %v, intact %v", err, l.intact())
	}
	if err := again.Close(); err != nil {
		t.Fatal(err)
	}
	if err := l.hold(t.Context()); err != nil {
		t.Errorf("hold of a closed connection: %v", err)
	}
	l.free()
}
