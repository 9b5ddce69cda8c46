package agent

import (
	"errors"
	"strings"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/forkd/forkd/internal/guest/agentproto"
)

// command is an EXEC that is under way.
type command struct {
	a       *Agent
	session uint64
	id      uint32
	req     agentproto.ExecRequest
	env     []string // of the identity
	outs    [2]capture
	stdin   int    // write end, -1 when all was written
	oom     uint32 // processes that had been killed for want of memory when it was started

	mu       sync.Mutex
	p        *proc
	canceled bool
}

// execTable holds the commands that are under way.
type execTable struct {
	mu   sync.Mutex
	list map[*command]struct{}
}

func (t *execTable) add(c *command) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	if len(t.list) >= agentproto.MaxCommands {
		return false
	}
	if t.list == nil {
		t.list = make(map[*command]struct{})
	}
	t.list[c] = struct{}{}
	return true
}

func (t *execTable) remove(c *command) {
	t.mu.Lock()
	delete(t.list, c)
	t.mu.Unlock()
}

func (t *execTable) len() int {
	t.mu.Lock()
	defer t.mu.Unlock()
	return len(t.list)
}

// kill ends the command of a request, if it is one.
func (t *execTable) kill(session uint64, id uint32) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	for c := range t.list {
		if c.session == session && c.id == id {
			c.kill()
			return true
		}
	}
	return false
}

func (t *execTable) killAll() {
	t.mu.Lock()
	defer t.mu.Unlock()
	for c := range t.list {
		c.kill()
	}
}

func (c *command) kill() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.canceled = true
	if c.p != nil {
		c.p.killSession()
	}
}

func (a *Agent) startExec(id uint32, msg []byte) {
	c := &command{a: a, session: a.session, id: id, env: a.env, stdin: -1}
	if err := c.req.Decode(msg); err != nil {
		a.refuse(a.session, id, agentproto.CodeBadRequest, "the command request is malformed")
		return
	}
	if !a.execs.add(c) {
		a.refuse(a.session, id, agentproto.CodeBusy, "64 commands are running already; wait for one to end")
		return
	}
	a.wg.Add(1)
	go c.run()
}

// run starts the command, waits for its end and answers.
func (c *command) run() {
	defer c.a.wg.Done()
	kind, msg := c.execute()
	// Removed first: whoever got the answer may ask for a quiet agent at once.
	c.a.execs.remove(c)
	b := msg.AppendTo(nil)
	c.a.out.sendLong(c.session, kind, c.id, b)
	c.a.tidy(len(b) + len(c.req.Stdin))
	c.a.short.active() // what it left behind may go on writing
}

func (c *command) execute() (agentproto.Kind, encoder) {
	if e := c.start(); e != nil {
		return agentproto.KindError, e
	}
	defer c.p.closeFD()
	res := &agentproto.ExecResult{TimedOut: c.collect()}
	<-c.p.done
	for i := range c.outs {
		c.a.keepDraining(&c.outs[i])
		data, cut := c.outs[i].take(0)
		res.Truncated = res.Truncated || cut
		if i == 0 {
			res.Stdout = data
		} else {
			res.Stderr = data
		}
	}
	switch st := c.p.status; {
	case st.Signaled():
		res.ExitCode = 128 + int32(st.Signal())
		res.Signal = unix.SignalName(st.Signal())
	default:
		res.ExitCode = int32(st.ExitStatus())
	}
	if res.ExitCode != 0 {
		res.OOMKilled, res.DiskFull = c.a.short.blame(c.p.pid, c.oom)
	}
	return agentproto.KindExecResult, res
}

func execError(code agentproto.Code, msg string) *agentproto.Error {
	return &agentproto.Error{Code: code, Message: msg}
}

