package snapshot

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/forkd/forkd/internal/memory"
)

// scenario is something that changes the store, and how the store looks before and after it.
type scenario struct {
	name          string
	run           func(s *Store) error
	before, after []string // ids
}

func scenarios() []scenario {
	layer := []memory.Extent{{First: 5, N: 300}, {First: 1500, N: 2}}
	return []scenario{
		{"publish a base", func(s *Store) error { return crashPut(s, "new", "", nil) }, []string{"base", "tip"}, []string{"base", "new", "tip"}},
		{"publish a layer", func(s *Store) error { return crashPut(s, "new", "base", layer) }, []string{"base", "tip"}, []string{"base", "new", "tip"}},
		{"compact", func(s *Store) error { _, err := s.Compact(context.Background(), "tip", "new"); return err },
			[]string{"base", "tip"}, []string{"base", "new", "tip"}},
		{"remove", func(s *Store) error { return s.Remove("tip") }, []string{"base", "tip"}, []string{"base"}},
	}
}

// crashPut is put for a process that has no testing.T. The memory has more than one chunk.
func crashPut(s *Store, id, parent string, extents []memory.Extent) error {
	ram, err := memory.New("crash", testMiB<<20)
	if err != nil {
		return err
	}
	defer ram.Close()
	if _, err := ram.WriteAt(bytes.Repeat([]byte("guest"), 3<<20/5), 0); err != nil {
		return err
	}
	_, err = tryPut(s, id, parent, ram, extents)
	return err
}

// runCrasher runs a scenario and kills itself before step number args[2]; with fewer steps it ends well.
func runCrasher(args []string) error {
	fatal, err := strconv.Atoi(args[2])
	if err != nil {
		return err
	}
	n := 0
	s, err := Open(args[0], WithHook(func(Step) error {
		if n++; n == fatal {
			_ = unix.Kill(os.Getpid(), unix.SIGKILL)
			select {} // the signal is on its way
		}
		return nil
	}))
	if err != nil {
		return err
	}
	i := slices.IndexFunc(scenarios(), func(sc scenario) bool { return sc.name == args[1] })
	return scenarios()[i].run(s)
}

func newCrashStore(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	s, err := Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	if err := crashPut(s, "base", "", nil); err != nil {
		t.Fatal(err)
	}
	if err := crashPut(s, "tip", "base", []memory.Extent{{First: 1, N: 10}}); err != nil {
		t.Fatal(err)
	}
	return dir
}

// checkWhole reopens a store after a crash and returns the ids it has: all must be whole, and nothing may be left over.
func checkWhole(t *testing.T, dir string) []string {
	t.Helper()
	s, err := Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	found, broken, err := s.List()
	if err != nil || len(broken) > 0 {
		t.Fatalf("list: %v, broken %v", err, broken)
	}
	var ids []string
	for _, m := range found {
		ids = append(ids, m.ID)
		if err := s.Verify(t.Context(), m.ID); err != nil {
			t.Error(err)
		}
	}
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	if len(entries) != len(ids) {
		t.Errorf("left over: got %v for snapshots %v", entries, ids)
	}
	return ids
}

func TestKilledAtEveryStep(t *testing.T) {
	t.Parallel()
	for _, sc := range scenarios() {
		t.Run(sc.name, func(t *testing.T) {
			for step := 1; ; step++ {
				dir := newCrashStore(t)
				err := helperCommand("crash", dir, sc.name, strconv.Itoa(step)).Run()
				ids := checkWhole(t, dir)
				if err == nil {
					if !slices.Equal(ids, sc.after) {
						t.Errorf("not killed: got %v, want %v", ids, sc.after)
					}
					if step < 4 {
						t.Errorf("only %d steps", step-1)
					}
					return
				}
				if !killed(err) {
					t.Fatalf("step %d: %v", step, err)
				}
				if !slices.Equal(ids, sc.before) && !slices.Equal(ids, sc.after) {
					t.Errorf("killed before step %d: got %v, want %v or %v", step, ids, sc.before, sc.after)
				}
			}
		})
	}
}

func killed(err error) bool {
	var exit *exec.ExitError
	return errors.As(err, &exit) && exit.Sys().(syscall.WaitStatus).Signal() == syscall.SIGKILL
}

// TestFailsAtEveryStep lets each step of each scenario fail as a full disk does.
func TestFailsAtEveryStep(t *testing.T) {
	t.Parallel()
	for _, sc := range scenarios() {
		t.Run(sc.name, func(t *testing.T) {
			for step := 1; ; step++ {
				dir := newCrashStore(t)
				n := 0
				var at Step
				s, err := Open(dir, WithHook(func(name Step) error {
					if n++; n == step {
						at = name
						return &os.PathError{Op: "write", Path: "x", Err: unix.ENOSPC}
					}
					return nil
				}))
				if err != nil {
					t.Fatal(err)
				}
				err = sc.run(s)
				if at == "" {
					if err != nil {
						t.Errorf("without a failure: %v", err)
					}
					return
				}
				if sc.name != "remove" && !errors.Is(err, ErrDiskFull) {
					t.Errorf("%s: got %v, want %v", at, err, ErrDiskFull)
				}
				if entries, _ := os.ReadDir(dir); sc.name != "remove" && len(entries) != len(sc.before) {
					t.Errorf("%s: left over: %v", at, entries)
				}
				if ids := checkWhole(t, dir); !slices.Equal(ids, sc.before) && (sc.name != "remove" || !slices.Equal(ids, sc.after)) {
					t.Errorf("%s: got %v, want %v", at, ids, sc.before)
				}
			}
		})
	}
}

// TestDiskFull fills a small file system for real, at many sizes.
func TestDiskFull(t *testing.T) {
	dir := t.TempDir()
	if err := unix.Mount("forkd-test", dir, "tmpfs", 0, "size=5m,mode=0700"); err != nil {
		t.Skipf("needs the right to mount: %v", err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(dir, 0); err != nil {
			t.Error(err)
		}
	})
	s, err := Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	for pages := uint64(64); pages <= 2048; pages += 64 {
		id := fmt.Sprint("p", pages)
		_, err := tryPut(s, id, "", newRAM(t, pages, memory.Extent{First: 0, N: pages}), nil)
		fits := pages*memory.PageSize < 5<<20-32<<10
		switch {
		case err == nil && fits:
			if err := s.Remove(id); err != nil {
				t.Fatal(err)
			}
		case err == nil:
			t.Errorf("%d pages fit on a disk of 5 MiB", pages)
		case !errors.Is(err, ErrDiskFull) || fits:
			t.Errorf("%d pages: got %v, want %v", pages, err, ErrDiskFull)
		}
		if entries, _ := os.ReadDir(dir); len(entries) != 0 {
			t.Fatalf("%d pages: left over: %v", pages, entries)
		}
	}
}
