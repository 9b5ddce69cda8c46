package netns

import (
	"os"
	"runtime"
	"testing"

	"golang.org/x/sys/unix"
)

// askedByFirst is the thread on which onThread ran what a goroutine on the first thread asked for.
var askedByFirst int

func init() { runtime.LockOSThread() } // the main goroutine is on the first thread, up to TestMain

func TestMain(m *testing.M) {
	onThread(func() { askedByFirst = unix.Gettid() })
	runtime.UnlockOSThread()
	os.Exit(m.Run())
}

// TestFirstThread: the thread that the process is known by never gets into a namespace that it would not leave.
func TestFirstThread(t *testing.T) {
	if askedByFirst == 0 || askedByFirst == os.Getpid() {
		t.Errorf("it ran on thread %d of process %d", askedByFirst, os.Getpid())
	}
}
