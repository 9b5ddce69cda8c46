package agent

import (
	_ "embed"
	"path/filepath"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/forkd/forkd/internal/guest/agentproto"
)

//go:embed driver.py
var driverSource string

// The driver is read from a descriptor: nothing is written to the root file system, and a list of processes stays readable.
const driverBoot = "exec(compile(open(5,'rb').read(),'<forkd-driver>','exec'),{'__name__':'forkd_driver'})"

const (
	idleOutput    = 64 << 10 // bytes kept of what background threads print between evaluations
	maxQueue      = 64       // evaluations that wait
	identityPipe  = 32 << 10 // an identity up to this size fits the request pipe of a busy interpreter
	signalOffset  = 61       // SIGRTMAX-3: "read an identity now", as in driver.py
	errInterpGone = "; its state is lost, the next evaluation starts a new interpreter"
)

// job is one request to the driver.
type job struct {
	kind      byte // of the driver's protocol
	session   uint64
	id        uint32
	body      []byte
	limit     int
	timeoutMS uint32
	until     int64 // of one that had to wait: when its time is up, waiting included; 0: never, or from its start on
}

// Kinds of jobs and answers.
const (
	jobEval     = 'E'
	jobIdentity = 'I'
	jobQuiesce  = 'Q'
	answerReady = 'R'
)

// interp is the resident Python interpreter. Only the loop touches it.
type interp struct {
	a       *Agent
	p       *proc // nil: it does not run
	ready   bool
	request int    // write end
	answer  int    // read end
	pending []byte // of the current request, not yet written
	rbuf    []byte // of the current answer
	outs    [2]capture
	queue   []job
	cur     *job
	ident   *job // an identity overtakes the queue, and a running evaluation

	deadline      int64 // of cur, or of the start; 0: none
	identSent     bool
	identOwed     bool     // the identity under way was acknowledged before
	inert         bool     // it can't do anything before the next request; see driver.py
	owed          []byte   // an identity it must take before anything else; nil: none
	env           []string // of the last identity it took
	identDeadline int64
	timedOut      bool   // cur was interrupted because its time was up
	interrupts    int    // how often cur was interrupted
	killed        string // why we killed it
	oom           uint32 // processes that had been killed for want of memory when cur began
}

func (in *interp) init(a *Agent) {
	in.a = a
	in.closed()
}

func (in *interp) closed() {
	in.p = nil
	in.ready = false
	in.request, in.answer = -1, -1
	in.outs = [2]capture{{fd: -1}, {fd: -1}}
	in.pending, in.rbuf = nil, in.rbuf[:0]
	in.killed = ""
	in.inert, in.owed = false, nil // the next one starts with the machine's identity and asks the kernel for its seeds
}

// idle says that nothing was asked of it.
func (in *interp) idle() bool { return in.cur == nil && in.ident == nil && len(in.queue) == 0 }

func (a *Agent) startEval(id uint32, msg []byte) {
	var req agentproto.EvalRequest
	if req.Decode(msg) != nil {
		a.refuse(a.session, id, agentproto.CodeBadRequest, "the evaluation request is malformed")
		return
	}
	if a.python == "" {
		if a.python = findPython(a.opt.Python); a.python == "" {
			a.refuse(a.session, id, agentproto.CodeNoInterpreter, "the image has no python3; build one with the package python3")
			return
		}
	}
	if len(a.in.queue) >= maxQueue {
		a.refuse(a.session, id, agentproto.CodeBusy, "64 evaluations wait already; they run one after the other")
		return
	}
	limit := outputLimit(req.MaxOutput)
	n := uint32(limit)
	body := make([]byte, 0, 4+len(req.Code))
	body = append(body, byte(n), byte(n>>8), byte(n>>16), byte(n>>24))
	body = append(body, req.Code...)
	j := job{kind: jobEval, session: a.session, id: id, body: body, limit: limit, timeoutMS: req.TimeoutMS}
	if req.TimeoutMS > 0 && (a.in.cur != nil || len(a.in.queue) > 0) {
		j.until = a.now() + int64(req.TimeoutMS)*1e6
	}
	a.in.queue = append(a.in.queue, j)
	a.in.pump()
}

