package netns

import (
	"os"
	"runtime"
	"testing"

	"golang.org/x/sys/unix"
)

// onFirst is the thread on which TestMain called onThread, and ranOn the one on which that ran.
var onFirst, ranOn int

func TestMain(m *testing.M) {
	runtime.LockOSThread() // the main goroutine begins on the first thread
	onFirst = unix.Gettid()
	onThread(func() { ranOn = unix.Gettid() })
	runtime.UnlockOSThread()
	os.Exit(m.Run())
}

// TestFirstThread: the thread that the process is known by never gets into a namespace that it would not leave.
func TestFirstThread(t *testing.T) {
	if onFirst != os.Getpid() {
		t.Skip("the main goroutine was on another thread than the first")
	}
	if ranOn == 0 || ranOn == onFirst {
		t.Errorf("it ran on thread %d of process %d", ranOn, os.Getpid())
	}
}
