package vmmtest

import (
	"bufio"
	"context"
	"encoding/json"
	"net"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/forkd/forkd/internal/vmm"
)

// The guest's agent, as long as internal/guest has none: a request is a line of JSON, and so is its reply.

type guestRequest struct {
	ID        int
	Op        string // ping, identify, exec, eval
	Args      []string
	Code      string
	Env       []string
	Stdin     []byte
	Identity  guestIdentity
	TimeoutMS int
}

type guestIdentity struct{ InstanceID, Hostname, MachineID string }

type guestReply struct {
	ID             int
	Error          string
	Code           int
	Stdout, Stderr []byte
	Result         string
	Failure        string
	UptimeNano     int64
}

func (g *guest) serveConn(conn net.Conn, port uint32) {
	defer conn.Close()
	if port != vmm.PortControl {
		return
	}
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	defer wg.Wait()
	defer cancel()
	var mu sync.Mutex
	lines := bufio.NewScanner(conn)
	for lines.Scan() {
		if g.faults[StepGuest] != "" {
			continue
		}
		var req guestRequest
		if json.Unmarshal(lines.Bytes(), &req) != nil {
			continue
		}
		wg.Go(func() {
			r, answer := g.answer(ctx, req)
			if !answer {
				return
			}
			r.ID = req.ID
			line, err := json.Marshal(r)
			if err != nil {
				return
			}
			mu.Lock()
			defer mu.Unlock()
			_, _ = conn.Write(append(line, '\n'))
		})
	}
}

func (g *guest) answer(ctx context.Context, req guestRequest) (guestReply, bool) {
	if req.TimeoutMS > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, time.Duration(req.TimeoutMS)*time.Millisecond)
		defer cancel()
	}
	var r guestReply
	switch g.faults[Step(req.Op)] {
	case Fail, FailLate:
		r.Error = "injected failure"
		return r, true
	case Stall:
		return r, false
	case Die:
		die()
	}
	switch req.Op {
	case "ping":
		g.gate.through(func() { r.UptimeNano = int64(g.uptime()) })
	case "identify":
		g.change(func(s *store) {
			s.Hostname, s.InstanceID, s.MachineID, s.Env = req.Identity.Hostname, req.Identity.InstanceID, req.Identity.MachineID, req.Env
			s.Identities++
		})
	case "exec":
		sh := &shell{guest: g, env: append(g.view().Env, req.Env...), stdin: req.Stdin}
		r.Code = sh.run(ctx, req.Args)
		r.Stdout, r.Stderr = sh.stdout.Bytes(), sh.stderr.Bytes()
	case "eval":
		var out string
		r.Result, out, r.Failure = g.eval(ctx, req.Code)
		r.Stdout = []byte(out)
	default:
		r.Error = "unknown request"
	}
	return r, true
}

// die ends this very process as a signal from outside does.
func die() {
	_ = unix.Kill(unix.Getpid(), unix.SIGKILL)
	select {} // until the signal arrives
}
