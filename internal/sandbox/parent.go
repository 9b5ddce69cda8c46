package sandbox

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"time"

	"github.com/forkd/forkd/internal/guest/agentclient"
	"github.com/forkd/forkd/internal/guest/agentproto"
	"github.com/forkd/forkd/internal/limits"
	"github.com/forkd/forkd/internal/vmm"
)

// bootParent starts the parent's machine. The memory goes with it.
func (c *creation) bootParent(ctx context.Context, g *grant) error {
	m := c.m
	c.tell(Progress{Step: "boot", Detail: c.image.Name})
	dir := m.machineDir(c.frozen.id)
	if err := os.Mkdir(dir, 0o700); err != nil {
		return fmt.Errorf("machine directory: %w", err)
	}
	c.undo.add(func() error { return os.RemoveAll(dir) })
	// Its memory is the snapshot's afterwards: only what no parent needs is limited.
	group, at, close, err := m.cgroup(c.frozen.id, limits.Limits{PIDs: m.cfg.Groups.Default(m.limits.Default).PIDs})
	if err != nil {
		return err
	}
	defer close()
	c.undo.add(group.Remove)
	parent := newChild(c.frozen.id, dir, g)
	parent.group = group
	if err := c.connectParent(ctx, parent); err != nil {
		return err
	}
	cfg := vmm.BootConfig{Dir: dir, Shape: c.shape, Memory: c.ram, Cmdline: c.cmdline(), Cgroup: at, NIC: parent.nic()}
	for _, f := range []struct {
		path string
		into **os.File
	}{{c.image.Kernel.Path, &cfg.Kernel}, {c.image.Initramfs.Path, &cfg.Initramfs}, {c.image.Rootfs.Path, &cfg.Rootfs}} {
		file, err := os.Open(f.path)
		if err != nil {
			return fmt.Errorf("image %s: %w", c.image.Name, err)
		}
		defer func() { _ = file.Close() }() // read only; the monitor has its own
		*f.into = file
	}
	machine, err := m.engine.Boot(ctx, cfg)
	if err != nil {
		return err
	}
	parent.plugged()
	c.parent = parent
	c.parent.machine = machine
	m.newAgent(parent, false)
	if err := m.hit(ctx, pointSnapshotBooted); err != nil {
		return errors.Join(err, c.parent.dispose())
	}
	return nil
}

// prepareParent brings the guest to the point at which it is to be frozen, step by step.
func (c *creation) prepareParent(ctx context.Context, steps ...func(context.Context) error) error {
	begin := time.Now()
	limit := c.req.Timeout
	if limit == 0 {
		limit = c.m.limits.SnapshotTimeout
	}
	ctx, cancel := context.WithTimeoutCause(ctx, limit, &overdue{limit})
	defer cancel()
	ctx, end := context.WithCancelCause(ctx)
	defer end(nil)
	watched := make(chan struct{})
	go func() { // ends with ctx
		defer close(watched)
		select {
		case <-c.parent.machine.Done():
			end(vmm.ErrGone)
		case <-ctx.Done():
		}
	}()
	defer func() { <-watched }()
	defer end(nil)
	for _, step := range steps {
		if err := step(ctx); err != nil {
			return err
		}
	}
	c.bootWarm = time.Since(begin)
	if err := c.m.hit(ctx, pointSnapshotWarm); err != nil {
		return err
	}
	c.tell(Progress{Step: "exercise"})
	return c.exercise(ctx)
}

// overdue is the cause of a context that ended because the parent's time was up.
type overdue struct{ limit time.Duration }

func (o *overdue) Error() string { return fmt.Sprintf("not done within %v", o.limit) }

// parentFault says why a step with the parent failed: code is that of a failure of the step itself.
func (c *creation) parentFault(ctx context.Context, code Code, err error, doing string) error {
	cause := context.Cause(ctx)
	var late *overdue
	switch {
	case errors.As(cause, &late):
		return newError(code, nil, "give it more time with --timeout, or see what it waits for", "snapshot %s: %s: %v%s", c.req.Tag, doing, late, c.console())
	case errors.Is(cause, vmm.ErrGone) || cause == nil && endsNow(c.parent.machine, err):
		return newError(code, nil, "", "snapshot %s: %s: the parent ended: %s%s", c.req.Tag, doing, exitText(c.parent.machine), c.console())
	case cause != nil:
		return cause // the request was given up, or the daemon is stopping
	}
	var refused *agentproto.Error
	if errors.As(err, &refused) && refused.Code == agentproto.CodeNoInterpreter {
		return newError(CodeNoInterpreter, nil, "use an image with python3, or a warm-up that is a command", "snapshot %s: %s: image %s has no Python interpreter", c.req.Tag, doing, c.image.Name)
	}
	return newError(code, err, "", "snapshot %s: %s%s", c.req.Tag, doing, c.console())
}

// tailBytes is how much of an output or a console goes into an error.
const tailBytes = 2 << 10

// console is the end of the guest's console, for the end of a message.
func (c *creation) console() string {
	console, ok := c.parent.machine.(vmm.Console)
	if !ok {
		return ""
	}
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	text, err := console.Console(ctx)
	if err != nil {
		return ""
	}
	return section("guest console", text)
}

// section is the end of some output under a title, or nothing.
func section(title string, text []byte) string {
	if len(text) > tailBytes {
		text = text[len(text)-tailBytes:]
	}
	s := strings.TrimSpace(strings.ToValidUTF8(string(text), "�"))
	if s == "" {
		return ""
	}
	return "\n" + title + ":\n" + s
}