// start resolves user, directory and program and starts it.
func (c *command) start() *agentproto.Error {
	req := &c.req
	if len(req.Args) == 0 || req.Args[0] == "" {
		return execError(agentproto.CodeBadRequest, "no command was given")
	}
	for _, arg := range req.Args {
		if strings.IndexByte(arg, 0) >= 0 {
			return execError(agentproto.CodeBadRequest, "an argument of the command contains a zero byte")
		}
	}
	if kv, bad := badEnv(req.Env); bad {
		return execError(agentproto.CodeBadRequest, "environment entry \""+kv+"\" is not of the form NAME=VALUE")
	}
	name := req.User
	if name == "" {
		name = c.a.defaultUser()
	}
	u, err := lookUser("", name)
	if err != nil {
		return execError(agentproto.CodeBadUser, "there is no user \""+req.User+"\" in the guest; use a name or a uid of its /etc/passwd")
	}
	cwd := req.Cwd
	if cwd == "" {
		cwd = u.home
		if isDir(cwd) != nil {
			cwd = "/"
		}
	} else if err := isDir(cwd); err != nil {
		return execError(agentproto.CodeBadCwd, "can't use \""+cwd+"\" as the working directory: "+reason(err))
	}
	env := mergeEnv(baseEnv(u), c.env, secretEnv(), req.Env)
	path, err := lookPath(req.Args[0], cwd, getEnv(env, "PATH"))
	if err != nil {
		return execError(agentproto.CodeNotFound, "can't run \""+req.Args[0]+"\": "+notFound(err))
	}
	return c.spawn(path, cwd, env, u)
}

func (c *command) spawn(path, cwd string, env []string, u *user) *agentproto.Error {
	files, ours, err := c.pipes()
	defer closeAll(files)
	if err != nil {
		closeAll(ours)
		return execError(agentproto.CodeInternal, "can't make the pipes of the command: "+err.Error())
	}
	attr := &syscall.ProcAttr{Dir: cwd, Env: env, Files: files, Sys: &syscall.SysProcAttr{Credential: u.credential()}}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.canceled {
		closeAll(ours)
		return execError(agentproto.CodeCanceled, "the command was canceled before it started")
	}
	c.oom = c.a.short.kills.Load()
	p, err := c.a.procs.start(path, c.req.Args, attr)
	if err != nil {
		closeAll(ours)
		return spawnError(c.req.Args[0], err, u)
	}
	c.p = p
	limit := outputLimit(c.req.MaxOutput)
	c.outs = [2]capture{{fd: int(ours[0]), limit: limit}, {fd: int(ours[1]), limit: limit}}
	if len(ours) > 2 {
		c.stdin = int(ours[2])
	}
	return nil
}

// pipes makes the command's descriptors 0 to 2 and our ends: stdout, stderr and, when there is input, stdin.
func (c *command) pipes() (theirs, ours []uintptr, err error) {
	pair := func(ourEnd int) error {
		var p [2]int
		if err := unix.Pipe2(p[:], unix.O_CLOEXEC); err != nil {
			return err
		}
		theirs = append(theirs, uintptr(p[1-ourEnd]))
		ours = append(ours, uintptr(p[ourEnd]))
		return unix.SetNonblock(p[ourEnd], true)
	}
	if len(c.req.Stdin) == 0 {
		null, err := open("/dev/null", unix.O_RDONLY)
		if err != nil {
			return nil, nil, err
		}
		theirs = append(theirs, uintptr(null))
	} else if err := pair(1); err != nil {
		return theirs, ours, err
	}
	for range 2 {
		if err := pair(0); err != nil {
			return theirs, ours, err
		}
	}
	if len(ours) == 3 {
		ours = []uintptr{ours[1], ours[2], ours[0]}
	}
	return theirs, ours, nil
}

