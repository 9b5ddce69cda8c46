package sandbox

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// line is the connection to a guest's agent, which can be held still while the machine is frozen: then nothing that we send or take
// makes the monitor write into guest memory after the instant that is saved, and what the guest holds of our requests is whole frames,
// so that the agent in a child of that instant finds the beginning of the next one.
//
// The zero value is a line that is free.
type line struct {
	mu     sync.Mutex
	held   chan struct{} // closed when the line is free again; nil: it is
	inside int           // calls in reads and writes
	left   chan struct{} // closed when inside becomes 0; nil: nobody waits for it
	conn   net.Conn      // the newest
	torn   bool          // the guest may have a part of a frame: the last write broke off
}

// connect notes a new connection.
func (l *line) connect(conn net.Conn) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.conn = conn
}

// enter waits until the line is free and begins a call.
func (l *line) enter() {
	for {
		l.mu.Lock()
		held := l.held
		if held == nil {
			l.inside++
			l.mu.Unlock()
			return
		}
		l.mu.Unlock()
		<-held
	}
}

func (l *line) leave() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.leaveLocked()
}

func (l *line) leaveLocked() {
	if l.inside--; l.inside == 0 && l.left != nil {
		close(l.left)
		l.left = nil
	}
}

func (l *line) write(conn net.Conn, b []byte) (int, error) {
	l.enter()
	n, err := conn.Write(b)
	l.mu.Lock()
	defer l.mu.Unlock()
	// The agent's client begins every connection but the first with what repairs a torn frame.
	l.torn = n < len(b)
	l.leaveLocked()
	return n, err
}

func (l *line) read(conn net.Conn, b []byte) (int, error) {
	for {
		l.enter()
		n, err := conn.Read(b)
		l.leave()
		if n > 0 || !errors.Is(err, os.ErrDeadlineExceeded) {
			return n, err
		}
		// hold woke us up: nobody else sets deadlines for reading.
	}
}

// intact reports whether there is a connection on which every frame was sent whole.
func (l *line) intact() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.conn != nil && !l.torn
}

var (
	errLineHeld = errors.New("the line to the guest is held already")
	errLineBusy = errors.New("the guest does not take what was sent to it")
)

// hold returns when nothing moves on the line, and nothing will until free. On an error the line is free.
func (l *line) hold(ctx context.Context) error {
	l.mu.Lock()
	if l.held != nil {
		l.mu.Unlock()
		return errLineHeld
	}
	l.held = make(chan struct{})
	conn := l.conn
	var left chan struct{}
	if l.inside > 0 {
		left = make(chan struct{})
		l.left = left
	}
	l.mu.Unlock()
	err := l.settle(ctx, conn, left)
	if err != nil {
		l.free()
	}
	return err
}

func (l *line) settle(ctx context.Context, conn net.Conn, left chan struct{}) error {
	if conn == nil {
		return nil
	}
	if err := conn.SetReadDeadline(time.Unix(1, 0)); err != nil && !errors.Is(err, net.ErrClosed) {
		return fmt.Errorf("hold the line to the guest: %w", err)
	}
	if left != nil {
		select {
		case <-left:
		case <-ctx.Done():
			return fmt.Errorf("%w: %w", errLineBusy, context.Cause(ctx))
		}
	}
	return drained(ctx, conn)
}

// free lets the line go on. Freeing a free line is harmless.
func (l *line) free() {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.held == nil {
		return
	}
	if l.conn != nil {
		_ = l.conn.SetReadDeadline(time.Time{}) // it fails when the connection is closed
	}
	close(l.held)
	l.held = nil
}

// Backoff between two looks at a socket: nothing tells when the other side has taken the last byte.
const (
	drainFirst = 20 * time.Microsecond
	drainLast  = time.Millisecond
)

// drained waits until the monitor has taken everything that was written to its socket: it hands it to the guest when it takes it.
func drained(ctx context.Context, conn net.Conn) error {
	for pause := drainFirst; ; pause = min(2*pause, drainLast) {
		n, err := unsent(conn)
		if err != nil {
			return fmt.Errorf("hold the line to the guest: %w", err)
		}
		if n == 0 {
			return nil
		}
		if !pauseFor(ctx, pause) {
			return fmt.Errorf("%w: %d bytes wait: %w", errLineBusy, n, context.Cause(ctx))
		}
	}
}

// unsent is what the other side of a socket has not taken yet, in bytes; 0 for what is no socket, or closed.
func unsent(conn net.Conn) (n int, err error) {
	sc, ok := conn.(syscall.Conn)
	if !ok {
		return 0, nil
	}
	raw, err := sc.SyscallConn()
	if err != nil {
		return 0, err
	}
	controlled := raw.Control(func(fd uintptr) { n, err = unix.IoctlGetInt(int(fd), unix.SIOCOUTQ) })
	if controlled != nil {
		return 0, nil // closed: nothing will be taken
	}
	return n, err
}
