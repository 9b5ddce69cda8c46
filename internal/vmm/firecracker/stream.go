package firecracker

import (
	"bufio"
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/forkd/forkd/internal/guest/agentproto"
	"github.com/forkd/forkd/internal/vmm"
)

// stream is a connection to a guest port that outlives the vsock connections that carry it: saving a device state breaks those. Whoever
// dialled has one end of a socket pair; what goes in and out there is copied to and from the connection of the moment. Bytes that are
// written before the guest runs, or before it listens, wait.
type stream struct {
	m     *machine
	port  uint32
	id    agentproto.StreamID
	ours  net.Conn // our end of the socket pair
	life  context.Context
	cease context.CancelFunc

	writing sync.Mutex // held to write to conn, and taken before mu

	mu       sync.Mutex
	conn     net.Conn // to the guest; nil: none at the moment
	trying   net.Conn // is to become conn
	again    bool     // conn was closed to be made again
	sent     agentproto.Sent
	received uint64 // bytes that were passed on to whoever dialled
	early    int    // connections that broke before anything was received
}

// openStream makes a stream and returns the other end of its socket pair.
func (m *machine) openStream(port uint32) (net.Conn, error) {
	ours, theirs, err := socketPair()
	if err != nil {
		return nil, err
	}
	s := &stream{m: m, port: port, ours: ours}
	s.life, s.cease = context.WithCancel(context.Background())
	if _, err := rand.Read(s.id[:]); err != nil {
		return nil, errors.Join(err, ours.Close(), theirs.Close())
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	select {
	case <-m.session.process.Done():
		return nil, errors.Join(vmm.ErrGone, ours.Close(), theirs.Close())
	default:
	}
	m.streams[s] = struct{}{}
	m.wg.Go(s.copyOut)
	m.wg.Go(s.run)
	return theirs, nil
}

func socketPair() (a, b net.Conn, err error) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		return nil, nil, os.NewSyscallError("socketpair", err)
	}
	var conns [2]net.Conn
	for i, fd := range fds {
		f := os.NewFile(uintptr(fd), "guest port")
		c, e := net.FileConn(f)
		err = errors.Join(err, e, f.Close())
		conns[i] = c
	}
	if err != nil {
		for _, c := range conns {
			if c != nil {
				_ = c.Close()
			}
		}
		return nil, nil, err
	}
	return conns[0], conns[1], nil
}

// end ends the stream for good.
func (s *stream) end() {
	s.cease()
	_ = s.ours.Close()
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.conn != nil {
		_ = s.conn.Close()
	}
}

// restart has the connection made again, if there is one: the guest has dropped it, or will, and does not say so.
func (s *stream) restart() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.conn != nil {
		s.again = true
		_ = s.conn.Close()
	}
	if s.trying != nil {
		_ = s.trying.Close()
	}
}

// run keeps a connection to the guest until the stream ends, and copies what the guest says.
func (s *stream) run() {
	defer s.remove()
	for {
		conn, in, err := s.connect()
		if err != nil {
			s.m.session.log.Debug("stream ended", "port", s.port, "error", err)
			return
		}
		s.copyIn(in)
		s.mu.Lock()
		again := s.again || s.mayBeEarly()
		s.conn, s.again = nil, false
		s.mu.Unlock()
		_ = conn.Close()
		if !again {
			return
		}
	}
}

// maxEarly is how many connections may break before anything was received.
const maxEarly = 20

// mayBeEarly says whether the guest may have dropped a connection because it was told only then that it was frozen. Firecracker before 1.16
// delivers a new connection and that word in no order. Preconditions: s.mu is held.
func (s *stream) mayBeEarly() bool {
	s.early++
	return s.received == 0 && s.early < maxEarly && s.m.session.abilities.older(1, 16) && s.life.Err() == nil
}

func (s *stream) remove() {
	s.end()
	s.m.mu.Lock()
	defer s.m.mu.Unlock()
	delete(s.m.streams, s)
}

// copyOut copies what is written by whoever dialled, and keeps the newest of it.
func (s *stream) copyOut() {
	buf := make([]byte, 64<<10)
	for {
		n, err := s.ours.Read(buf)
		if n > 0 {
			s.send(buf[:n])
		}
		if err != nil {
			s.end()
			return
		}
		if !s.wait() {
			return
		}
	}
}