// awaitAgent waits for the agent's first answer: written before the guest runs, it is answered as soon as there is somebody to.
func (c *creation) awaitAgent(ctx context.Context) error {
	c.tell(Progress{Step: "ready", Detail: "waiting for the guest's agent"})
	pong, err := c.firstPong(ctx)
	if err != nil {
		return c.parentFault(ctx, CodeTimeout, err, "waiting for the guest's agent")
	}
	c.python = pong.Python
	// The parent is an individual too: its warm-up may need a clock, randomness and a host name of its own.
	if _, err := c.parent.agent.Identify(ctx, newIdentity(c.frozen.id, environ(nil, c.req.Env), false)); err != nil {
		return c.parentFault(ctx, CodeIdentityFailed, err, "giving the parent an identity")
	}
	return nil
}

// firstPong tries again when the connection breaks: a guest that boots may open and close its port more than once.
func (c *creation) firstPong(ctx context.Context) (agentproto.Pong, error) {
	for pause := probeFirst; ; pause = min(2*pause, probeLast) {
		pong, err := c.parent.agent.Ping(ctx)
		if err == nil || ctx.Err() != nil || !errors.Is(err, agentclient.ErrConnection) {
			return pong, err
		}
		if !pauseFor(ctx, pause) {
			return pong, err
		}
	}
}

// Backoff between two looks at what can't be awaited.
const (
	probeFirst = 50 * time.Millisecond
	probeLast  = time.Second
)

// pauseFor waits for d and says whether ctx lasted as long.
func pauseFor(ctx context.Context, d time.Duration) bool {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return true
	case <-ctx.Done():
		return false
	}
}

// awaitProbe runs the probe until it succeeds. Nothing in the guest could tell when that will be, so it is asked again and again.
func (c *creation) awaitProbe(ctx context.Context) error {
	if c.req.Probe == "" {
		return nil
	}
	c.tell(Progress{Step: "probe", Detail: c.req.Probe})
	last := ""
	for pause := probeFirst; ; pause = min(2*pause, probeLast) {
		res, err := c.parent.agent.Exec(ctx, shell(c.req.Probe))
		if err == nil && res.ExitCode == 0 {
			return nil
		}
		var refused *agentproto.Error
		if err != nil && (ctx.Err() != nil || errors.As(err, &refused)) {
			return c.parentFault(ctx, CodeWarmUpFailed, err, fmt.Sprintf("probe %q%s", c.req.Probe, last))
		}
		if err == nil {
			last = fmt.Sprintf(" exited with status %d", res.ExitCode) + section("output", append(res.Stdout, res.Stderr...))
		}
		if !pauseFor(ctx, pause) {
			return c.parentFault(ctx, CodeWarmUpFailed, ctx.Err(), fmt.Sprintf("probe %q%s", c.req.Probe, last))
		}
	}
}

func shell(command string) agentproto.ExecRequest {
	return agentproto.ExecRequest{Args: []string{"sh", "-c", command}, MaxOutput: 64 << 10}
}

// warmUp runs the warm-ups in order.
func (c *creation) warmUp(ctx context.Context) error {
	for i, w := range c.req.WarmUp {
		c.tell(Progress{Step: "warm_up", Detail: w.Code, Done: int64(i), Total: int64(len(c.req.WarmUp))})
		doing := fmt.Sprintf("warm-up %d (%s %.200q)", i+1, w.Kind, w.Code)
		failed, err := c.runWarmUp(ctx, w)
		if err != nil {
			return c.parentFault(ctx, CodeWarmUpFailed, err, doing)
		}
		if failed != "" {
			return newError(CodeWarmUpFailed, nil, "try it in a sandbox of the image first", "snapshot %s: %s %s%s", c.req.Tag, doing, failed, c.console())
		}
	}
	return nil
}

// runWarmUp returns how a warm-up failed, in words, with its output; "" when it didn't.
func (c *creation) runWarmUp(ctx context.Context, w WarmUp) (string, error) {
	if w.Kind == WarmUpEval {
		res, err := c.parent.agent.Eval(ctx, agentproto.EvalRequest{Code: w.Code, MaxOutput: 64 << 10})
		if err != nil || res.Error == "" {
			return "", err
		}
		return "raised an exception" + section("traceback", []byte(res.Error)) + section("stdout", res.Stdout) + section("stderr", res.Stderr), nil
	}
	res, err := c.parent.agent.Exec(ctx, shell(w.Code))
	if err != nil || res.ExitCode == 0 {
		return "", err
	}
	return fmt.Sprintf("exited with status %d%s", res.ExitCode, shortOf(res)) + section("stderr", res.Stderr) + section("stdout", res.Stdout), nil
}

// shortOf says what a command that failed was short of.
func shortOf(res agentproto.ExecResult) (what string) {
	if res.OOMKilled {
		what = ", killed by the guest's kernel for want of memory (--mem-mib)"
	}
	if res.DiskFull {
		what += ", and the guest's disk is full (it is three fifths of --mem-mib)"
	}
	return what
}

// exercise goes the ways of a child, identity included, so that their first time is in the snapshot.
func (c *creation) exercise(ctx context.Context) error {
	if err := exercise(ctx, c.parent, c.python); err != nil {
		return c.parentFault(ctx, CodeInternal, err, "exercising the guest")
	}
	if _, err := c.parent.agent.Identify(ctx, newIdentity(c.frozen.id, environ(nil, c.req.Env), false)); err != nil {
		return c.parentFault(ctx, CodeIdentityFailed, err, "exercising the guest's identity")
	}
	return nil
}
