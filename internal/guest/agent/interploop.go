package agent

import (
	"strconv"

	"golang.org/x/sys/unix"

	"github.com/forkd/forkd/internal/guest/agentproto"
)

// prepare says what the interpreter waits for, and for how many milliseconds.
func (in *interp) prepare(p *[8]unix.PollFd) (timeout int) {
	p[pollExit] = unix.PollFd{Fd: int32(in.p.pidfd), Events: unix.POLLIN}
	p[pollReply] = unix.PollFd{Fd: int32(in.answer), Events: unix.POLLIN}
	p[pollStdout] = unix.PollFd{Fd: int32(in.outs[0].fd), Events: unix.POLLIN}
	p[pollStderr] = unix.PollFd{Fd: int32(in.outs[1].fd), Events: unix.POLLIN}
	if len(in.pending) > 0 {
		p[pollRequest] = unix.PollFd{Fd: int32(in.request), Events: unix.POLLOUT}
	}
	next := in.deadline
	if in.ident != nil && (next == 0 || in.identDeadline < next) {
		next = in.identDeadline
	}
	for i := range in.queue {
		if until := in.queue[i].until; until > 0 && (next == 0 || until < next) {
			next = until
		}
	}
	return in.a.millisUntil(next)
}

// service does what prepare waited for.
func (in *interp) service(p *[8]unix.PollFd) {
	if p[pollRequest].Revents != 0 {
		in.flush()
		if len(in.pending) == 0 && in.ident != nil && in.ready && !in.identSent {
			in.sendIdentity()
		}
	}
	if p[pollReply].Revents != 0 {
		if _, ended := in.read(); ended {
			// It dies, as a rule. If it does not it can't answer any more.
			unix.Close(in.answer)
			in.answer = -1
			in.deadline = in.a.after(in.a.limits.grace)
		}
	}
	if in.p == nil {
		return
	}
	if p[pollStdout].Revents != 0 {
		in.outs[0].drain()
	}
	if p[pollStderr].Revents != 0 {
		in.outs[1].drain()
	}
	if p[pollExit].Revents != 0 {
		in.died()
		return
	}
	in.expire()
}

// expire acts on deadlines that have passed.
func (in *interp) expire() {
	if in.deadline == 0 && in.ident == nil && len(in.queue) == 0 {
		return
	}
	now := in.a.now()
	in.giveUpWaiting(now)
	if in.ident != nil && now >= in.identDeadline {
		in.identified(false, "the Python interpreter did not take the new seed within "+in.a.limits.reseed.String()+"; it is in a call that can't be interrupted")
	}
	if in.deadline == 0 || now < in.deadline {
		return
	}
	switch {
	case in.answer < 0:
		in.kill("the Python interpreter closed its channel to the agent")
	case !in.ready:
		in.kill("the Python interpreter did not start within " + in.a.limits.start.String())
	case in.cur == nil:
		in.deadline = 0
	case in.cur.kind != jobEval:
		in.kill("the Python interpreter did not become quiet")
	case in.interrupts == 1:
		in.interrupt()
	case in.interrupts > 1:
		in.kill("the code did not stop when it was interrupted, so the interpreter was killed")
	default:
		in.timedOut = true
		in.interrupt()
	}
}

// giveUpWaiting answers evaluations whose time was up before their turn came.
func (in *interp) giveUpWaiting(now int64) {
	kept := in.queue[:0]
	for _, j := range in.queue {
		if j.until == 0 || now < j.until {
			kept = append(kept, j)
			continue
		}
		in.a.refuse(j.session, j.id, agentproto.CodeBusy, "another evaluation ran for all of the time that this one had")
	}
	in.queue = kept
}

// read takes answers in. It says how many bytes came, and whether there will be no more.
func (in *interp) read() (n int, ended bool) {
	if cap(in.rbuf)-len(in.rbuf) < 512 {
		in.rbuf = append(make([]byte, 0, max(4096, 2*cap(in.rbuf))), in.rbuf...)
	}
	n, err := unix.Read(in.answer, in.rbuf[len(in.rbuf):cap(in.rbuf)])
	if err != nil || n <= 0 {
		return 0, err == nil
	}
	in.rbuf = in.rbuf[:len(in.rbuf)+n]
	for in.p != nil && len(in.rbuf) >= 4 {
		b := in.rbuf
		size := int(b[0]) | int(b[1])<<8 | int(b[2])<<16 | int(b[3])<<24
		if size < 2 || size > agentproto.LimitMaxOutput+64 {
			in.kill("the Python interpreter sent a malformed answer")
			in.rbuf = in.rbuf[:0]
			break
		}
		if len(b) < 4+size {
			break
		}
		in.answered(b[4], b[5], b[6:4+size])
		in.rbuf = in.rbuf[:copy(in.rbuf, b[4+size:])]
	}
	if len(in.rbuf) == 0 && cap(in.rbuf) > 64<<10 {
		in.rbuf = nil // a big answer must not stay in every snapshot
	}
	return n, false
}

