package agent

import (
	"runtime/debug"

	"github.com/forkd/forkd/internal/guest/agentproto"
)

// quiesce makes the machine small and still before it is frozen. It is refused while something runs: that would be frozen with it.
func (a *Agent) quiesce(id uint32) {
	if a.execs.len() > 0 || !a.in.idle() || a.identBusy.Load() {
		a.refuse(a.session, id, agentproto.CodeBusy, "commands or evaluations are still running; a quiet machine is needed before a freeze")
		return
	}
	a.quiet.session, a.quiet.id = a.session, id
	// An interpreter that does not run yet is started now: a fork that finds it there has its first evaluation in milliseconds.
	if a.python == "" {
		a.quiesced("")
		return
	}
	a.in.queue = append(a.in.queue, job{kind: jobQuiesce, timeoutMS: uint32(a.limits.quiesce.Milliseconds()), limit: idleOutput})
	a.in.pump()
}

// quiesced goes on after the interpreter.
func (a *Agent) quiesced(problem string) {
	if problem != "" {
		a.refuse(a.quiet.session, a.quiet.id, agentproto.CodeInternal, "the machine did not become quiet: "+problem)
		return
	}
	a.short.quiet()
	a.files.prepare()
	if !a.opt.Sandboxed {
		debug.FreeOSMemory()
		a.warmHeap()
	}
	a.out.send(a.quiet.session, agentproto.KindQuiesceAck, a.quiet.id, nil)
}

// warmHeap gives the allocator a page for each size of object that an identity or an evaluation needs: the collection took them away, and
// to get one is the longest way through the allocator there is.
func (a *Agent) warmHeap() {
	for size := 8; size <= 1024; size += 8 {
		a.warm.bytes = make([]byte, size)
		a.warm.words = make([]string, size/16)
	}
	a.warm.bytes, a.warm.words = nil, nil
}

// tidy gives memory back after a big message: the collector does not run by itself, and what it would find rides in every snapshot.
func (a *Agent) tidy(bytes int) {
	if bytes >= 1<<20 && !a.opt.Sandboxed {
		debug.FreeOSMemory()
	}
}
