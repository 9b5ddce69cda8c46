package e2e

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/forkd/forkd/client"
)

// Generous limits: they end what hangs, on a machine that is busy with other things.
var (
	startLimit = patient(2 * time.Minute)
	stopLimit  = patient(2 * time.Minute)
	callLimit  = patient(5 * time.Minute) // of a request with guests in it
)

// process is a daemon: its directories, and its process while it runs.
type process struct {
	lab       *lab
	name      string
	run, data string
	logPath   string
	suspended sync.Map // ids of sandboxes that were suspended once: they may have a state on disk

	netns string // file of the network namespace that it runs in; "": ours

	client *client.Client
	cmd    *exec.Cmd
	exited chan struct{} // closed when the process has ended
}

func (p *process) socket() string { return filepath.Join(p.run, "forkd.sock") }

// where are the flags that tell a command where this daemon's things are.
func (p *process) where() []string {
	return []string{"--data", p.data, "--run", p.run, "--cache", cacheDir()}
}

// start runs the daemon and returns when it says that it is ready.
func (p *process) start(args, env []string) error {
	dir := filepath.Dir(p.run)
	notify := filepath.Join(dir, "notify")
	ready, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Name: notify, Net: "unixgram"})
	if err != nil {
		return err
	}
	defer os.Remove(notify)
	defer ready.Close()
	log, err := os.OpenFile(p.logPath, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	defer log.Close()
	cmd := exec.Command(p.lab.bin, slices.Concat([]string{"serve", "--listen", ""}, p.where(), underTest().flags(), args)...)
	if p.netns != "" {
		cmd = exec.Command("nsenter", append([]string{"--net=" + p.netns, "--"}, cmd.Args...)...)
	}
	cmd.Dir = dir
	cmd.Env = append(append(os.Environ(), "NOTIFY_SOCKET="+notify, "FORKD_URL="), env...)
	cmd.Stdout, cmd.Stderr = log, log
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true} // an interrupt at the terminal is for the tests to handle
	if err := cmd.Start(); err != nil {
		return err
	}
	p.cmd, p.exited = cmd, make(chan struct{})
	go func(exited chan struct{}) {
		_ = cmd.Wait()
		close(exited)
		ready.Close() // wakes the reader below when the daemon never got ready
	}(p.exited)
	if p.client, err = client.New(client.Config{URL: p.socket(), Token: "none"}); err != nil {
		return errors.Join(err, p.kill())
	}
	p.lab.add(p)
	message := make([]byte, 64)
	_ = ready.SetReadDeadline(time.Now().Add(startLimit))
	n, err := ready.Read(message)
	if err != nil || string(message[:n]) != "READY=1" {
		return errors.Join(fmt.Errorf("the daemon %s did not get ready: %v\n%s", p.name, err, p.logSince(0)), p.kill())
	}
	return nil
}

func (l *lab) add(p *process) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.running = append(l.running, p)
}

func (l *lab) drop(p *process) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for i, other := range l.running {
		if other == p {
			l.running = append(l.running[:i], l.running[i+1:]...)
			return
		}
	}
}

// runs says whether the daemon's process lives.
func (p *process) runs() bool {
	if p.cmd == nil {
		return false
	}
	select {
	case <-p.exited:
		return false
	default:
		return true
	}
}

// kill is kill -9.
func (p *process) kill() error {
	_ = p.cmd.Process.Kill()
	return p.awaitExit(stopLimit)
}

func (p *process) awaitExit(limit time.Duration) error {
	select {
	case <-p.exited:
		p.lab.drop(p)
		p.client.Close()
		return nil
	case <-time.After(limit):
		return fmt.Errorf("the daemon %s did not end within %v", p.name, limit)
	}
}

// stop asks the daemon to end, as a service manager does, and it must end well.
func (p *process) stop() error {
	if !p.runs() {
		return nil
	}
	p.ask()
	return p.awaitStop()
}

// ask tells the daemon to end. A second time it would end at once.
func (p *process) ask() { _ = p.cmd.Process.Signal(syscall.SIGTERM) }

// awaitStop waits for a daemon that was asked to end.
func (p *process) awaitStop() error {
	if err := p.awaitExit(stopLimit); err != nil {
		return errors.Join(err, p.kill())
	}
	if state := p.cmd.ProcessState; !state.Success() {
		return fmt.Errorf("the daemon %s ended with %s", p.name, state)
	}
	return nil
}

// end stops the daemon, ends its sandboxes with `forkd cleanup --all`, and tells what is there afterwards that should not be.
func (p *process) end() (problems []string) {
	if err := p.stop(); err != nil {
		problems = append(problems, err.Error())
	}
	ctx, cancel := context.WithTimeout(context.Background(), stopLimit)
	defer cancel()
	cmd := exec.CommandContext(ctx, p.lab.bin, append([]string{"cleanup", "--all"}, p.where()...)...)
	cmd.Env = append(os.Environ(), "FORKD_FAILPOINT=")
	if out, err := cmd.CombinedOutput(); err != nil {
		problems = append(problems, fmt.Sprintf("forkd cleanup --all of the daemon %s: %v: %s", p.name, err, out))
	}
	problems = append(problems, processesIn(filepath.Dir(p.run))...)
	endProcesses(filepath.Dir(p.run))
	return append(problems, p.filesLeft()...)
}

// filesLeft lists what a daemon that ended and its cleanup should not have left in its directories.
func (p *process) filesLeft() (left []string) {
	below := []string{"vm", "console", "probe"} // these stay, empty
	for _, sub := range append([]string{"."}, below...) {
		dir := filepath.Join(p.run, sub)
		for _, name := range entries(dir) {
			if sub != "." || !slices.Contains(below, name) {
				left = append(left, filepath.Join(dir, name))
			}
		}
	}
	return append(left, p.halfMade()...)
}

// halfMade lists what is being written or removed in the daemon's stores.
func (p *process) halfMade() (found []string) {
	for _, store := range []string{"images", "snapshots"} {
		for _, name := range entries(filepath.Join(p.data, store)) {
			if strings.HasPrefix(name, ".") {
				found = append(found, filepath.Join(store, name))
			}
		}
	}
	return found
}

// logSize is where the daemon's log ends now.
func (p *process) logSize() int64 {
	info, err := os.Stat(p.logPath)
	if err != nil {
		return 0
	}
	return info.Size()
}

// logLimit is how much of a log is worth printing.
const logLimit = 16 << 10

// wentWell are lines of the log that say nothing.
var wentWell = regexp.MustCompile(`(?m)^.*level=INFO msg=request .* status=2.*\n`)

// logSince is what the daemon logged since its log had that size: the newest of it, without requests that went well.
func (p *process) logSince(from int64) string {
	data, err := os.ReadFile(p.logPath)
	if err != nil {
		return err.Error()
	}
	data = wentWell.ReplaceAll(data[min(from, int64(len(data))):], nil)
	return "log of the daemon " + p.name + ":\n" + string(data[max(0, len(data)-logLimit):])
}
