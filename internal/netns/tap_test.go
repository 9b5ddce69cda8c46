package netns

import (
	"errors"
	"os"
	"testing"

	"golang.org/x/sys/unix"
)

// TestTap makes a tap that is gone when it is closed, and one that is handed over: it can be opened again, once, by its name.
func TestTap(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("making a network namespace needs root")
	}
	if _, err := os.Stat(TunDevice); err != nil {
		t.Skipf("no taps here: %v", err)
	}
	var tap *os.File
	ns, err := New(func() (err error) {
		tap, err = OpenTap("t0")
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	defer ns.Close()
	there := func() (found bool) {
		_ = Do(ns, func() error {
			_, err := os.Stat("/proc/thread-self/net/dev_snmp6/t0")
			found = err == nil
			return nil
		})
		return found
	}
	again := func() (f *os.File, err error) {
		err = Do(ns, func() (err error) {
			f, err = OpenTap("t0")
			return err
		})
		return f, err
	}
	if _, err := again(); !errors.Is(err, unix.EBUSY) {
		t.Errorf("open for the second time: %v, want it refused", err)
	}
	if err := tap.Close(); err != nil || there() {
		t.Errorf("a tap that was not handed over is left when it is closed (%v)", err)
	}
	if tap, err = again(); err != nil {
		t.Fatal(err)
	}
	if err := HandOver(tap, 12345); err != nil || !there() {
		t.Fatalf("hand over: %v, there: %v", err, there())
	}
	if err := tap.Close(); !errors.Is(err, os.ErrClosed) {
		t.Errorf("after it was handed over: Close = %v, want it closed", err)
	}
	if tap, err = again(); err != nil {
		t.Fatalf("open what was handed over: %v", err)
	}
	if err := tap.Close(); err != nil || !there() {
		t.Errorf("a tap that was handed over goes when it is closed (%v)", err)
	}
}

// TestNewFails: nothing is left of a namespace in which something could not be set up.
func TestNewFails(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("making a network namespace needs root")
	}
	want := errors.New("of setUp")
	if ns, err := New(func() error { return want }); ns != nil || !errors.Is(err, want) {
		t.Errorf("New = %v, %v, want the error of setUp", ns, err)
	}
}