// collect moves input and output until the command has ended, and kills it when its time is up.
func (c *command) collect() (timedOut bool) {
	input := c.req.Stdin
	var deadline int64
	if c.req.TimeoutMS > 0 {
		deadline = c.a.now() + int64(c.req.TimeoutMS)*1e6
	}
	ended := false
	for !ended || c.outs[0].fd >= 0 || c.outs[1].fd >= 0 {
		fds := [4]unix.PollFd{
			{Fd: int32(c.outs[0].fd), Events: unix.POLLIN}, {Fd: int32(c.outs[1].fd), Events: unix.POLLIN},
			{Fd: int32(c.p.pidfd), Events: unix.POLLIN}, {Fd: int32(c.stdin), Events: unix.POLLOUT},
		}
		if ended {
			fds[2].Fd = -1
		}
		n, err := unix.Poll(fds[:], c.a.orLook(c.a.millisUntil(deadline)))
		if err != nil && err != unix.EINTR {
			c.kill()
			break
		}
		if n == 0 {
			c.a.short.active() // it lasts
		}
		for i := range c.outs {
			if err == nil && fds[i].Revents != 0 {
				c.outs[i].drain()
			}
		}
		if err == nil && fds[3].Revents != 0 {
			input = c.feed(input)
		}
		if err == nil && fds[2].Revents != 0 {
			ended = true
			deadline = c.a.after(c.a.limits.linger)
		}
		// Also when there is something to read: who writes without rest always has some.
		if deadline > 0 && c.a.now() >= deadline {
			if ended {
				break
			}
			timedOut = true
			deadline = 0
			c.kill()
		}
	}
	c.closeStdin()
	return timedOut
}

// feed writes input and returns the rest.
func (c *command) feed(input []byte) []byte {
	n, err := unix.Write(c.stdin, input)
	if n > 0 {
		input = input[n:]
	}
	if len(input) == 0 || (err != nil && err != unix.EAGAIN && err != unix.EINTR) {
		c.closeStdin()
	}
	return input
}

func (c *command) closeStdin() {
	if c.stdin >= 0 {
		unix.Close(c.stdin)
		c.stdin = -1
	}
}

// millisUntil is a timeout for poll; 0 means none.
func (a *Agent) millisUntil(deadline int64) int {
	if deadline == 0 {
		return -1
	}
	return int(max(0, (deadline-a.now()+1e6-1)/1e6))
}

// orLook is a timeout after which it is time to look at the disk, unless somebody does already.
func (a *Agent) orLook(timeout int) int {
	if a.short.following.Load() || a.short.disk == "" || timeout >= 0 && timeout < firstLook {
		return timeout
	}
	return firstLook
}

func closeAll(fds []uintptr) {
	for _, fd := range fds {
		unix.Close(int(fd))
	}
}

func notFound(err error) string {
	if errors.Is(err, unix.EACCES) {
		return "the file is not executable (permission denied)"
	}
	return "there is no such command in the guest"
}

func reason(err error) string {
	var errno syscall.Errno
	if errors.As(err, &errno) {
		return errno.Error()
	}
	return err.Error()
}

func spawnError(name string, err error, u *user) *agentproto.Error {
	switch {
	case errors.Is(err, unix.EPERM):
		return execError(agentproto.CodeBadUser, "the agent may not become user \""+u.name+"\"")
	case errors.Is(err, unix.ENOENT):
		return execError(agentproto.CodeNotFound, "can't run \""+name+"\": its interpreter or loader is not in the guest")
	case errors.Is(err, unix.ENOEXEC):
		return execError(agentproto.CodeNotFound, "can't run \""+name+"\": it is no program of this architecture and no script with a #! line")
	case errors.Is(err, unix.EACCES):
		return execError(agentproto.CodeNotFound, "can't run \""+name+"\" as \""+u.name+"\": permission denied for the program or the working directory")
	case errors.Is(err, unix.E2BIG):
		return execError(agentproto.CodeBadRequest, "arguments and environment of \""+name+"\" are too long")
	}
	return execError(agentproto.CodeInternal, "can't start \""+name+"\": "+reason(err))
}
