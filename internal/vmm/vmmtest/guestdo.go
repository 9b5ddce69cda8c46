package vmmtest

import (
	"context"
	"errors"
	"os"
	"slices"
	"strings"

	"github.com/forkd/forkd/internal/guest/agentproto"
)

// hookDir is where a guest keeps what runs at the end of its new identity.
const hookDir = "/etc/forkd/on-fork.d/"

func (g *guest) pong() agentproto.Pong {
	s := g.view()
	return agentproto.Pong{UnixNano: s.clock(g.uptime()), UptimeNano: int64(g.uptime()), PID: uint32(os.Getpid()), Version: "fake", Python: s.Python}
}

// identify makes the guest another one.
func (g *guest) identify(ctx context.Context, id agentproto.Identity) (agentproto.IdentityAck, error) {
	refuse := func(why string) (agentproto.IdentityAck, error) {
		return agentproto.IdentityAck{}, &agentproto.Error{Code: agentproto.CodeIdentity, Message: why}
	}
	if len(id.Entropy) < agentproto.MinEntropy {
		return refuse("too little entropy")
	}
	if was := g.view().InstanceID; was != id.InstanceID {
		g.shortage(func(n *agentproto.Notice) { n.OOMKills, n.Victim = 0, "" })
	}
	g.change(func(s *store) {
		s.InstanceID, s.Env = id.InstanceID, id.Env
		if id.Hostname != "" {
			s.Hostname = id.Hostname
		}
		if id.MachineID != "" {
			s.MachineID = id.MachineID
		}
		if id.UnixNano != 0 {
			s.setClock(id.UnixNano, g.uptime())
		}
		s.Random.mix(id.Entropy)
		s.Interpreter.mix(append(id.Entropy, "interpreter"...))
	})
	s := g.view()
	ack := agentproto.IdentityAck{UnixNano: s.clock(g.uptime()), Python: s.Python}
	if !id.RunHooks {
		return ack, nil
	}
	var hooks []string
	for name := range s.Files {
		if strings.HasPrefix(name, hookDir) {
			hooks = append(hooks, name)
		}
	}
	slices.Sort(hooks)
	for _, hook := range hooks {
		sh := &shell{guest: g, env: s.Env}
		if code := sh.run(ctx, []string{"sh", "-c", s.Files[hook]}); code != 0 {
			return refuse("hook " + hook + " failed: " + sh.stderr.String())
		}
		ack.Hooks++
	}
	return ack, nil
}

// exec runs a command.
func (g *guest) exec(ctx context.Context, req agentproto.ExecRequest) (agentproto.ExecResult, error) {
	if err := checkExec(req); err != nil {
		return agentproto.ExecResult{}, err
	}
	ctx, cancel := limited(ctx, req.TimeoutMS)
	defer cancel()
	sh := &shell{guest: g, env: g.environ(req.Env), stdin: req.Stdin}
	code := sh.run(ctx, req.Args)
	res := agentproto.ExecResult{ExitCode: int32(code)}
	if code == exitTimeout {
		res.ExitCode, res.Signal = 128+9, "KILL"
		res.TimedOut = errors.Is(ctx.Err(), context.DeadlineExceeded)
	}
	var long [2]bool
	res.Stdout, long[0] = cut(sh.stdout.Bytes(), req.MaxOutput)
	res.Stderr, long[1] = cut(sh.stderr.Bytes(), req.MaxOutput)
	res.Truncated = long[0] || long[1]
	res.OOMKilled = sh.oom
	g.mu.Lock()
	res.DiskFull = code != 0 && g.short.DiskFull
	g.mu.Unlock()
	return res, nil
}

// secretsDir is where a guest finds secrets; .env there says that commands have them in their environment.
const secretsDir = "/run/forkd/secrets/"

// environ is the environment of a command.
func (g *guest) environ(asked []string) []string {
	s := g.view()
	env := slices.Clone(s.Env)
	if _, in := s.Files[secretsDir+".env"]; in {
		for name, text := range s.Files {
			if secret, ok := strings.CutPrefix(name, secretsDir); ok && secret[0] != '.' {
				env = append(env, secret+"="+text)
			}
		}
	}
	return append(env, asked...)
}

func checkExec(req agentproto.ExecRequest) error {
	switch {
	case len(req.Args) == 0 || req.Args[0] == "":
		return &agentproto.Error{Code: agentproto.CodeBadRequest, Message: "no command"}
	case !slices.Contains([]string{"", "root", "0", "user"}, req.User):
		return &agentproto.Error{Code: agentproto.CodeBadUser, Message: "no user " + req.User}
	case !slices.Contains([]string{"", "/", "/root", "/tmp", "/home/user"}, req.Cwd):
		return &agentproto.Error{Code: agentproto.CodeBadCwd, Message: "no directory " + req.Cwd}
	case commands()[req.Args[0]] == nil:
		return &agentproto.Error{Code: agentproto.CodeNotFound, Message: req.Args[0] + ": no such command"}
	}
	return nil
}

// evaluate runs code in the interpreter.
func (g *guest) evaluate(ctx context.Context, req agentproto.EvalRequest) (agentproto.EvalResult, error) {
	if !g.view().Python {
		return agentproto.EvalResult{}, &agentproto.Error{Code: agentproto.CodeNoInterpreter, Message: "the fake guest has no interpreter"}
	}
	ctx, cancel := limited(ctx, req.TimeoutMS)
	defer cancel()
	result, stdout, failure := g.eval(ctx, req.Code)
	res := agentproto.EvalResult{Error: failure, TimedOut: errors.Is(ctx.Err(), context.DeadlineExceeded)}
	var long [2]bool
	short, cutResult := cut([]byte(result), req.MaxOutput)
	res.Result, long[0] = string(short), cutResult
	res.Stdout, long[1] = cut([]byte(stdout), req.MaxOutput)
	res.Truncated = long[0] || long[1]
	return res, nil
}
