package agent

import (
	"strings"
	"time"

	"github.com/forkd/forkd/internal/guest/agentproto"
)

// identityState is the identity that is being applied. Only the loop touches it while the hooks do not run.
type identityState struct {
	session uint64
	id      uint32
	req     agentproto.Identity
	ack     agentproto.IdentityAck
}

// startIdentity makes a fork an individual: kernel first, then files, then the interpreter, then the user's hooks. It fails closed: the
// acknowledgement is sent only after every step has succeeded, and the host kills a fork without one.
func (a *Agent) startIdentity(id uint32, msg []byte) {
	st := &a.ident
	if !a.identBusy.CompareAndSwap(false, true) {
		a.refuse(a.session, id, agentproto.CodeBusy, "another identity is being applied; only one can be at a time")
		return
	}
	*st = identityState{session: a.session, id: id}
	if st.req.Decode(msg) != nil {
		a.failIdentity("the request is malformed")
		return
	}
	if problem := a.applyIdentity(&st.req); problem != "" {
		a.failIdentity(problem)
		return
	}
	if a.in.p != nil {
		a.in.identify(&st.req) // calls identityReseeded
		return
	}
	a.identityReseeded(false, "")
}

// applyIdentity does what needs no other process. It returns what went wrong.
func (a *Agent) applyIdentity(req *agentproto.Identity) string {
	if problem := checkIdentity(req); problem != "" {
		return problem
	}
	if err := a.opt.Machine.AddEntropy(req.Entropy); err != nil {
		return "can't reseed the kernel's random numbers: " + err.Error()
	}
	if req.UnixNano != 0 {
		if err := a.opt.Machine.SetClock(req.UnixNano); err != nil {
			return "can't set the clock: " + err.Error()
		}
	}
	if req.Hostname != "" {
		if err := a.opt.Machine.SetHostname(req.Hostname); err != nil {
			return "can't set the host name: " + err.Error()
		}
	}
	if a.files.on {
		if err := a.files.write(req); err != nil {
			return err.Error()
		}
	}
	if a.instance != req.InstanceID {
		a.short.reborn()
	}
	a.instance = req.InstanceID
	// A new slice: commands that run keep the one they were started with.
	a.env = append(append(make([]string, 0, len(req.Env)+1), "FORKD_INSTANCE_ID="+req.InstanceID), req.Env...)
	return ""
}

func checkIdentity(req *agentproto.Identity) string {
	switch {
	case len(req.Entropy) < agentproto.MinEntropy:
		return "an identity needs at least 32 bytes of entropy"
	case req.InstanceID == "" || len(req.InstanceID) > 128 || !onlyOf(req.InstanceID, "-_.:"):
		return "instance id \"" + req.InstanceID + "\" is not 1 to 128 letters, digits or -_.:"
	case len(req.Hostname) > 64 || !onlyOf(req.Hostname, "-."):
		return "host name \"" + req.Hostname + "\" is not at most 64 letters, digits, dots or hyphens"
	case req.MachineID != "" && (len(req.MachineID) != 32 || strings.Trim(req.MachineID, "0123456789abcdef") != ""):
		return "machine id \"" + req.MachineID + "\" is not 32 lower case hexadecimal digits"
	}
	if kv, bad := badEnv(req.Env); bad {
		return "environment entry \"" + kv + "\" is not of the form NAME=VALUE"
	}
	return ""
}

func onlyOf(s, more string) bool {
	for i := range len(s) {
		c := s[i]
		if (c < 'a' || c > 'z') && (c < 'A' || c > 'Z') && (c < '0' || c > '9') && strings.IndexByte(more, c) < 0 {
			return false
		}
	}
	return true
}

// identityReseeded goes on after the interpreter: with the hooks, off the loop, or with the acknowledgement.
func (a *Agent) identityReseeded(python bool, problem string) {
	st := &a.ident
	if problem != "" {
		a.failIdentity(problem)
		return
	}
	st.ack.Python = python
	if !st.req.RunHooks || !a.files.on {
		a.ackIdentity()
		return
	}
	hooks, err := findHooks(a.files.root)
	if err != nil {
		a.failIdentity("can't list the hooks: " + err.Error())
		return
	}
	if len(hooks) == 0 {
		a.ackIdentity()
		return
	}
	a.wg.Add(1)
	go a.runHooks(hooks, *st)
}

func (a *Agent) ackIdentity() {
	st := &a.ident
	st.ack.UnixNano = time.Now().UnixNano()
	a.scratch = st.ack.AppendTo(a.scratch[:0])
	a.identBusy.Store(false)
	a.out.send(st.session, agentproto.KindIdentityAck, st.id, a.scratch)
}

func (a *Agent) failIdentity(problem string) {
	st := &a.ident
	a.identBusy.Store(false)
	a.log("identity failed: " + problem)
	a.refuse(st.session, st.id, agentproto.CodeIdentity, "the identity was not applied, this fork must not be used: "+problem)
}
