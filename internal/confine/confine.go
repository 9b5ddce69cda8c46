// Package confine locks a monitor in, so that one that was taken over by its guest has nothing but its guest.
//
// A Cell is a root directory with the monitor's program, its libraries and firmware, and nothing else, read-only. It is made once, in a mount
// namespace that a descriptor keeps; a process started in it has a copy of that namespace of its own, and pid, ipc, uts and network namespaces
// of its own, a user id that no other process has, no capabilities, no_new_privs, and a seccomp filter beside the monitor's. What it needs
// beside that it inherits as descriptors. Decision 0009 says why it is done this way. A cell can also start its program through Firecracker's jailer,
// which then makes the root and changes the user (decision 0012).
//
// This package knows neither monitors nor machines.
package confine

import (
	"errors"
	"fmt"
	"os"
	"runtime"

	"golang.org/x/sys/unix"
)

// Mode says whether monitors are confined.
type Mode string

// Modes.
const (
	Auto    Mode = "auto"    // when the daemon is root; what root can't confine it doesn't start
	Require Mode = "require" // else nothing is started
	Off     Mode = "off"
)

// Level is how far monitors are confined.
type Level string

// Levels.
const (
	Full Level = "full" // everything that this package does
	User Level = "user" // they run as the daemon's user, who is not root, and can do what that user can
	None Level = "none" // they run as root
)

// ErrNotRoot says that monitors can't be confined because the daemon is not root.
var ErrNotRoot = errors.New("only a daemon that is root can confine its machines: run it as root, or with --confine off")

// Decide returns how far monitors are confined by a process with that effective user id.
func Decide(m Mode, euid int) (Level, error) {
	switch {
	case m == Require && euid != 0:
		return "", ErrNotRoot
	case euid != 0:
		return User, nil
	case m == Off:
		return None, nil
	}
	return Full, nil
}

// OnThread runs do on a thread of its own, which ends with it: whatever do changed of the thread is gone then.
func OnThread(do func() error) error {
	done := make(chan error, 1)
	go func() {
		runtime.LockOSThread() // and never unlocked
		if unix.Gettid() != os.Getpid() {
			done <- do()
			return
		}
		// The first thread never ends, and what it is changed to is what others see of this process. While it is held here the next one is another.
		defer runtime.UnlockOSThread()
		done <- OnThread(do)
	}()
	return <-done
}

// step is one of several system calls, and what it is for.
type step struct {
	what string
	do   func() error
}

// run takes steps up to the first that fails.
func run(steps ...step) error {
	for _, s := range steps {
		if err := s.do(); err != nil {
			return fmt.Errorf("%s: %w", s.what, err)
		}
	}
	return nil
}
