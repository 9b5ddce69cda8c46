// Package netns runs code in network namespaces: what a thread creates while it is in one (a socket, a process, a tap) stays there. It makes and
// names none; internal/hostnet does.
package netns

import (
	"fmt"
	"os"
	"runtime"

	"golang.org/x/sys/unix"
)

// Do runs fn on a thread that is in the namespace of ns. fn must not start goroutines that it expects to be there as well.
func Do(ns *os.File, fn func() error) error {
	runtime.LockOSThread()
	home, err := os.Open("/proc/thread-self/ns/net")
	if err != nil {
		runtime.UnlockOSThread()
		return fmt.Errorf("network namespace of this thread: %w", err)
	}
	defer home.Close()
	if err := unix.Setns(int(ns.Fd()), unix.CLONE_NEWNET); err != nil {
		runtime.UnlockOSThread()
		return fmt.Errorf("enter network namespace: %w", err)
	}
	failed := fn()
	if unix.Setns(int(home.Fd()), unix.CLONE_NEWNET) != nil {
		// The thread stays locked, so that it ends with its goroutine: nothing else may run on it.
		return failed
	}
	runtime.UnlockOSThread()
	return failed
}
