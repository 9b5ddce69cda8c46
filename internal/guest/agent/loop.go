package agent

import (
	"errors"
	"os"
	"time"

	"golang.org/x/sys/unix"

	"github.com/forkd/forkd/internal/guest/agentproto"
)

// errStopped ends the loop on demand.
var errStopped = errors.New("agent stopped")

// Places in Agent.polls.
const (
	pollConn = iota // the connection, or what says that one is there
	pollStop
	pollExit // the interpreter's pidfd
	pollReply
	pollRequest
	pollStdout
	pollStderr
	pollCount
)

// reader takes the messages of a connection apart.
type reader struct {
	dec agentproto.Decoder
	asm agentproto.Assembler
}

// loop serves connections of t until there can be no other one or the agent is stopped.
func (a *Agent) loop(t transport) error {
	r := &reader{dec: *agentproto.NewDecoder(agentproto.KindHello, nil)}
	defer a.disconnect(t)
	for {
		if a.fd < 0 {
			if err := a.connect(t, r); err != nil {
				return err
			}
		}
		if a.fd >= 0 && a.stop < 0 && a.in.p == nil {
			// Nothing else can happen: sleep in read itself, the shortest way to the first answer of a fork.
			a.receive(t, r)
			continue
		}
		if err := a.wait(t); err != nil {
			return err
		}
		if a.in.p != nil {
			a.in.service(&a.polls)
		}
		if a.fd >= 0 && a.polls[pollConn].Revents != 0 {
			a.receive(t, r)
		}
	}
}

// wait sleeps until something can be done.
func (a *Agent) wait(t transport) error {
	for i := range a.polls {
		a.polls[i] = unix.PollFd{Fd: -1}
	}
	a.polls[pollConn] = unix.PollFd{Fd: int32(a.fd), Events: unix.POLLIN}
	if a.fd < 0 {
		a.polls[pollConn].Fd = int32(t.waitFD())
	}
	a.polls[pollStop] = unix.PollFd{Fd: int32(a.stop), Events: unix.POLLIN}
	timeout := -1
	if a.in.p != nil {
		timeout = a.in.prepare(&a.polls)
	}
	lasting := a.in.cur != nil
	if lasting { // only what lasts is worth looking at the disk meanwhile
		timeout = a.orLook(timeout)
	}
	if n, err := unix.Poll(a.polls[:pollCount], timeout); err != nil && err != unix.EINTR {
		return os.NewSyscallError("poll", err)
	} else if err != nil {
		for i := range a.polls {
			a.polls[i].Revents = 0
		}
	} else if n == 0 && lasting {
		a.short.active()
	}
	if a.polls[pollStop].Revents != 0 {
		return errStopped
	}
	return nil
}

func (a *Agent) connect(t transport, r *reader) error {
	fd, goesOn, err := t.connect(&a.out, a.received)
	if err != nil || fd < 0 {
		return err
	}
	a.fd = fd
	if goesOn {
		return nil
	}
	a.session, a.received = 0, 0
	a.out.session.Store(0)
	a.out.connect(fd)
	r.dec.Reset()
	r.asm.Reset()
	return nil
}

// disconnect forgets the connection. Work that is under way goes on: a fork of a busy machine inherits it.
func (a *Agent) disconnect(t transport) {
	a.session = 0
	a.out.session.Store(0)
	if a.fd >= 0 {
		t.hangup(&a.out)
	}
	a.fd = -1
}

// receive reads once and handles every message that is complete.
func (a *Agent) receive(t transport, r *reader) {
	n, err := unix.Read(a.fd, r.dec.Space())
	if err == unix.EINTR || err == unix.EAGAIN {
		return
	}
	if err != nil || n <= 0 {
		if t.broke(&a.out) {
			a.fd = -1
			return
		}
		a.disconnect(t)
		return
	}
	a.received += uint64(n)
	r.dec.Filled(n)
	for {
		f, ok := r.dec.Next()
		if !ok {
			return
		}
		if f.Kind == agentproto.KindHello {
			r.asm.Reset()
			a.hello(f)
			continue
		}
		if f.Session != a.session || a.session == 0 {
			continue
		}
		if f.Kind == agentproto.KindCancel {
			r.asm.Drop(f.ID)
		}
		msg, fits, done := r.asm.Add(f)
		if !done {
			continue
		}
		if !fits {
			a.refuse(f.Session, f.ID, agentproto.CodeBadRequest, "the request is longer than 32 MiB; send less input")
			continue
		}
		a.dispatch(f.Kind, f.ID, msg)
	}
}

// hello begins a session.
func (a *Agent) hello(f agentproto.Frame) {
	var h agentproto.Hello
	if h.Decode(f.Payload) != nil || h.Token.Session() == 0 || h.Token.Session() != f.Session {
		return
	}
	a.session = f.Session
	a.out.session.Store(f.Session)
	h.Version = agentproto.Agree(h.Version)
	a.scratch = h.AppendTo(a.scratch[:0])
	a.out.send(f.Session, agentproto.KindHelloAck, 0, a.scratch)
	a.short.greet(h.Version)
}

func (a *Agent) dispatch(kind agentproto.Kind, id uint32, msg []byte) {
	switch kind {
	case agentproto.KindPing:
		a.ping(id)
	case agentproto.KindIdentity:
		a.startIdentity(id, msg)
	case agentproto.KindEval:
		a.startEval(id, msg)
	case agentproto.KindExec:
		a.startExec(id, msg)
	case agentproto.KindCancel:
		a.cancel(id)
	case agentproto.KindQuiesce:
		a.quiesce(id)
	default:
		a.refuse(a.session, id, agentproto.CodeBadRequest, "the agent does not know this kind of request; rebuild the image with this forkd")
	}
}

func (a *Agent) ping(id uint32) {
	up := a.boot + a.now()
	p := agentproto.Pong{UnixNano: time.Now().UnixNano(), UptimeNano: up, PID: a.pid, Version: Version, Python: a.python != ""}
	a.scratch = p.AppendTo(a.scratch[:0])
	a.out.send(a.session, agentproto.KindPong, id, a.scratch)
}

func (a *Agent) cancel(id uint32) {
	if !a.execs.kill(a.session, id) {
		a.in.cancel(a.session, id)
	}
}