// cancel drops an evaluation that waits, or interrupts it.
func (in *interp) cancel(session uint64, id uint32) {
	for i, j := range in.queue {
		if j.session == session && j.id == id {
			in.queue = append(in.queue[:i], in.queue[i+1:]...)
			in.a.refuse(session, id, agentproto.CodeCanceled, "the evaluation was canceled before it started")
			return
		}
	}
	if c := in.cur; c != nil && c.kind == jobEval && c.session == session && c.id == id && in.interrupts == 0 {
		in.interrupt()
	}
}

// interrupt is called twice before the interpreter is killed: os.system, for one, swallows the first.
func (in *interp) interrupt() {
	_ = unix.Kill(-in.p.pid, unix.SIGINT)
	in.interrupts++
	in.deadline = in.a.after(in.a.limits.grace / 2)
}

// kill ends the interpreter for a reason; died reports it when it is gone.
func (in *interp) kill(why string) {
	in.killed = why
	in.deadline = 0
	_ = unix.Kill(-in.p.pid, unix.SIGKILL)
}

// pump gives the interpreter its next request, and starts one when there is none.
func (in *interp) pump() {
	if in.cur != nil || len(in.pending) > 0 || len(in.queue) == 0 {
		return
	}
	if in.p == nil {
		if err := in.start(); err != nil {
			in.failAll(agentproto.CodeInternal, "can't start "+in.a.python+": "+reason(err))
			return
		}
	}
	if !in.ready || in.ident != nil || in.killed != "" { // an identity's answer, or the interpreter's end, comes first
		return
	}
	if in.owed != nil {
		body := in.owed
		in.owed = nil
		in.startIdentity(body, true) // what waits goes on when it is answered
		return
	}
	next := in.queue[0]
	in.queue = in.queue[1:]
	in.cur = &next
	in.timedOut, in.interrupts = false, 0
	in.oom = in.a.short.kills.Load()
	in.deadline = next.until
	if next.timeoutMS > 0 && next.until == 0 {
		in.deadline = in.a.now() + int64(next.timeoutMS)*1e6
	}
	for i := range in.outs {
		in.outs[i].limit = next.limit
	}
	in.send(next.kind, next.body)
}

// identified ends an identity. One that was owed and failed takes the interpreter with it: no code of its may run without it.
func (in *interp) identified(python bool, problem string) {
	in.ident = nil
	if !in.identOwed {
		in.a.identityReseeded(python, problem)
		return
	}
	in.identOwed = false
	if problem != "" {
		in.failAll(agentproto.CodeIdentity, problem)
		if in.p != nil {
			in.kill(problem)
		}
	}
}

// send writes a request; what the pipe does not take now is written when it can.
func (in *interp) send(kind byte, body []byte) {
	in.inert = false
	n := uint32(len(body) + 1)
	msg := make([]byte, 0, 5+len(body))
	msg = append(msg, byte(n), byte(n>>8), byte(n>>16), byte(n>>24), kind)
	in.pending = append(append(in.pending, msg...), body...)
	in.flush()
}

func (in *interp) flush() {
	for len(in.pending) > 0 {
		n, err := unix.Write(in.request, in.pending)
		if err == unix.EINTR {
			continue
		}
		if err != nil || n <= 0 {
			return // full, or it died: the loop hears of either
		}
		in.pending = in.pending[n:]
	}
	in.pending = nil
}

// identify reseeds the interpreter, even in the middle of an evaluation. An inert one is reseeded before its next step instead: to wake it
// up is half of what a fork's first answer costs, and it can't draw a number before that step.
func (in *interp) identify(req *agentproto.Identity) {
	body := identityBody(req, in.env, in.a.env)
	if in.inert {
		in.owed = body
		in.a.identityReseeded(true, "")
		return
	}
	in.owed = nil
	in.startIdentity(body, false)
}

// startIdentity hands an identity over, or does so as soon as the interpreter can take it. An owed one was acknowledged already.
func (in *interp) startIdentity(body []byte, owed bool) {
	in.ident = &job{kind: jobIdentity, body: body}
	in.identOwed = owed
	in.identSent = false
	in.identDeadline = in.a.after(in.a.limits.reseed)
	if in.ready && len(in.pending) == 0 {
		in.sendIdentity()
	}
}

