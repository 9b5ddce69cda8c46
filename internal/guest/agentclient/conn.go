package agentclient

import (
	"context"
	"fmt"
	"net"
	"sync"
	"time"

	"github.com/forkd/forkd/internal/guest/agentproto"
)

// answer is a message from the guest.
type answer struct {
	kind agentproto.Kind
	msg  []byte
	fits bool
}

// conn is one connection and its session.
type conn struct {
	nc      net.Conn
	token   agentproto.Token
	session uint64
	writing chan struct{} // held while a frame is written
	prefix  []byte        // what goes out before the first frame; owned by the holder of writing
	notice  func(agentproto.Notice)

	mu      sync.Mutex
	pending map[uint32]chan answer
	lastID  uint32
	err     error         // why it broke
	done    chan struct{} // closed when it broke
}

func newConn(nc net.Conn, hello agentproto.Hello, resync bool) *conn {
	c := &conn{
		nc: nc, token: hello.Token, session: hello.Token.Session(), writing: make(chan struct{}, 1),
		pending: make(map[uint32]chan answer), done: make(chan struct{}),
	}
	if resync {
		c.prefix = make([]byte, agentproto.Padding, agentproto.Padding+1024)
	}
	c.prefix = agentproto.AppendMessage(c.prefix, agentproto.KindHello, c.session, 0, hello.AppendTo(nil))
	return c
}

func (c *conn) broken() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.err != nil
}

// fail breaks the connection for a reason; only the first one counts.
func (c *conn) fail(err error) {
	c.mu.Lock()
	if c.err == nil {
		c.err = fmt.Errorf("%w: %w", ErrConnection, err)
		close(c.done)
		c.nc.Close()
	}
	c.mu.Unlock()
}

// roundTrip sends a request and waits for the answer, the end of the connection or the end of ctx.
func (c *conn) roundTrip(ctx context.Context, kind agentproto.Kind, msg []byte) (answer, error) {
	id, ch, err := c.register()
	if err != nil {
		return answer{}, err
	}
	defer c.forget(id)
	if err := c.write(ctx, kind, id, msg); err != nil {
		if ctx.Err() != nil {
			c.cancel(id) // a part of the message may be there already
		}
		return answer{}, err
	}
	select {
	case a := <-ch:
		return a, nil
	case <-c.done:
		// The answer may have come before the end.
		select {
		case a := <-ch:
			return a, nil
		default:
			return answer{}, c.err
		}
	case <-ctx.Done():
		if kind == agentproto.KindExec || kind == agentproto.KindEval {
			c.cancel(id)
		}
		return answer{}, context.Cause(ctx)
	}
}

// cancel tells the guest that nobody waits any more. It does not wait for a guest that does not read: such a connection is given up.
func (c *conn) cancel(id uint32) {
	ctx, stop := context.WithTimeout(context.Background(), time.Second)
	defer stop()
	_ = c.write(ctx, agentproto.KindCancel, id, nil)
}

func (c *conn) register() (uint32, chan answer, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.err != nil {
		return 0, nil, c.err
	}
	c.lastID++
	for c.lastID == 0 || c.pending[c.lastID] != nil {
		c.lastID++
	}
	ch := make(chan answer, 1)
	c.pending[c.lastID] = ch
	return c.lastID, ch, nil
}

func (c *conn) forget(id uint32) {
	c.mu.Lock()
	delete(c.pending, id)
	c.mu.Unlock()
}

// write sends a message, frame by frame: others get their turn between the frames of a long one. A frame that can't be written as a
// whole breaks the connection, because the guest could not find the next one.
func (c *conn) write(ctx context.Context, kind agentproto.Kind, id uint32, msg []byte) error {
	for {
		part := msg[:min(len(msg), agentproto.MaxPayload)]
		msg = msg[len(part):]
		if err := c.writeFrame(ctx, kind, len(msg) > 0, id, part); err != nil {
			return err
		}
		if len(msg) == 0 {
			return nil
		}
	}
}

func (c *conn) writeFrame(ctx context.Context, kind agentproto.Kind, more bool, id uint32, part []byte) error {
	select {
	case c.writing <- struct{}{}:
		defer func() { <-c.writing }()
	case <-c.done:
		return c.err
	case <-ctx.Done():
		return context.Cause(ctx)
	}
	b := c.prefix
	c.prefix = nil
	b = agentproto.AppendHeader(b, kind, more, c.session, id, len(part))
	b = append(b, part...)
	b = agentproto.AppendTrailer(b)
	ran := make(chan struct{})
	stop := context.AfterFunc(ctx, func() {
		_ = c.nc.SetWriteDeadline(time.Unix(1, 0))
		close(ran)
	})
	n, err := c.nc.Write(b)
	if !stop() {
		<-ran // the deadline must not hit the next frame
		_ = c.nc.SetWriteDeadline(time.Time{})
	}
	if err == nil {
		return nil
	}
	if cause := context.Cause(ctx); cause != nil {
		c.fail(fmt.Errorf("given up after %d of %d bytes of a frame: %w", n, len(b), cause))
		return cause
	}
	c.fail(err)
	return c.err
}

// read takes answers in until the connection breaks.
func (c *conn) read() {
	dec := agentproto.NewDecoder(agentproto.KindHelloAck, &c.token)
	var asm agentproto.Assembler
	for {
		n, err := c.nc.Read(dec.Space())
		if n > 0 {
			dec.Filled(n)
			if err := c.handle(dec, &asm); err != nil {
				c.fail(err)
			}
		}
		if err != nil {
			c.fail(err)
			return
		}
	}
}

// handle delivers the answers that are complete.
func (c *conn) handle(dec *agentproto.Decoder, asm *agentproto.Assembler) error {
	was := dec.InStep()
	for {
		f, ok := dec.Next()
		if was && !dec.InStep() {
			return fmt.Errorf("%w: a frame that is none", agentproto.ErrMalformed)
		}
		if !ok {
			return nil
		}
		was = true
		if f.Kind == agentproto.KindHelloAck {
			if err := checkVersion(f.Payload); err != nil {
				return err
			}
			continue
		}
		if f.Session != c.session {
			continue
		}
		if f.Kind != agentproto.KindNotice {
			c.deliver(f, asm)
			continue
		}
		var n agentproto.Notice
		if err := n.Decode(f.Payload); err != nil {
			return err
		}
		if c.notice != nil {
			c.notice(n)
		}
	}
}

func checkVersion(payload []byte) error {
	var ack agentproto.Hello
	if err := ack.Decode(payload); err != nil {
		return err
	}
	if ack.Version < agentproto.OldestVersion || ack.Version > agentproto.ProtocolVersion {
		return fmt.Errorf("the guest's agent speaks protocol version %d, this forkd %d; rebuild the image with this forkd", ack.Version, agentproto.ProtocolVersion)
	}
	return nil
}

// deliver gives an answer to the call that waits for it. Nobody waits for the answer to a call that was given up; it is not kept.
func (c *conn) deliver(f agentproto.Frame, asm *agentproto.Assembler) {
	c.mu.Lock()
	ch := c.pending[f.ID]
	c.mu.Unlock()
	if ch == nil {
		asm.Drop(f.ID)
		return
	}
	msg, fits, done := asm.Add(f)
	if !done {
		return
	}
	select {
	case ch <- answer{kind: f.Kind, msg: append([]byte(nil), msg...), fits: fits}:
	default: // a second answer to the same call
	}
}
