package agent

import (
	"errors"
	"os"
	"os/signal"
	"runtime"
	"runtime/debug"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

const (
	rootWait = 30 * time.Second // for the root block device; under TCG with many guests a boot is slow
	portWait = 30 * time.Second // for the control channel
	heapMax  = 48 << 20         // bytes of Go heap before the collector runs at all
)

// quietRuntime keeps Go's own background work out of forks: no preemption signals, and stacks that grew stay grown. The runtime reads
// these only from the environment it starts with.
const quietRuntime = "asyncpreemptoff=1,gcshrinkstackoff=1"

// runInit is the life of process 1. It does not return unless the machine can't be used; it then ends the machine.
func runInit() int {
	if os.Getenv("GODEBUG") != quietRuntime {
		restartQuiet()
	}
	os.Clearenv()
	// No collector but at the limit: a cycle in an idle fork would make pages private and cost milliseconds under TCG.
	debug.SetGCPercent(-1)
	debug.SetMemoryLimit(heapMax)
	// One at a time: the machine has one processor as a rule, and looking for work to steal is code that runs for the first time.
	runtime.GOMAXPROCS(1)
	// The kernel does not kill process 1 for these, but Go's runtime would exit for them. A channel that nobody reads drops them.
	signal.Notify(make(chan os.Signal, 1), unix.SIGTERM, unix.SIGINT, unix.SIGHUP, unix.SIGQUIT, unix.SIGPIPE, unix.SIGUSR1, unix.SIGUSR2)
	t, err := boot()
	if err == nil {
		err = serveInit(t)
	}
	console("the machine can't be used: " + err.Error())
	unix.Sync()
	_ = unix.Reboot(unix.LINUX_REBOOT_CMD_RESTART)
	return 1
}

// restartQuiet executes the agent again with its runtime settings. If that fails the agent only is a little less quiet.
func restartQuiet() {
	path := os.Args[0]
	if !strings.HasPrefix(path, "/") {
		path = "/init"
	}
	_ = syscall.Exec(path, []string{path}, []string{"GODEBUG=" + quietRuntime})
}

// boot brings the machine up and returns its control channel.
func boot() (transport, error) {
	if err := mountKernelFS(); err != nil {
		return nil, err
	}
	words := cmdline()
	ev, err := newUevents()
	if err != nil {
		return nil, err
	}
	defer ev.close()
	if err := loadModules(); err != nil {
		return nil, err
	}
	root := words.value("forkd.root", "/dev/vda")
	if err := ev.waitFor(rootWait, func() bool { return exists(root) }); err != nil {
		return nil, errors.New("root device " + root + " did not appear; is it attached, and does the initramfs carry its driver?")
	}
	if err := mountRoot(root, words.value("forkd.rootfstype", "erofs")); err != nil {
		return nil, err
	}
	if err := switchRoot(); err != nil {
		return nil, err
	}
	for _, problem := range finishRoot() {
		console(problem)
	}
	if err := setupNetwork(words.value("forkd.net", "")); err != nil {
		return nil, errors.New("can't set up the network: " + err.Error())
	}
	return findChannel(ev)
}

func serveInit(t transport) error {
	a, err := New(Options{Log: console, init: true})
	if err != nil {
		return err
	}
	if err := a.short.start(openKmsg(), "/"); err != nil {
		return err
	}
	console("ready, version " + Version)
	return a.loop(t)
}

// kernelWords are the words of the kernel's command line.
type kernelWords []string

func cmdline() kernelWords {
	b, err := readFile("/proc/cmdline")
	if err != nil {
		return nil
	}
	return strings.Fields(string(b))
}

// value returns the last value of a word, or def.
func (w kernelWords) value(name, def string) string {
	for _, word := range w {
		if k, v, ok := strings.Cut(word, "="); ok && k == name && v != "" {
			def = v
		}
	}
	return def
}

// console writes a message for people to the machine's console, or to the kernel's log when there is none yet.
func console(msg string) {
	line := []byte("forkd-agent: " + msg + "\n")
	for _, path := range []string{"/dev/console", "/dev/kmsg"} {
		fd, err := open(path, unix.O_WRONLY|unix.O_NOCTTY|unix.O_NONBLOCK)
		if err != nil {
			continue
		}
		n, err := unix.Write(fd, line)
		unix.Close(fd)
		if err == nil && n > 0 {
			return
		}
	}
}