const (
	answerFailed = 1
	answerCut    = 2
	answerInert  = 4 // of a quiesce
)

// answered handles one answer of the driver.
func (in *interp) answered(kind, flags byte, body []byte) {
	switch {
	case kind == answerReady && !in.ready:
		in.ready = true
		in.deadline = 0
		if in.ident != nil {
			in.sendIdentity()
		}
	case kind == jobIdentity && in.ident != nil && in.identSent:
		problem := ""
		if flags&answerFailed != 0 {
			problem = "the Python interpreter can't be reseeded: " + string(body)
		}
		if in.cur == nil {
			in.forgetOutput()
		}
		in.identified(true, problem)
	case in.cur != nil && kind == in.cur.kind && kind == jobEval:
		in.finish(flags, body)
	case in.cur != nil && kind == in.cur.kind && kind == jobQuiesce:
		in.cur = nil
		in.deadline = 0
		in.inert = flags&answerInert != 0
		in.forgetOutput()
		problem := ""
		if flags&answerFailed != 0 {
			problem = string(body)
		}
		in.a.quiesced(problem)
	default:
		in.kill("the Python interpreter sent an answer that nobody asked for")
		return
	}
	in.pump()
}

// finish answers the evaluation that ran.
func (in *interp) finish(flags byte, body []byte) {
	j := in.cur
	in.cur = nil
	in.deadline = 0
	res := agentproto.EvalResult{TimedOut: in.timedOut, Truncated: flags&answerCut != 0}
	if flags&answerFailed != 0 {
		res.Error = string(body)
		res.OOMKilled, res.DiskFull = in.a.short.blame(in.p.pid, in.oom)
	} else {
		res.Result = string(body)
	}
	in.takeOutput(&res)
	in.replyEval(j, &res)
	in.a.short.active()
	if in.ident != nil && !in.identSent {
		in.sendIdentity()
	}
}

func (in *interp) replyEval(j *job, res *agentproto.EvalResult) {
	in.a.scratch = res.AppendTo(in.a.scratch[:0])
	in.a.out.sendLong(j.session, agentproto.KindEvalResult, j.id, in.a.scratch)
	if n := cap(in.a.scratch); n > 64<<10 {
		in.a.scratch = nil
		in.a.tidy(n)
	}
}

// takeOutput moves what was printed into res. All of it is in the pipes by now: the driver flushed before it answered.
func (in *interp) takeOutput(res *agentproto.EvalResult) {
	for i := range in.outs {
		in.outs[i].drain()
	}
	var cut [2]bool
	res.Stdout, cut[0] = in.outs[0].take(idleOutput)
	res.Stderr, cut[1] = in.outs[1].take(idleOutput)
	res.Truncated = res.Truncated || cut[0] || cut[1]
}

// forgetOutput drops what background threads printed: it belongs to the machine this one was forked from.
func (in *interp) forgetOutput() {
	for i := range in.outs {
		in.outs[i].drain()
		in.outs[i].take(idleOutput)
	}
}

// died handles the end of the interpreter.
func (in *interp) died() {
	<-in.p.done
	if in.answer >= 0 && in.killed == "" {
		in.lastWords()
		if in.p == nil {
			return
		}
	}
	why := in.killed
	var res agentproto.EvalResult
	res.OOMKilled, res.DiskFull = in.a.short.blame(in.p.pid, in.oom)
	switch {
	case why == "" && res.OOMKilled && in.p.status.Signaled():
		why = "the Python interpreter was killed by the guest's kernel, which had no memory left"
	case why == "":
		why = "the Python interpreter " + ending(in.p.status)
	}
	in.takeOutput(&res)
	wasReady := in.ready
	cur := in.cur
	in.cur = nil
	ident := in.ident
	in.deadline = 0
	in.release()
	in.a.log(why)
	if cur != nil && cur.kind == jobEval {
		res.Error = why + errInterpGone
		res.TimedOut = in.timedOut
		in.replyEval(cur, &res)
	} else if cur != nil {
		in.a.quiesced(why)
	}
	if ident != nil {
		in.identified(false, why)
	}
	if !wasReady {
		in.failAll(agentproto.CodeInternal, why+" while it started: "+string(res.Stderr))
	}
	in.pump()
}

// lastWords reads an answer that was sent just before the end.
func (in *interp) lastWords() {
	for in.p != nil {
		if n, _ := in.read(); n == 0 {
			return
		}
	}
}

func ending(st unix.WaitStatus) string {
	if st.Signaled() {
		return "was ended by " + unix.SignalName(st.Signal())
	}
	return "exited with status " + strconv.Itoa(st.ExitStatus())
}
