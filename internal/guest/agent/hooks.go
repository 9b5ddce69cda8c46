package agent

import (
	"slices"
	"strconv"
	"time"

	"github.com/forkd/forkd/internal/guest/agentproto"
)

const (
	hookDir    = "/etc/forkd/on-fork.d"
	hookOutput = 4 << 10 // bytes of a failed hook's output that are reported
)

// findHooks lists the executables of the hook directory in name order. A directory that does not exist has none.
func findHooks(root string) ([]string, error) {
	dir := root + hookDir
	if !exists(dir) {
		return nil, nil
	}
	names, err := readDir(dir)
	if err != nil {
		return nil, err
	}
	slices.Sort(names)
	var hooks []string
	for _, name := range names {
		if path := dir + "/" + name; executable(path) == nil {
			hooks = append(hooks, path)
		}
	}
	return hooks, nil
}

// runHooks runs the hooks and answers the identity. It works on a copy of the state, off the loop.
func (a *Agent) runHooks(hooks []string, st identityState) {
	defer a.wg.Done()
	deadline := a.after(a.limits.hooks)
	for _, hook := range hooks {
		if problem := a.runHook(hook, &st.req, deadline); problem != "" {
			a.log("identity failed: " + problem)
			a.identBusy.Store(false)
			a.refuse(st.session, st.id, agentproto.CodeIdentity, "the identity was not applied, this fork must not be used: "+problem)
			return
		}
		st.ack.Hooks++
	}
	st.ack.UnixNano = time.Now().UnixNano()
	a.identBusy.Store(false)
	a.reply(st.session, agentproto.KindIdentityAck, st.id, &st.ack)
}

// runHook returns what went wrong.
func (a *Agent) runHook(hook string, req *agentproto.Identity, deadline int64) string {
	left := (deadline - a.now()) / int64(time.Millisecond)
	if left <= 0 {
		return "the hooks took longer than " + a.limits.hooks.String() + " together; " + hook + " did not start"
	}
	env := append([]string{"FORKD_INSTANCE_ID=" + req.InstanceID, "FORKD_HOSTNAME=" + req.Hostname, "FORKD_MACHINE_ID=" + req.MachineID}, req.Env...)
	c := &command{a: a, stdin: -1, env: env, req: agentproto.ExecRequest{Args: []string{hook}, Cwd: "/", TimeoutMS: uint32(left), MaxOutput: hookOutput}}
	if !a.execs.add(c) {
		return "too many commands run to start hook " + hook
	}
	defer a.execs.remove(c)
	_, msg := c.execute()
	switch m := msg.(type) {
	case *agentproto.Error:
		return "hook " + hook + ": " + m.Message
	case *agentproto.ExecResult:
		out := string(m.Stderr)
		if out == "" {
			out = string(m.Stdout)
		}
		switch {
		case m.TimedOut:
			return "hook " + hook + " did not end within " + a.limits.hooks.String() + ": " + out
		case m.ExitCode != 0:
			return "hook " + hook + " exited with status " + strconv.Itoa(int(m.ExitCode)) + ": " + out
		}
	}
	return ""
}
