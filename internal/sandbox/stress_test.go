package sandbox

import (
	"context"
	"fmt"
	"os"
	"runtime"
	"sync"
	"testing"
	"time"
)

// TestStress has clients create, use and kill sandboxes while the pool changes its size, and looks for what they leak.
func TestStress(t *testing.T) {
	length := 3 * time.Second
	if testing.Short() {
		length = 500 * time.Millisecond
	}
	w := newWorld(t)
	d := w.start(t, options{limits: Limits{Launches: 24, MonitorOverhead: 10 << 20, GuestPrivate: 1 << 20, MemoryBudget: 30 * 11 << 20}})
	d.snapshot(t, "py", nil)
	d.fork(t, "py", 2, nil)
	if err := d.killAll("warm"); err != nil {
		t.Fatal(err)
	}
	d.checkTidy(t, 0, "py")
	files, goroutines := openFiles(t), runtime.NumGoroutine()

	ctx, cancel := context.WithTimeout(t.Context(), length)
	defer cancel()
	var wg sync.WaitGroup
	for client := range 8 {
		wg.Go(func() {
			for i := 0; ctx.Err() == nil; i++ {
				if err := d.oneClient(t.Context(), client+i); err != nil {
					t.Errorf("client %d: %v", client, err)
					return
				}
			}
		})
	}
	wg.Go(func() {
		for size := 0; ctx.Err() == nil; size = (size + 3) % 8 {
			if _, err := d.SetPool(t.Context(), "py", size); err != nil {
				t.Errorf("SetPool: %v", err)
			}
			pauseFor(ctx, 50*time.Millisecond)
		}
	})
	wg.Wait()
	if _, err := d.SetPool(t.Context(), "py", 0); err != nil {
		t.Fatal(err)
	}
	d.checkTidy(t, 0, "py")
	eventually(t, "leaks", func() string {
		if n := openFiles(t); n > files+4 {
			return fmt.Sprintf("%d files are open, %d were before", n, files)
		}
		if n := runtime.NumGoroutine(); n > goroutines+4 {
			buf := make([]byte, 1<<16)
			return fmt.Sprintf("%d goroutines, %d were before\n%s", n, goroutines, buf[:runtime.Stack(buf, true)])
		}
		return ""
	})
	t.Logf("%+v", d.Stats())
}

// oneClient forks two sandboxes, uses them and kills them. Being refused for want of room is no error.
func (d *daemon) oneClient(ctx context.Context, i int) error {
	results, err := d.Fork(ctx, ForkRequest{Tag: "py", N: 2, Path: []Path{PathAny, PathCold, PathAny}[i%3]})
	if CodeOf(err) == CodeInsufficientMemory {
		return nil
	}
	if err != nil {
		return err
	}
	for _, r := range results {
		if CodeOf(r.Err) == CodeInsufficientMemory {
			continue
		}
		if r.Err != nil {
			return r.Err
		}
		id := r.Sandbox.ID
		res, err := d.Exec(ctx, id, ExecRequest{Args: []string{"hostname"}})
		if err != nil || string(res.Stdout) != id+"\n" {
			return fmt.Errorf("hostname of %s: %q, %w", id, res.Stdout, err)
		}
		if _, err := d.Sandboxes(ctx); err != nil {
			return err
		}
		if err := d.Kill(ctx, id); err != nil {
			return err
		}
	}
	return nil
}

func openFiles(t *testing.T) int {
	t.Helper()
	entries, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	return len(entries)
}
