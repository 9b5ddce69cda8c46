package netns

import (
	"errors"
	"os"
	"runtime"
	"testing"

	"golang.org/x/sys/unix"
)

// TestDo runs something in another namespace and looks which one a thread is in meanwhile and afterwards.
func TestDo(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("making a network namespace needs root")
	}
	made := make(chan *os.File, 1)
	go func() {
		runtime.LockOSThread() // the thread ends with this goroutine
		if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
			t.Error(err)
			made <- nil
			return
		}
		f, err := os.Open("/proc/thread-self/ns/net")
		if err != nil {
			t.Error(err)
		}
		made <- f
	}()
	ns := <-made
	if ns == nil {
		t.FailNow()
	}
	defer ns.Close()
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	home := inode(t)
	want := errors.New("of fn")
	var there uint64
	if err := Do(ns, func() error { there = inode(t); return want }); err != want {
		t.Errorf("Do = %v, want the error of fn", err)
	}
	var st unix.Stat_t
	if err := unix.Fstat(int(ns.Fd()), &st); err != nil {
		t.Fatal(err)
	}
	if there != st.Ino {
		t.Errorf("fn ran in namespace %d, want %d", there, st.Ino)
	}
	if now := inode(t); now != home {
		t.Errorf("afterwards the thread is in namespace %d, want %d", now, home)
	}
}

func inode(t *testing.T) uint64 {
	t.Helper()
	var st unix.Stat_t
	if err := unix.Stat("/proc/thread-self/ns/net", &st); err != nil {
		t.Fatal(err)
	}
	return st.Ino
}
