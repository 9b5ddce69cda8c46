// Package netns runs code in network namespaces: what a thread creates while it is in one (a socket, a process, a tap) stays there. It makes them,
// and taps in them, and knows nothing of what they are for: internal/hostnet makes networks of them.
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
	if err := enter(ns); err != nil {
		runtime.UnlockOSThread()
		return fmt.Errorf("enter network namespace: %w", err)
	}
	failed := fn()
	if enter(home) != nil {
		// The thread stays locked, so that it ends with its goroutine: nothing else may run on it.
		return failed
	}
	runtime.UnlockOSThread()
	return failed
}

// enter moves this thread. The file can't be closed meanwhile, and its number become another namespace's.
func enter(ns *os.File) error {
	conn, err := ns.SyscallConn()
	if err != nil {
		return err
	}
	var failed error
	if err := conn.Control(func(fd uintptr) { failed = unix.Setns(int(fd), unix.CLONE_NEWNET) }); err != nil {
		return err
	}
	return failed
}

// New makes a namespace, which lives as long as its file or a process in it, and runs setUp in it, which must not start goroutines that it expects
// to be there as well.
func New(setUp func() error) (*os.File, error) {
	type made struct {
		ns  *os.File
		err error
	}
	result := make(chan made)
	go onThread(func() {
		var m made
		if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
			m.err = fmt.Errorf("make a network namespace: %w", err)
		} else if m.ns, m.err = os.Open("/proc/thread-self/ns/net"); m.err == nil {
			m.err = setUp()
		}
		result <- m
	})
	m := <-result
	if m.err != nil {
		if m.ns != nil {
			_ = m.ns.Close() // nothing is written to it
		}
		return nil, m.err
	}
	return m.ns, nil
}

// onThread runs do on a thread that ends with this goroutine, which must end then.
func onThread(do func()) {
	runtime.LockOSThread()
	if unix.Gettid() != os.Getpid() {
		do() // the thread stays locked
		return
	}
	// The first thread never ends: it would keep the namespace, and be in it for all that ask where this process is. While it is held here the next
	// one is another.
	defer runtime.UnlockOSThread()
	done := make(chan struct{})
	go func() {
		defer close(done)
		onThread(do)
	}()
	<-done
}
