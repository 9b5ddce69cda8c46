package firecracker

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/forkd/forkd/internal/confine"
	"github.com/forkd/forkd/internal/confine/jailertest"
	"github.com/forkd/forkd/internal/memory"
	"github.com/forkd/forkd/internal/vmm"
	"github.com/forkd/forkd/internal/vmm/probeguest"
)

// newJailer returns the path of a fake jailer.
func newJailer(t *testing.T, version, fault string) string {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(t.TempDir(), jailertest.Name(version, fault))
	if err := os.Symlink(self, path); err != nil {
		t.Fatal(err)
	}
	return path
}

// newJailedHost is an engine whose fake Firecrackers are started through a fake jailer.
func newJailedHost(t *testing.T, orders fakeOrders, fault string) *fakeHost {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("only root can use a jailer")
	}
	h := newFakeHost(t, orders, func(o *Options) { o.Jailer, o.Users = newJailer(t, "1.16.1", fault), testUsers() })
	h.shown = []string{filepath.Join(filepath.Dir(h.opt.Binary), fakeOrdersFile)}
	if err := errors.Join(os.Chmod(h.shown[0], 0o644), os.Chmod(filepath.Dir(h.shown[0]), 0o755)); err != nil {
		t.Fatal(err)
	}
	if _, err := h.Probe(t.Context()); errors.Is(err, unix.EPERM) {
		t.Skipf("this root may not make namespaces: %v", err)
	} else if err != nil {
		t.Fatal(err)
	}
	return h
}

// TestJailed: all that is done to a machine is done to one that was started through the jailer.
func TestJailed(t *testing.T) {
	h := newJailedHost(t, fakeOrders{}, jailertest.Works)
	mounts := mountsOf(t)
	h.freeze(t)
	for range 3 {
		dir, before := t.TempDir(), processes(t)
		m, err := h.child(t.Context(), dir)
		if err != nil {
			t.Fatal(err)
		}
		if err := life(t.Context(), m, tempFile(t)); err != nil {
			t.Error(err)
		}
		if got := m.Process().Confinement; got != string(confine.Full) {
			t.Errorf("confinement %q, want %q", got, confine.Full)
		}
		if err := m.Kill(); err != nil {
			t.Error(err)
		}
		checkNothingLeft(t, dir, before)
	}
	if got := mountsOf(t); got != mounts {
		t.Errorf("mounts before:\n%s\nand after:\n%s", mounts, got)
	}
	if about, err := h.Describe(t.Context()); err != nil || !strings.Contains(about, "started through its jailer") {
		t.Errorf("Describe() = %q, %v, want it to tell of the jailer", about, err)
	}
}

