package vmmtest

import (
	"context"
	"errors"
	"net"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/forkd/forkd/internal/guest/agentproto"
	"github.com/forkd/forkd/internal/vmm"
)

// message is a message of agentproto.
type message interface {
	AppendTo([]byte) []byte
	Decode([]byte) error
}

// empty is the message of a kind that says it all.
type empty struct{}

func (empty) AppendTo(dst []byte) []byte { return dst }
func (empty) Decode([]byte) error        { return nil }

// agentServer is the agent of a fake guest. The real one runs commands of the machine that it is on and keeps its state in its own
// process; this one speaks the same protocol about what is in the fake guest's memory.
//
// As with a virtio-serial port, the guest may never learn that one connection ended and another began: what a dead host left half
// written is followed by what the next one writes.
type agentServer struct {
	guest   *guest
	dec     *agentproto.Decoder
	asm     agentproto.Assembler
	evals   chan struct{} // holds a token while an evaluation runs
	writing sync.Mutex    // held while a frame is written

	mu      sync.Mutex // guards what follows
	conn    net.Conn
	session uint64 // 0 before HELLO
	running map[requestID]context.CancelFunc
}

// requestID names a request.
type requestID struct {
	session uint64
	id      uint32
}

func newAgentServer(g *guest) *agentServer {
	return &agentServer{
		guest: g, dec: agentproto.NewDecoder(agentproto.KindHello, nil), evals: make(chan struct{}, 1), running: map[requestID]context.CancelFunc{},
	}
}

// serve serves one connection after the other. It ends with the process.
func (s *agentServer) serve(l net.Listener, port uint32) {
	if port == vmm.PortControl {
		s.guest.mu.Lock()
		s.guest.tell = s.notice
		s.guest.mu.Unlock()
	}
	for {
		conn, err := l.Accept()
		if err != nil {
			return
		}
		if port != vmm.PortControl {
			conn.Close() // nothing listens in the guest
			continue
		}
		s.serveConn(gatedConn{conn, s.guest.gate})
	}
}

func (s *agentServer) serveConn(conn net.Conn) {
	defer conn.Close()
	s.attach(conn)
	defer s.attach(nil)
	for {
		n, err := conn.Read(s.dec.Space())
		s.dec.Filled(n)
		for f, ok := s.dec.Next(); ok; f, ok = s.dec.Next() {
			s.frame(f)
		}
		if err != nil {
			return
		}
	}
}

func (s *agentServer) attach(conn net.Conn) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.conn, s.session = conn, 0
}

func (s *agentServer) frame(f agentproto.Frame) {
	if s.guest.faults[StepGuest] != "" {
		return
	}
	if f.Kind == agentproto.KindHello {
		s.hello(f)
		return
	}
	s.mu.Lock()
	session := s.session
	s.mu.Unlock()
	if session == 0 || f.Session != session {
		return
	}
	body, fits, done := s.asm.Add(f)
	if !done {
		return
	}
	id := requestID{session, f.ID}
	if !fits {
		s.fail(id, agentproto.CodeBadRequest, "the request is too long")
		return
	}
	s.request(id, f.Kind, body)
}

func (s *agentServer) hello(f agentproto.Frame) {
	var hello agentproto.Hello
	if hello.Decode(f.Payload) != nil || hello.Token.Session() != f.Session {
		return
	}
	s.asm.Reset()
	s.mu.Lock()
	s.session = f.Session
	s.mu.Unlock()
	hello.Version = agentproto.Agree(hello.Version)
	s.send(requestID{f.Session, 0}, agentproto.KindHelloAck, &hello)
	s.guest.mu.Lock()
	defer s.guest.mu.Unlock()
	if n := s.guest.short; n.OOMKills > 0 || n.DiskFull {
		s.notice(n)
	}
}

// notice tells the host something that it did not ask for.
func (s *agentServer) notice(n agentproto.Notice) {
	s.mu.Lock()
	session := s.session
	s.mu.Unlock()
	if session != 0 {
		s.send(requestID{session, 0}, agentproto.KindNotice, &n)
	}
}

// send writes a message, unless its session is over.
func (s *agentServer) send(to requestID, kind agentproto.Kind, m message) {
	s.writing.Lock()
	defer s.writing.Unlock()
	s.mu.Lock()
	conn := s.conn
	if s.session != to.session {
		conn = nil
	}
	s.mu.Unlock()
	if conn != nil {
		_, _ = conn.Write(agentproto.AppendMessage(nil, kind, to.session, to.id, m.AppendTo(nil)))
	}
}

