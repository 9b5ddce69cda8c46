package sandbox

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"time"

	"github.com/forkd/forkd/internal/guest/agentproto"
	"github.com/forkd/forkd/internal/vmm"
)

// answerGrace is how much longer than the guest's own timeout the host waits for its word of it.
const answerGrace = 10 * time.Second

// call runs a request to the agent of a running sandbox: it ends with ctx, with the sandbox, and after limit.
func (m *Manager) call(ctx context.Context, id string, limit time.Duration, do func(context.Context, *child) error) error {
	ctx, done, err := m.enter(ctx)
	if err != nil {
		return err
	}
	defer done()
	b, c, idle, err := m.engage(ctx, id)
	if err != nil {
		return err
	}
	defer idle()
	limited, cancel := context.WithTimeoutCause(ctx, limit, errSilent)
	defer cancel()
	bound, end := context.WithCancelCause(limited)
	defer end(nil)
	stop := context.AfterFunc(b.life, func() { end(context.Cause(b.life)) })
	defer stop()
	leave := context.AfterFunc(c.life, func() { end(context.Cause(c.life)) })
	defer leave()
	err = do(bound, c)
	if err == nil {
		return nil
	}
	return m.guestFault(bound, b, c, limit, err)
}

var errSilent = errors.New("the guest did not answer in time")

// guestFault says what an error of the agent's client means.
func (m *Manager) guestFault(ctx context.Context, b *box, c *child, limit time.Duration, err error) error {
	var refused *agentproto.Error
	if errors.As(err, &refused) {
		return refusal(b.id, refused)
	}
	cause := context.Cause(ctx)
	var known *Error
	switch {
	case errors.As(cause, &known): // the sandbox ended, or the daemon is stopping
		return known
	case errors.Is(cause, errSilent):
		return newError(CodeGuestUnreachable, err, "it may be out of memory or busy: see `forkd logs "+b.id+"`", "the guest of sandbox %s did not answer within %v", b.id, limit)
	case cause != nil:
		return cause // the caller went away
	}
	if endsNow(c.machine, err) {
		select {
		case <-b.life.Done(): // what ends the sandbox knows best why
			return context.Cause(b.life)
		case <-time.After(endGrace):
		}
		return newError(CodeSandboxGone, err, "`forkd ls` shows what lives", "sandbox %s has ended: %s", b.id, exitText(c.machine))
	}
	return newError(CodeGuestUnreachable, err, "see `forkd logs "+b.id+"`", "the guest of sandbox %s can't be reached", b.id)
}

// refusal turns the agent's errors into ours.
func refusal(id string, e *agentproto.Error) error {
	switch e.Code {
	case agentproto.CodeNoInterpreter:
		return newError(CodeNoInterpreter, nil, "use an image with python3, or exec", "sandbox %s has no Python interpreter: %s", id, e.Message)
	case agentproto.CodeBusy:
		return &Error{Code: CodeInvalidState, Message: fmt.Sprintf("the guest of sandbox %s is busy: %s", id, e.Message), Hint: "try again in a moment", RetryAfter: retryLater}
	case agentproto.CodeNotFound, agentproto.CodeBadRequest, agentproto.CodeBadUser, agentproto.CodeBadCwd:
		return newError(CodeInvalidArgument, nil, "", "sandbox %s refused the request: %s", id, e.Message)
	}
	return newError(CodeInternal, e, "see `forkd logs "+id+"`", "sandbox %s", id)
}

func isAgentCode(err error, code agentproto.Code) bool {
	var e *agentproto.Error
	return errors.As(err, &e) && e.Code == code
}

// millis is a timeout as the agent takes it; at least 1, since 0 is for none.
func millis(d time.Duration) uint32 { return uint32(max(d.Milliseconds(), 1)) }

// Ping asks the agent of a sandbox for a sign of life.
func (m *Manager) Ping(ctx context.Context, id string) (PingResult, error) {
	var out PingResult
	err := m.call(ctx, id, m.limits.PingTimeout, func(ctx context.Context, c *child) error {
		begin := time.Now()
		pong, err := c.agent.Ping(ctx)
		out = PingResult{PID: int(pong.PID), RoundTrip: time.Since(begin), GuestTime: time.Unix(0, pong.UnixNano),
			Uptime: time.Duration(pong.UptimeNano), Version: pong.Version, Python: pong.Python}
		return err
	})
	if err != nil {
		return PingResult{}, err
	}
	return out, nil
}

// timeout checks a timeout of a request and returns the one to use.
func (m *Manager) timeout(asked time.Duration) (time.Duration, error) {
	if asked < 0 || asked > m.limits.MaxExecTimeout {
		return 0, invalid("0 is for the default", "timeout of %v: choose up to %v", asked, m.limits.MaxExecTimeout)
	}
	return cmp.Or(asked, m.limits.ExecTimeout), nil
}