// sendIdentity hands the identity over. To a busy interpreter it goes with a signal, whose handler reads it between two steps of the
// user's code; that needs it to fit the pipe.
func (in *interp) sendIdentity() {
	if in.cur != nil && len(in.ident.body) > identityPipe {
		return // after the evaluation, see finish
	}
	in.identSent = true
	in.env = in.a.env
	in.send(jobIdentity, in.ident.body)
	if in.cur != nil {
		_ = unix.Kill(in.p.pid, syscall.Signal(signalOffset))
	}
}

// identityBody tells the driver the seed, the names of the last identity's environment that are gone, and the new environment.
func identityBody(req *agentproto.Identity, old, env []string) []byte {
	n := uint32(len(req.Entropy))
	b := append(make([]byte, 0, 512), byte(n), byte(n>>8), byte(n>>16), byte(n>>24))
	b = append(b, req.Entropy...)
	for _, kv := range old {
		name, _, _ := strings.Cut(kv, "=")
		b = append(append(b, name...), 0)
	}
	for _, kv := range env {
		b = append(append(b, kv...), 0)
	}
	return b
}

// failAll answers everything that waits.
func (in *interp) failAll(code agentproto.Code, msg string) {
	queue := in.queue
	in.queue = nil
	for _, j := range queue {
		if j.kind == jobQuiesce {
			in.a.quiesced("") // without an interpreter there is nothing to make quiet
			continue
		}
		in.a.refuse(j.session, j.id, code, msg)
	}
}

// start runs the interpreter. It is ready when its first answer has come.
func (in *interp) start() error {
	a := in.a
	u, err := lookUser("", a.defaultUser())
	if err != nil {
		return err
	}
	theirs, ours, err := interpFiles()
	defer closeAll(theirs)
	if err != nil {
		closeAll(ours)
		return err
	}
	dir := u.home
	if isDir(dir) != nil {
		dir = "/"
	}
	attr := &syscall.ProcAttr{Dir: dir, Env: mergeEnv(baseEnv(u), a.env), Files: theirs, Sys: &syscall.SysProcAttr{}}
	p, err := a.procs.start(a.python, []string{filepath.Base(a.python), "-c", driverBoot}, attr)
	if err != nil {
		closeAll(ours)
		return err
	}
	in.p = p
	in.env = a.env
	in.outs = [2]capture{{fd: int(ours[0]), limit: idleOutput}, {fd: int(ours[1]), limit: idleOutput}}
	in.request, in.answer = int(ours[2]), int(ours[3])
	in.deadline = a.after(a.limits.start)
	return nil
}

// interpFiles makes the interpreter's descriptors 0 to 5 (nothing, stdout, stderr, requests, answers, driver) and our ends of 1 to 4.
func interpFiles() (theirs, ours []uintptr, err error) {
	null, err := open("/dev/null", unix.O_RDONLY)
	if err != nil {
		return nil, nil, err
	}
	theirs = append(theirs, uintptr(null))
	for i := range 4 {
		var p [2]int
		if err := unix.Pipe2(p[:], unix.O_CLOEXEC); err != nil {
			return theirs, ours, err
		}
		our := 0
		if i == 2 {
			our = 1 // we write the requests
		}
		theirs = append(theirs, uintptr(p[1-our]))
		ours = append(ours, uintptr(p[our]))
		if err := unix.SetNonblock(p[our], true); err != nil {
			return theirs, ours, err
		}
	}
	driver, err := unix.MemfdCreate("forkd-driver", unix.MFD_CLOEXEC)
	if err != nil {
		return theirs, ours, err
	}
	theirs = append(theirs, uintptr(driver))
	if n, err := unix.Pwrite(driver, []byte(driverSource), 0); err != nil || n < len(driverSource) {
		return theirs, ours, unix.ENOSPC
	}
	return theirs, ours, nil
}

// shutdown ends the interpreter and waits for it.
func (in *interp) shutdown() {
	if in.p == nil {
		return
	}
	in.p.killSession()
	<-in.p.done
	in.release()
}

func (in *interp) release() {
	in.p.closeFD()
	unix.Close(in.request)
	unix.Close(in.answer)
	for i := range in.outs {
		in.a.keepDraining(&in.outs[i])
	}
	in.closed()
}
