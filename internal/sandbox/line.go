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
	mu      sync.Mutex
	held    chan struct{} // closed when the line is free again; nil: it is
	inside  int           // calls in reads and writes
	left    chan struct{} // closed when inside becomes 0; nil: nobody waits for it
	conn    net.Conn      // the newest
	closing []net.Conn    // were closed while it was held
	torn    bool          // the guest may have a part of a frame: the last write broke off
}

// lineConn is a connection whose reads and writes wait while the line is held: no longer than until it is closed, and writes no longer than
// until their deadline. What can't begin does not touch the connection. One that is closed while the line is held goes when it is free: the
// monitor would tell the guest, which is a write into its memory.
type lineConn struct {
	net.Conn
	line *line
	late alarm // the deadline of writes
	gone chan struct{}
	once sync.Once // closes gone
}

// connect puts a new connection on the line.
func (l *line) connect(conn net.Conn) *lineConn {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.conn = conn
	return &lineConn{Conn: conn, line: l, gone: make(chan struct{})}
}

// enter waits until the line is free and begins a call. It returns net.ErrClosed when gone is closed first, and os.ErrDeadlineExceeded for late.
func (l *line) enter(gone, late <-chan struct{}) error {
	for {
		l.mu.Lock()
		held := l.held
		if held == nil {
			l.inside++
			l.mu.Unlock()
			return nil
		}
		l.mu.Unlock()
		select {
		case <-held:
		case <-gone:
			return net.ErrClosed
		case <-late:
			return os.ErrDeadlineExceeded
		}
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

// Write implements net.Conn.
func (c *lineConn) Write(b []byte) (int, error) {
	l := c.line
	if err := l.enter(c.gone, c.late.rings()); err != nil {
		return 0, err
	}
	n, err := c.Conn.Write(b)
	l.mu.Lock()
	defer l.mu.Unlock()
	// The agent's client begins every connection but the first with what repairs a torn frame.
	l.torn = n < len(b)
	l.leaveLocked()
	return n, err
}

// Read implements net.Conn.
func (c *lineConn) Read(b []byte) (int, error) {
	for {
		if err := c.line.enter(c.gone, nil); err != nil {
			return 0, err
		}
		n, err := c.Conn.Read(b)
		c.line.leave()
		if n > 0 || !errors.Is(err, os.ErrDeadlineExceeded) {
			return n, err
		}
		// hold woke us up: nobody else sets deadlines for reading.
	}
}

// SetWriteDeadline implements net.Conn.
func (c *lineConn) SetWriteDeadline(t time.Time) error {
	c.late.set(t)
	return c.Conn.SetWriteDeadline(t)
}

// Close implements net.Conn.
func (c *lineConn) Close() error {
	c.once.Do(func() { close(c.gone) })
	l := c.line
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.held != nil {
		l.closing = append(l.closing, c.Conn)
		return nil
	}
	return c.Conn.Close()
}

// alarm is a deadline that can be waited for.
type alarm struct {
	mu    sync.Mutex
	timer *time.Timer   // nil: none is set, or it has rung
	moves int           // how often it was set
	rang  chan struct{} // closed when the deadline has passed; nil until somebody asked
}

// set moves the deadline; the zero time is for none.
func (a *alarm) set(t time.Time) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.timer != nil {
		a.timer.Stop()
		a.timer = nil
	}
	a.moves++
	if a.rang == nil || isClosed(a.rang) {
		a.rang = make(chan struct{})
	}
	if t.IsZero() {
		return
	}
	if rest := time.Until(t); rest > 0 {
		now := a.moves
		a.timer = time.AfterFunc(rest, func() { a.ring(now) })
		return
	}
	close(a.rang)
}

// ring says that the deadline has passed, unless it was moved meanwhile.
func (a *alarm) ring(moves int) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.moves == moves {
		a.timer = nil
		close(a.rang)
	}
}

func (a *alarm) rings() <-chan struct{} {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.rang == nil {
		a.rang = make(chan struct{})
	}
	return a.rang
}

func isClosed(c <-chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
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
	if conn != nil {
		if err := conn.SetReadDeadline(time.Unix(1, 0)); err != nil && !errors.Is(err, net.ErrClosed) {
			return fmt.Errorf("hold the line to the guest: %w", err)
		}
	}
	if left != nil {
		select {
		case <-left:
		case <-ctx.Done():
			return fmt.Errorf("%w: %w", errLineBusy, context.Cause(ctx))
		}
	}
	if conn == nil {
		return nil
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
	for _, conn := range l.closing {
		_ = conn.Close() // who closed it went on long ago
	}
	close(l.held)
	l.held, l.closing = nil, nil
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