func checkMaxOutput(n int) error {
	if n < 0 || n > agentproto.LimitMaxOutput {
		return invalid("0 is for the default; write large output to a file", "max output of %d bytes: choose up to %d", n, agentproto.LimitMaxOutput)
	}
	return nil
}

// maxStdin bounds what a command is given: it goes through the agent's memory.
const maxStdin = 16 << 20

// commandNotFound is the exit status that shells give for a command that doesn't exist.
const commandNotFound = 127

// Exec runs a command in a sandbox and returns when it has ended. A command that doesn't exist ends with exit status 127, one that outlives
// its timeout is killed and says TimedOut; neither is an error.
func (m *Manager) Exec(ctx context.Context, id string, req ExecRequest) (ExecResult, error) {
	if len(req.Args) == 0 || req.Args[0] == "" {
		return ExecResult{}, invalid("give the command and its arguments", "exec in sandbox %.80s: no command", id)
	}
	limit, err := m.timeout(req.Timeout)
	if err == nil {
		err = cmp.Or(checkMaxOutput(req.MaxOutput), checkEnv(req.Env))
	}
	if err == nil && len(req.Stdin) > maxStdin {
		err = invalid("write it to a file in the sandbox", "stdin has %d bytes, the limit is %d", len(req.Stdin), maxStdin)
	}
	if err != nil {
		return ExecResult{}, err
	}
	var out ExecResult
	err = m.call(ctx, id, limit+answerGrace, func(ctx context.Context, c *child) error {
		begin := time.Now()
		res, err := c.agent.Exec(ctx, agentproto.ExecRequest{Args: req.Args, Env: environ(nil, req.Env), Cwd: req.Cwd, User: req.User,
			TimeoutMS: millis(limit), MaxOutput: uint32(req.MaxOutput), Stdin: req.Stdin})
		if isAgentCode(err, agentproto.CodeNotFound) {
			res, err = agentproto.ExecResult{ExitCode: commandNotFound, Stderr: []byte("forkd: " + req.Args[0] + ": no such command\n")}, nil
		}
		out = ExecResult{Stdout: res.Stdout, Stderr: res.Stderr, ExitCode: int(res.ExitCode), Signal: res.Signal,
			TimedOut: res.TimedOut, Truncated: res.Truncated, OOMKilled: res.OOMKilled, DiskFull: res.DiskFull, Duration: time.Since(begin)}
		return err
	})
	if err != nil {
		return ExecResult{}, err
	}
	m.timedIn(TimeExec, id, out.Duration)
	return out, nil
}

// Eval runs code in the resident interpreter of a sandbox. An exception is in the result and no error.
func (m *Manager) Eval(ctx context.Context, id string, req EvalRequest) (EvalResult, error) {
	limit, err := m.timeout(req.Timeout)
	if err == nil {
		err = checkMaxOutput(req.MaxOutput)
	}
	if err != nil {
		return EvalResult{}, err
	}
	var out EvalResult
	err = m.call(ctx, id, limit+answerGrace, func(ctx context.Context, c *child) error {
		begin := time.Now()
		res, err := c.agent.Eval(ctx, agentproto.EvalRequest{Code: req.Code, TimeoutMS: millis(limit), MaxOutput: uint32(req.MaxOutput)})
		out = EvalResult{Result: res.Result, Stdout: res.Stdout, Stderr: res.Stderr, Error: res.Error,
			TimedOut: res.TimedOut, Truncated: res.Truncated, OOMKilled: res.OOMKilled, DiskFull: res.DiskFull, Duration: time.Since(begin)}
		return err
	})
	if err != nil {
		return EvalResult{}, err
	}
	m.timedIn(TimeEval, id, out.Duration)
	return out, nil
}

// Logs returns the newest part of a sandbox's console; that of one that ended is kept as long as its record.
func (m *Manager) Logs(ctx context.Context, id string) ([]byte, error) {
	if b, ok := m.mine(ctx, id); ok {
		b.mu.Lock()
		c := b.child
		b.mu.Unlock()
		if c == nil {
			return nil, nil // it doesn't run yet
		}
		if console, ok := c.machine.(vmm.Console); ok {
			text, err := console.Console(ctx)
			if !errors.Is(err, vmm.ErrGone) {
				return text, fault(err, "console of sandbox %s", id)
			}
		}
	}
	if _, err := m.ended(ctx, id); err != nil {
		return nil, err
	}
	text, err := os.ReadFile(m.consoleFile(id))
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, fault(err, "saved console of sandbox %s", id)
	}
	return slices.Clip(text), nil
}
