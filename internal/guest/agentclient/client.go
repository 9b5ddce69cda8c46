// Package agentclient is the host side of a guest agent's control channel (internal/guest/agentproto): calls with contexts over one
// multiplexed connection that is made when it is needed, and made again after it broke.
//
// It does not know what carries the connection: that is the Dialer's business. It does not retry either: a call whose connection
// broke may have run in the guest, so only the caller can decide.
package agentclient

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"net"
	"sync"

	"github.com/forkd/forkd/internal/guest/agentproto"
)

// ErrConnection is wrapped by the error of every call that failed because the connection could not be made, broke, or was given up.
// Whether the guest has served the call is unknown.
var ErrConnection = errors.New("connection to the guest agent")

// ErrClosed is wrapped, with ErrConnection, by the error of calls on a closed Client.
var ErrClosed = errors.New("client is closed")

// ErrTooLong is wrapped by the error of a call whose answer is longer than agentproto.MaxMessage.
var ErrTooLong = errors.New("answer of the guest agent is too long")

// Dialer connects to the guest's control port.
type Dialer func(ctx context.Context) (net.Conn, error)

// Options of a Client.
type Options struct {
	// Resync says that another host process may have used the channel before and may have died in the middle of a message.
	Resync bool
	// Notice is called with what the guest says without having been asked, in order. It must return soon, and not call the Client.
	Notice func(agentproto.Notice)
}

// Client talks to one guest agent. It is safe for concurrent use.
type Client struct {
	dial   Dialer
	life   context.Context // ends with Close
	end    context.CancelCauseFunc
	lock   chan struct{} // held to look at or replace conn; a channel, so that waiting for it ends with the context
	conn   *conn         // nil: none, or broken
	resync bool          // the next connection spoils what an earlier one may have left half written
	notice func(agentproto.Notice)
	wg     sync.WaitGroup
}

// New returns a Client. It connects at the first call.
func New(dial Dialer, opt Options) *Client {
	life, end := context.WithCancelCause(context.Background())
	return &Client{dial: dial, life: life, end: end, lock: make(chan struct{}, 1), resync: opt.Resync, notice: opt.Notice}
}

// Ping asks the agent whether it lives.
func (c *Client) Ping(ctx context.Context) (agentproto.Pong, error) {
	var p agentproto.Pong
	err := c.call(ctx, "ping", agentproto.KindPing, nil, agentproto.KindPong, &p)
	return p, err
}

// Identify makes the guest an individual. After any error the guest must not be used.
func (c *Client) Identify(ctx context.Context, id agentproto.Identity) (agentproto.IdentityAck, error) {
	var ack agentproto.IdentityAck
	err := c.call(ctx, "identity", agentproto.KindIdentity, &id, agentproto.KindIdentityAck, &ack)
	return ack, err
}

// Exec runs a command. When ctx ends first the command is killed in the guest.
func (c *Client) Exec(ctx context.Context, req agentproto.ExecRequest) (agentproto.ExecResult, error) {
	var res agentproto.ExecResult
	err := c.call(ctx, "exec", agentproto.KindExec, &req, agentproto.KindExecResult, &res)
	return res, err
}

// Eval runs code in the guest's Python interpreter. When ctx ends first the code is interrupted.
func (c *Client) Eval(ctx context.Context, req agentproto.EvalRequest) (agentproto.EvalResult, error) {
	var res agentproto.EvalResult
	err := c.call(ctx, "eval", agentproto.KindEval, &req, agentproto.KindEvalResult, &res)
	return res, err
}

// Quiesce makes the guest still and small before a freeze. It fails with code busy while commands or evaluations run.
func (c *Client) Quiesce(ctx context.Context) error {
	return c.call(ctx, "quiesce", agentproto.KindQuiesce, nil, agentproto.KindQuiesceAck, nil)
}

// Close breaks the connection, which fails the calls that are under way, and waits until nothing of the Client runs any more.
func (c *Client) Close() error {
	c.end(ErrClosed) // before the lock: a dial may be under way
	c.lock <- struct{}{}
	cn := c.conn
	c.conn = nil
	<-c.lock
	if cn != nil {
		cn.fail(ErrClosed)
	}
	c.wg.Wait()
	return nil
}

type appender interface{ AppendTo(dst []byte) []byte }

type decoder interface{ Decode(b []byte) error }

// call sends a request and waits for its answer.
func (c *Client) call(ctx context.Context, what string, kind agentproto.Kind, req appender, want agentproto.Kind, res decoder) error {
	var msg []byte
	if req != nil {
		msg = req.AppendTo(nil)
	}
	if len(msg) > agentproto.MaxMessage {
		return fmt.Errorf("%s: %w", what, &agentproto.Error{Code: agentproto.CodeBadRequest, Message: "the request is longer than 32 MiB; send less input"})
	}
	if ctx.Err() != nil { // else a guest that answers at once might be quicker
		return fmt.Errorf("%s: %w", what, context.Cause(ctx))
	}
	cn, err := c.connection(ctx)
	if err != nil {
		return fmt.Errorf("%s: %w", what, err)
	}
	got, err := cn.roundTrip(ctx, kind, msg)
	if err != nil {
		return fmt.Errorf("%s: %w", what, err)
	}
	if err := decodeAnswer(got, want, res); err != nil {
		return fmt.Errorf("%s: %w", what, err)
	}
	return nil
}

func decodeAnswer(got answer, want agentproto.Kind, res decoder) error {
	switch {
	case !got.fits:
		return ErrTooLong
	case got.kind == agentproto.KindError:
		e := new(agentproto.Error)
		if err := e.Decode(got.msg); err != nil {
			return err
		}
		return e
	case got.kind != want:
		return fmt.Errorf("%w: answer of kind %d, want %d", agentproto.ErrMalformed, got.kind, want)
	case res == nil:
		return nil
	}
	return res.Decode(got.msg)
}

// connection returns the connection, a new one if there is none that works.
func (c *Client) connection(ctx context.Context) (*conn, error) {
	select {
	case c.lock <- struct{}{}:
		defer func() { <-c.lock }()
	case <-ctx.Done():
		return nil, fmt.Errorf("%w: not connected yet: %w", ErrConnection, context.Cause(ctx))
	}
	if c.life.Err() != nil {
		return nil, fmt.Errorf("%w: %w", ErrConnection, ErrClosed)
	}
	if c.conn != nil && !c.conn.broken() {
		return c.conn, nil
	}
	nc, err := c.dialAlive(ctx)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrConnection, err)
	}
	hello := agentproto.Hello{Version: agentproto.ProtocolVersion}
	if _, err := rand.Read(hello.Token[:]); err != nil {
		nc.Close()
		return nil, fmt.Errorf("session token: %w", err)
	}
	c.conn = newConn(nc, hello, c.resync)
	c.conn.notice = c.notice
	c.resync = true // whatever comes after this connection may follow a half-written frame of it
	c.wg.Go(c.conn.read)
	return c.conn, nil
}

// dialAlive dials until ctx or the Client ends.
func (c *Client) dialAlive(ctx context.Context) (net.Conn, error) {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	stop := context.AfterFunc(c.life, func() { cancel(ErrClosed) })
	defer stop()
	nc, err := c.dial(ctx)
	if err != nil && c.life.Err() != nil {
		return nil, ErrClosed
	}
	return nc, err
}
