package vmmtest

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"net"
	"strings"

	"github.com/forkd/forkd/internal/guest/agentproto"
)

// agent is the suite's connection to a guest's agent.
type agent struct {
	dial   func(context.Context) (net.Conn, error)
	resync bool
	conn   net.Conn
	dec    *agentproto.Decoder
	asm    agentproto.Assembler
	token  agentproto.Token
	id     uint32
}

func newAgent(dial func(context.Context) (net.Conn, error), resync bool) *agent {
	return &agent{dial: dial, resync: resync}
}

func (a *agent) close() {
	if a.conn != nil {
		a.conn.Close()
		a.conn = nil
	}
}

// ask sends one request and waits for its reply.
func (a *agent) ask(ctx context.Context, kind agentproto.Kind, req, res message) error {
	var opening []byte
	if a.conn == nil {
		conn, err := a.dial(ctx)
		if err != nil {
			return err
		}
		a.conn = conn
		opening = a.open()
	}
	a.id++
	err := a.exchange(ctx, agentproto.AppendMessage(opening, kind, a.token.Session(), a.id, req.AppendTo(nil)), res)
	if ctx.Err() != nil {
		err = context.Cause(ctx)
	}
	var refusal *agentproto.Error
	if err != nil && !errors.As(err, &refusal) {
		a.close()
		a.resync = true
	}
	return err
}

// open returns what comes first on a new connection.
func (a *agent) open() []byte {
	rand.Read(a.token[:])
	a.dec = agentproto.NewDecoder(agentproto.KindHelloAck, &a.token)
	a.asm.Reset()
	var opening []byte
	if a.resync {
		opening = make([]byte, agentproto.Padding)
	}
	hello := agentproto.Hello{Token: a.token, Version: agentproto.ProtocolVersion}
	return agentproto.AppendMessage(opening, agentproto.KindHello, a.token.Session(), 0, hello.AppendTo(nil))
}

func (a *agent) exchange(ctx context.Context, request []byte, res message) error {
	conn := a.conn
	stop := context.AfterFunc(ctx, func() { conn.Close() })
	defer stop()
	if _, err := conn.Write(request); err != nil {
		return err
	}
	for {
		for f, ok := a.dec.Next(); ok; f, ok = a.dec.Next() {
			if f.ID != a.id {
				continue
			}
			body, _, done := a.asm.Add(f)
			if !done {
				continue
			}
			if f.Kind == agentproto.KindError {
				refusal := &agentproto.Error{}
				if err := refusal.Decode(body); err != nil {
					return err
				}
				return refusal
			}
			return res.Decode(body)
		}
		n, err := conn.Read(a.dec.Space())
		if err != nil {
			return err
		}
		a.dec.Filled(n)
	}
}

func (a *agent) ping(ctx context.Context) error {
	return a.ask(ctx, agentproto.KindPing, empty{}, &agentproto.Pong{})
}

func (a *agent) identify(ctx context.Context, name string) error {
	entropy := make([]byte, agentproto.MinEntropy)
	rand.Read(entropy)
	return a.ask(ctx, agentproto.KindIdentity, &agentproto.Identity{InstanceID: name, Hostname: name, Entropy: entropy}, &agentproto.IdentityAck{})
}

// exec runs a command that must succeed and returns what it printed, without the last newline.
func (a *agent) exec(ctx context.Context, args []string) (string, error) {
	var res agentproto.ExecResult
	err := a.ask(ctx, agentproto.KindExec, &agentproto.ExecRequest{Args: args}, &res)
	if err == nil && res.ExitCode != 0 {
		err = fmt.Errorf("%q: exit code %d: %s", args, res.ExitCode, res.Stderr)
	}
	return strings.TrimSuffix(string(res.Stdout), "\n"), err
}