func (s *stream) send(b []byte) {
	s.writing.Lock()
	defer s.writing.Unlock()
	s.mu.Lock()
	conn := s.conn
	s.sent.Add(b, conn == nil)
	s.mu.Unlock()
	if conn != nil {
		_, _ = conn.Write(b) // what is lost with a connection is sent again on the next
	}
}

// wait holds back a writer that is far ahead of a guest that is not there yet.
func (s *stream) wait() bool {
	for {
		s.mu.Lock()
		ahead := s.conn == nil && s.sent.Kept() > agentproto.StreamKeep
		s.mu.Unlock()
		if !ahead {
			return s.life.Err() == nil
		}
		if !pause(s.life, lastTry) {
			return false
		}
	}
}

// copyIn copies what the guest says until the connection ends.
func (s *stream) copyIn(in io.Reader) {
	buf := make([]byte, 64<<10)
	for {
		n, err := in.Read(buf)
		if n > 0 {
			if _, err := s.ours.Write(buf[:n]); err != nil {
				return
			}
			s.mu.Lock()
			s.received += uint64(n)
			s.mu.Unlock()
		}
		if err != nil {
			return
		}
	}
}

// Backoff between two tries to connect to a guest that does not listen yet.
const (
	firstTry = 500 * time.Microsecond
	lastTry  = 50 * time.Millisecond
)

func pause(ctx context.Context, d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return true
	case <-ctx.Done():
		return false
	}
}

// errStream says that a guest can't go on with a stream.
var errStream = errors.New("the guest can't go on with the stream")

// connect makes a connection, however long it takes the guest to listen. It waits while the guest does not run.
func (s *stream) connect() (net.Conn, io.Reader, error) {
	for rest := firstTry; ; rest = min(2*rest, lastTry) {
		select {
		case <-s.m.session.running.opened():
		case <-s.life.Done():
			return nil, nil, s.life.Err()
		}
		conn, in, err := s.try()
		if err == nil {
			return conn, in, nil
		}
		if errors.Is(err, errStream) || !pause(s.life, rest) {
			return nil, nil, err
		}
	}
}

// replyLimit bounds the wait for a guest that has accepted a connection, and serves another one.
const replyLimit = 10 * time.Second

// try makes one connection.
func (s *stream) try() (_ net.Conn, _ io.Reader, err error) {
	conn, err := dialIn(s.life, s.m.session.api.dir, vsockSocket)
	if err != nil {
		return nil, nil, err
	}
	stop := context.AfterFunc(s.life, func() { conn.Close() })
	defer stop()
	defer func() {
		s.mu.Lock()
		s.trying = nil
		s.mu.Unlock()
		if err != nil {
			_ = conn.Close()
		}
	}()
	_ = conn.SetReadDeadline(time.Now().Add(replyLimit))
	s.mu.Lock()
	header := agentproto.StreamHeader{ID: s.id, Received: s.received}
	s.trying = conn
	s.mu.Unlock()
	if _, err := conn.Write(header.AppendTo(fmt.Appendf(nil, "CONNECT %d\n", s.port))); err != nil {
		return nil, nil, err
	}
	in := bufio.NewReaderSize(conn, 4<<10)
	line, err := in.ReadSlice('\n') // no more than its buffer holds
	if err != nil {
		return nil, nil, err
	}
	if !bytes.HasPrefix(line, []byte("OK ")) {
		return nil, nil, fmt.Errorf("vsock: answer %q", line)
	}
	reply := make([]byte, agentproto.StreamHeaderSize)
	if _, err := io.ReadFull(in, reply); err != nil {
		return nil, nil, err
	}
	_ = conn.SetReadDeadline(time.Time{})
	return conn, in, s.attach(conn, reply)
}

// attach makes conn the stream's and sends what the guest has not received.
func (s *stream) attach(conn net.Conn, reply []byte) error {
	var h agentproto.StreamHeader
	if err := h.Decode(reply); err != nil {
		return fmt.Errorf("%w: %w", errStream, err)
	}
	if h.ID != s.id {
		return errStream
	}
	s.writing.Lock()
	s.mu.Lock()
	defer s.mu.Unlock()
	missing, err := s.sent.Since(h.Received)
	if err != nil || s.life.Err() != nil {
		s.writing.Unlock()
		return fmt.Errorf("%w: %w", errStream, errors.Join(err, s.life.Err()))
	}
	s.conn = conn
	missing = bytes.Clone(missing)
	s.m.wg.Go(func() { // while the guest sends what we have not received
		defer s.writing.Unlock()
		_, _ = conn.Write(missing)
	})
	return nil
}