func (s *agentServer) fail(to requestID, code agentproto.Code, text string) {
	s.send(to, agentproto.KindError, &agentproto.Error{Code: code, Message: text})
}

// request starts one request. Body is only valid until it returns.
func (s *agentServer) request(id requestID, kind agentproto.Kind, body []byte) {
	switch kind {
	case agentproto.KindPing:
		pong := s.guest.pong()
		s.send(id, agentproto.KindPong, &pong)
	case agentproto.KindIdentity:
		run(s, id, StepIdentify, body, agentproto.KindIdentityAck, s.guest.identify)
	case agentproto.KindExec:
		run(s, id, StepExec, body, agentproto.KindExecResult, s.guest.exec)
	case agentproto.KindEval:
		run(s, id, StepEval, body, agentproto.KindEvalResult, s.eval)
	case agentproto.KindQuiesce:
		s.quiesce(id)
	case agentproto.KindCancel:
		s.mu.Lock()
		defer s.mu.Unlock()
		if cancel := s.running[id]; cancel != nil {
			cancel()
		}
	default:
		s.fail(id, agentproto.CodeBadRequest, "unknown kind of request")
	}
}

func (s *agentServer) quiesce(id requestID) {
	s.mu.Lock()
	busy := len(s.running) > 0
	s.mu.Unlock()
	if busy {
		s.fail(id, agentproto.CodeBusy, "a command is running")
		return
	}
	s.send(id, agentproto.KindQuiesceAck, empty{})
}

// eval keeps evaluations from running at once: there is one interpreter.
func (s *agentServer) eval(ctx context.Context, req agentproto.EvalRequest) (agentproto.EvalResult, error) {
	select {
	case s.evals <- struct{}{}:
	case <-ctx.Done():
		return agentproto.EvalResult{}, &agentproto.Error{Code: agentproto.CodeCanceled, Message: "canceled before it began"}
	}
	defer func() { <-s.evals }()
	return s.guest.evaluate(ctx, req)
}

// run carries out one request in a goroutine of its own, which ends with the request or the process.
func run[Req, Res any, PReq interface {
	*Req
	message
}, PRes interface {
	*Res
	message
}](s *agentServer, id requestID, step Step, body []byte, kind agentproto.Kind, do func(context.Context, Req) (Res, error)) {
	var req Req
	if PReq(&req).Decode(body) != nil {
		s.fail(id, agentproto.CodeBadRequest, "malformed "+string(step))
		return
	}
	ctx, cancel := context.WithCancel(context.Background())
	s.mu.Lock()
	s.running[id] = cancel
	s.mu.Unlock()
	go func() {
		defer cancel()
		var res Res
		err := s.guest.fault(ctx, step)
		if err == nil {
			res, err = do(ctx, req)
		}
		s.mu.Lock()
		delete(s.running, id)
		s.mu.Unlock()
		var refusal *agentproto.Error
		switch {
		case err == nil:
			s.send(id, kind, PRes(&res))
		case errors.As(err, &refusal):
			s.send(id, agentproto.KindError, refusal)
		default:
			s.fail(id, agentproto.CodeInternal, err.Error())
		}
	}()
}

// fault plays what was injected for a step.
func (g *guest) fault(ctx context.Context, step Step) error {
	switch g.faults[step] {
	case Fail, FailLate:
		code := agentproto.CodeInternal
		if step == StepIdentify {
			code = agentproto.CodeIdentity
		}
		return &agentproto.Error{Code: code, Message: "injected failure"}
	case Stall:
		<-ctx.Done()
		return context.Cause(ctx)
	case Die:
		die()
	}
	return nil
}

// die ends this very process as a signal from outside does.
func die() {
	_ = unix.Kill(os.Getpid(), unix.SIGKILL)
	select {} // until the signal arrives
}

// limited bounds a request's time.
func limited(ctx context.Context, ms uint32) (context.Context, context.CancelFunc) {
	if ms == 0 {
		return context.WithCancel(ctx)
	}
	return context.WithTimeout(ctx, time.Duration(ms)*time.Millisecond)
}

// cut bounds an output stream.
func cut(b []byte, limit uint32) ([]byte, bool) {
	if limit == 0 {
		limit = agentproto.DefaultMaxOutput
	}
	if len(b) <= int(limit) {
		return b, false
	}
	return b[:limit], true
}
