package filelock

import (
	"errors"
	"os"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// TestSoon has a copy of a locked descriptor stay for a while, as a process that is being started has one.
func TestSoon(t *testing.T) {
	path := filepath.Join(t.TempDir(), "lock")
	open := func() *os.File {
		f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = f.Close() })
		return f
	}
	first, second := open(), open()
	if err := Soon(first); err != nil {
		t.Fatal(err)
	}
	if err := within(second, 20*time.Millisecond); !errors.Is(err, ErrHeld) {
		t.Errorf("a lock that another has: got %v, want %v", err, ErrHeld)
	}
	copied, err := unix.FcntlInt(first.Fd(), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	if err := first.Close(); err != nil {
		t.Fatal(err)
	}
	got := make(chan error, 1)
	go func() { got <- Soon(second) }()
	select {
	case err := <-got:
		t.Errorf("locked while a copy of its owner's descriptor was open: %v", err)
	case <-time.After(100 * time.Millisecond):
	}
	if err := unix.Close(copied); err != nil {
		t.Fatal(err)
	}
	if err := <-got; err != nil {
		t.Errorf("after the last copy was closed: %v", err)
	}
}
