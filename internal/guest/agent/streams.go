package agent

import (
	"golang.org/x/sys/unix"

	"github.com/forkd/forkd/internal/guest/agentproto"
)

// streams listens on vsock, where freezing the machine breaks all connections: in the machine that goes on the host comes back and goes on
// with its stream, in a child another host comes with one of its own (agentproto.StreamHeader).
type streams struct {
	listener
	id agentproto.StreamID // of the newest stream; zero: none
}

// headerWait bounds the wait for a header, in seconds: it is sent with the first bytes of a connection.
const headerWait = 2

func (s *streams) connect(o *outlet, received uint64) (int, bool, error) {
	fd, err := s.accept()
	if err != nil || fd < 0 {
		return -1, false, err
	}
	h, ok := readHeader(fd)
	switch {
	case !ok:
	case h.ID == s.id && s.resume(o, fd, h.Received, received):
		return fd, true, nil
	case h.Received == 0 && h.ID != s.id:
		s.begin(o, fd, h.ID)
		return fd, false, nil
	default: // a stream that we know no more
		writeAll(fd, agentproto.StreamHeader{}.AppendTo(nil))
	}
	unix.Close(fd)
	s.conn = -1
	return -1, false, nil
}

// readHeader reads byte for byte: what follows belongs to the stream.
func readHeader(fd int) (h agentproto.StreamHeader, ok bool) {
	_ = unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &unix.Timeval{Sec: headerWait})
	var b [agentproto.StreamHeaderSize]byte
	for n := 0; n < len(b); {
		got, err := unix.Read(fd, b[n:])
		if err == unix.EINTR {
			continue
		}
		if err != nil || got <= 0 {
			return h, false
		}
		n += got
	}
	_ = unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &unix.Timeval{})
	return h, h.Decode(b[:]) == nil && h.ID != agentproto.StreamID{}
}

// begin starts a new stream.
func (s *streams) begin(o *outlet, fd int, id agentproto.StreamID) {
	s.id = id
	o.mu.Lock()
	defer o.mu.Unlock()
	o.sent = new(agentproto.Sent)
	writeAll(fd, agentproto.StreamHeader{ID: id}.AppendTo(nil))
}

// resume goes on with the stream from the byte that the host wants next.
func (s *streams) resume(o *outlet, fd int, from, received uint64) bool {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.sent == nil {
		return false
	}
	missing, err := o.sent.Since(from)
	if err != nil {
		return false
	}
	_ = writeAll(fd, agentproto.StreamHeader{ID: s.id, Received: received}.AppendTo(nil)) && writeAll(fd, missing)
	o.fd = fd
	return true
}

// hangup ends the stream.
func (s *streams) hangup(o *outlet) {
	s.id = agentproto.StreamID{}
	s.broke(o)
	o.mu.Lock()
	o.sent = nil
	o.mu.Unlock()
}

// broke ends the connection, and not the stream: that ends when another begins. How a connection ends does not tell whether its host will
// come back.
func (s *streams) broke(o *outlet) bool {
	if s.conn >= 0 {
		closeSocket(o, s.conn)
		s.conn = -1
	}
	return true
}