func mountsOf(t *testing.T) string {
	t.Helper()
	b, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

// TestJailerFaults: the steps before Firecracker's first call are the jailer's. Nothing is left when they fail, and the error names step and cause.
func TestJailerFaults(t *testing.T) {
	causes := map[string]string{jailertest.Stall: "deadline exceeded", jailertest.Garbage: "garbage", jailertest.Refuse: "ordered to refuse",
		jailertest.NoDevice: "create /dev/kvm", jailertest.Keep: "receive what the monitor inherits"}
	for fault, cause := range causes {
		for _, who := range []string{"parent", "child"} {
			t.Run(who+" "+fault, func(t *testing.T) {
				h := newJailedHost(t, fakeOrders{}, fault)
				start := h.boot
				if who == "child" {
					h.freeze(t)
					start = h.child
				}
				dir, before, mounts := t.TempDir(), processes(t), mountsOf(t)
				ctx, cancel := context.WithTimeout(t.Context(), 700*time.Millisecond)
				defer cancel()
				_, err := start(ctx, dir)
				if err == nil || !strings.Contains(err.Error(), "start through the jailer") || !strings.Contains(err.Error(), cause) {
					t.Errorf("got %v, want an error about the jailer and %q", err, cause)
				}
				checkNothingLeft(t, dir, before)
				if got := mountsOf(t); got != mounts {
					t.Errorf("mounts are left:\n%s", got)
				}
			})
		}
	}
}

// TestJailerKilled ends a jailer that is at work.
func TestJailerKilled(t *testing.T) {
	h := newJailedHost(t, fakeOrders{}, jailertest.Stall)
	dir, before := t.TempDir(), processes(t)
	failed := make(chan error, 1)
	go func() {
		_, err := h.boot(t.Context(), dir)
		failed <- err
	}()
	for killed := false; !killed; {
		for pid := range processes(t) {
			if n, err := strconv.Atoi(pid); err == nil && !before[pid] {
				killed = unix.Kill(n, unix.SIGKILL) == nil
			}
		}
	}
	if err := <-failed; err == nil || !strings.Contains(err.Error(), "start through the jailer") || !strings.Contains(err.Error(), "signal: killed") {
		t.Errorf("got %v, want an error about the jailer and its end", err)
	}
	checkNothingLeft(t, dir, before)
}

func TestBadJailer(t *testing.T) {
	dir := t.TempDir()
	text, plain := filepath.Join(dir, "text"), filepath.Join(dir, "plain")
	if err := errors.Join(os.WriteFile(text, []byte("not a program\n"), 0o700), os.WriteFile(plain, nil, 0o600)); err != nil {
		t.Fatal(err)
	}
	nobody := func(o *Options) { o.Users = nil }
	for _, tt := range []struct {
		name, path string
		change     func(*Options)
		want       string
	}{
		{"none", "/no/such/jailer", nil, "no such file"},
		{"a text file", text, nil, "is it Firecracker's jailer?"},
		{"not executable", plain, nil, "chmod +x"},
		{"a directory", dir, nil, "is not a file"},
		{"another program", "/bin/true", nil, "is it Firecracker's jailer?"},
		{"another version", newJailer(t, "1.12.0", ""), nil, "use those of one release"},
		{"a daemon that confines nothing", newJailer(t, "1.16.1", ""), nobody, "confines its machines"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			h := newFakeHost(t, fakeOrders{}, func(o *Options) {
				o.Jailer, o.Users = tt.path, confine.NewUsers(confine.RangeFor("test"))
				if tt.change != nil {
					tt.change(o)
				}
			})
			if _, err := h.Probe(t.Context()); !errors.Is(err, vmm.ErrUnavailable) || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("got %v, want ErrUnavailable about %q", err, tt.want)
			}
		})
	}
}

// TestBareJailed is the real jailer's: boot, freeze, children, a live branch, and an end at any time, after which nothing is left.
func TestBareJailed(t *testing.T) {
	jailer := os.Getenv("FORKD_JAILER")
	if jailer == "" {
		t.Skip("FORKD_JAILER names no jailer of Firecracker's")
	}
	mounts := mountsOf(t)
	b := newBare(t, Options{Jailer: jailer})
	for range 3 {
		m := b.child(t, b.image, b.state)
		resume(t, m)
		ask(t, m, []byte{probeguest.Echo}, probeguest.Echo)
		var st unix.Stat_t
		if err := unix.Stat(fmt.Sprintf("/proc/%d", m.Process().PID), &st); err != nil || st.Uid < confine.DefaultUIDs.First {
			t.Errorf("it is user %d (%v), want one of its own", st.Uid, err)
		}
	}
	source := b.child(t, b.image, b.state)
	resume(t, source)
	ask(t, source, probeguest.Command(probeguest.Work, 16<<20/memory.PageSize), probeguest.Work)
	next, state := branch(t, source, b.image)
	child := b.child(t, next, state)
	resume(t, child)
	_, before := torn(t, child)
	for {
		pages, round := torn(t, child)
		if pages > 0 {
			t.Errorf("%d torn pages", pages)
		}
		if round > before+2 {
			break
		}
	}
	if err := unix.Kill(child.Process().PID, unix.SIGKILL); err != nil {
		t.Fatal(err)
	}
	<-child.Done()
	if got := mountsOf(t); got != mounts {
		t.Errorf("mounts before:\n%s\nand now:\n%s", mounts, got)
	}
}
