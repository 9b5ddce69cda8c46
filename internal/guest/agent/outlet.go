package agent

import (
	"sync"
	"sync/atomic"

	"golang.org/x/sys/unix"

	"github.com/forkd/forkd/internal/guest/agentproto"
)

// outlet writes frames to the connection, from the loop and from commands that end.
type outlet struct {
	session atomic.Uint64 // 0: none; frames of any other are dropped
	mu      sync.Mutex
	fd      int
	buf     []byte
	sent    *agentproto.Sent // what was sent, where the connection can break and be gone on from; nil elsewhere
}

// encoder is a message of agentproto.
type encoder interface{ AppendTo(dst []byte) []byte }

// connect says where frames go from now on.
func (o *outlet) connect(fd int) {
	if o.fd == fd {
		return // only the loop changes it
	}
	o.mu.Lock()
	o.fd = fd
	o.mu.Unlock()
}

// send writes a message of at most one frame that does not escape.
func (o *outlet) send(session uint64, kind agentproto.Kind, id uint32, msg []byte) {
	o.mu.Lock()
	if session == o.session.Load() && o.open() {
		b := agentproto.AppendHeader(o.buf[:0], kind, false, session, id, len(msg))
		b = append(b, msg...)
		b = agentproto.AppendTrailer(b)
		o.buf = b
		o.write(b)
	}
	o.mu.Unlock()
}

// open says whether what is written has somewhere to go. Preconditions: o.mu is held.
func (o *outlet) open() bool { return o.fd >= 0 || o.sent != nil }

// partedLimit bounds what is kept for a host that is away.
const partedLimit = 2 * agentproto.MaxMessage

// write sends b now, or keeps it for the next connection. Preconditions: o.mu is held.
func (o *outlet) write(b []byte) {
	if o.sent != nil {
		o.sent.Add(b, o.fd < 0)
		if o.fd < 0 && o.sent.Kept() > partedLimit {
			o.sent = nil // the host learns of it when it comes back
		}
	}
	if o.fd >= 0 {
		writeAll(o.fd, b)
	}
}

// sendLong writes a message of any length. Between its frames others get their turn, so that a ping does not wait for a long output.
func (o *outlet) sendLong(session uint64, kind agentproto.Kind, id uint32, msg []byte) {
	for {
		part := msg
		if len(part) > agentproto.MaxPayload {
			part = part[:agentproto.MaxPayload]
		}
		msg = msg[len(part):]
		var head [agentproto.HeaderSize]byte
		o.mu.Lock()
		if session != o.session.Load() || !o.open() {
			o.mu.Unlock()
			return
		}
		// One write for each frame: a frame is never cut by another one, and a small one costs one system call.
		b := append(o.buf[:0], agentproto.AppendHeader(head[:0], kind, len(msg) > 0, session, id, len(part))...)
		b = append(b, part...)
		b = agentproto.AppendTrailer(b)
		if cap(b) <= 8<<10 {
			o.buf = b // a big buffer is not kept: it would be copied into every snapshot
		}
		o.write(b)
		o.mu.Unlock()
		if len(msg) == 0 {
			return
		}
	}
}

// reply sends m.
func (a *Agent) reply(session uint64, kind agentproto.Kind, id uint32, m encoder) {
	a.out.sendLong(session, kind, id, m.AppendTo(nil))
}

// refuse answers a request with an error.
func (a *Agent) refuse(session uint64, id uint32, code agentproto.Code, msg string) {
	a.reply(session, agentproto.KindError, id, &agentproto.Error{Code: code, Message: msg})
}

// writeAll writes b. What can't be written is lost with its connection: the loop learns of that when it reads.
func writeAll(fd int, b []byte) bool {
	for len(b) > 0 {
		n, err := unix.Write(fd, b)
		if err == unix.EINTR {
			continue
		}
		if err != nil || n <= 0 {
			return false
		}
		b = b[n:]
	}
	return true
}
