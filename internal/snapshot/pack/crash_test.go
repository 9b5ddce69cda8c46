package pack

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/forkd/forkd/internal/snapshot"
)

// TestConcurrentUnpack lets many unpack overlapping chains at once.
func TestConcurrentUnpack(t *testing.T) {
	from, to := newSource(t), newHost(t)
	errs := make(chan error)
	files := [][]byte{from.pack(t, "root", Options{}), from.pack(t, "mid", Options{}), from.pack(t, "tip", Options{})}
	for i := range 9 {
		go func() {
			_, err := to.unpack(t, files[i%3], UnpackOptions{})
			errs <- err
		}()
	}
	for range 9 {
		if err := <-errs; err != nil {
			t.Error(err)
		}
	}
	if diff := cmp.Diff([]string{"img1", "mid", "root", "tip"}, to.names(t)); diff != "" {
		t.Errorf("stores (-want +got):\n%s", diff)
	}
	if err := to.store.Verify(t.Context(), "tip"); err != nil {
		t.Error(err)
	}
}

// TestUnpackFailsAtEveryStep fails each step of the store's and of publishing: nothing may be left.
func TestUnpackFailsAtEveryStep(t *testing.T) {
	file := newSource(t).pack(t, "tip", Options{})
	for fatal := 1; ; fatal++ {
		n := 0
		failed := ""
		fail := func(step string) error {
			if n++; n == fatal {
				failed = step
				return fmt.Errorf("injected at %s", step)
			}
			return nil
		}
		to := newHost(t, snapshot.WithHook(func(s snapshot.Step) error { return fail(string(s)) }))
		_, err := to.unpack(t, file, UnpackOptions{Hook: func(s Step) error { return fail(string(s)) }})
		if failed == "" {
			if err != nil {
				t.Errorf("without a failure: %v", err)
			}
			if n < 30 {
				t.Errorf("only %d steps", n)
			}
			return
		}
		if err == nil || !strings.Contains(err.Error(), failed) {
			t.Errorf("got %v, want the failure at %s", err, failed)
		}
		if got := to.names(t); len(got) != 0 {
			t.Errorf("failed at %s: left over: %v", failed, got)
		}
	}
}

// TestUnpackKilledAtEveryStep lets the process die at each step: what Recover finds is all or nothing.
func TestUnpackKilledAtEveryStep(t *testing.T) {
	t.Parallel()
	file := newSource(t).pack(t, "tip", Options{})
	packed := filepath.Join(t.TempDir(), "pack")
	if err := os.WriteFile(packed, file, 0o600); err != nil {
		t.Fatal(err)
	}
	all := []string{"img1", "mid", "root", "tip"}
	for fatal := 1; ; fatal++ {
		to := newHost(t)
		out, err := helperCommand("unpack", packed, to.store.Path(), to.images.dir, fmt.Sprint(fatal)).CombinedOutput()
		survived := err == nil
		if !survived && !killed(err) {
			t.Fatalf("step %d: %v: %s", fatal, err, out)
		}
		store, err := snapshot.Open(to.store.Path())
		if err != nil {
			t.Fatal(err)
		}
		to.images.sweep(t)
		if err := Recover(t.Context(), store, to.images, nil); err != nil {
			t.Fatal(err)
		}
		got := to.names(t)
		if survived {
			if !slices.Equal(got, all) {
				t.Errorf("not killed: got %v, want %v", got, all)
			}
			return
		}
		if len(got) != 0 && !slices.Equal(got, all) {
			t.Errorf("killed at step %d: got %v, want all or nothing", fatal, got)
		}
		if len(got) > 0 {
			if err := store.Verify(t.Context(), "tip"); err != nil {
				t.Error(err)
			}
		}
	}
}
