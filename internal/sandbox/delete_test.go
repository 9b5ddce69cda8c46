package sandbox

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func TestDeleteSnapshot(t *testing.T) {
	t.Run("unknown", func(t *testing.T) {
		d := newWorld(t).start(t, options{})
		checkCode(t, "unknown tag", d.DeleteSnapshot(t.Context(), "py", DeleteSafe), CodeSnapshotNotFound)
		checkCode(t, "bad tag", d.DeleteSnapshot(t.Context(), "p/y", DeleteSafe), CodeInvalidTag)
		checkCode(t, "bad mode", d.DeleteSnapshot(t.Context(), "py", "gently"), CodeInvalidArgument)
	})
	t.Run("unused", func(t *testing.T) {
		d := newWorld(t).start(t, options{})
		d.snapshot(t, "py", nil)
		if err := d.DeleteSnapshot(t.Context(), "py", DeleteSafe); err != nil {
			t.Fatal(err)
		}
		checkCode(t, "again", d.DeleteSnapshot(t.Context(), "py", DeleteSafe), CodeSnapshotNotFound)
		d.checkTidy(t, 0)
		if n := d.cache.Stats().Images; n != 0 {
			t.Errorf("%d images are resident, want none", n)
		}
		d.snapshot(t, "py", nil) // the tag is free
	})
	for _, mode := range []DeleteMode{DeleteSafe, DeleteCascade} {
		t.Run("in use, mode "+string(mode), func(t *testing.T) {
			d := newWorld(t).start(t, options{})
			d.snapshot(t, "py", func(r *SnapshotRequest) { r.PoolSize = 1 })
			b := d.fork(t, "py", 1, func(r *ForkRequest) { r.Path = PathCold })[0]
			err := d.DeleteSnapshot(t.Context(), "py", mode)
			checkCode(t, "in use", err, CodeSnapshotInUse)
			if !strings.Contains(fmt.Sprint(err), b.ID) {
				t.Errorf("error %q does not name sandbox %s", err, b.ID)
			}
			waitPool(t, d, "py", 1) // the refused attempt left the pool alone
			if err := d.Kill(t.Context(), b.ID); err != nil {
				t.Fatal(err)
			}
			if err := d.DeleteSnapshot(t.Context(), "py", mode); err != nil {
				t.Errorf("its own pool is in the way: %v", err)
			}
			d.checkTidy(t, 0)
		})
	}
	t.Run("by force", func(t *testing.T) {
		d := newWorld(t).start(t, options{})
		d.snapshot(t, "py", nil)
		b := d.fork(t, "py", 3, nil)[0]
		if err := d.DeleteSnapshot(t.Context(), "py", DeleteForce); err != nil {
			t.Fatal(err)
		}
		d.checkTidy(t, 0)
		_, err := d.Sandbox(t.Context(), b.ID)
		checkCode(t, "Sandbox", err, CodeSandboxNotFound)
	})
}

func TestDeleteSnapshotWithDependents(t *testing.T) {
	d := newWorld(t).start(t, options{})
	for _, tag := range []string{"base", "mid", "tip", "other"} {
		d.snapshot(t, tag, nil)
	}
	// Chains are made by branches, which are not here yet: pretend.
	d.mu.Lock()
	d.frozen["mid"].parent = d.frozen["base"].id
	d.frozen["tip"].parent = d.frozen["mid"].id
	d.mu.Unlock()

	s, err := d.Snapshot(t.Context(), "mid")
	if err != nil || s.ParentTag != "base" || fmt.Sprint(s.Ancestors, s.Dependents) != "[base] [tip]" {
		t.Errorf("family of mid: got parent %q, ancestors %v, dependents %v, %v", s.ParentTag, s.Ancestors, s.Dependents, err)
	}
	for _, mode := range []DeleteMode{DeleteSafe, DeleteForce} {
		err := d.DeleteSnapshot(t.Context(), "base", mode)
		checkCode(t, "mode "+string(mode), err, CodeSnapshotInUse)
		if !strings.Contains(fmt.Sprint(err), "mid, tip") {
			t.Errorf("error %q does not name the dependents", err)
		}
	}
	if err := d.DeleteSnapshot(t.Context(), "base", DeleteCascade); err != nil {
		t.Fatal(err)
	}
	d.checkTidy(t, 0, "other")
}

// TestDamagedSnapshot flips a bit of a snapshot on disk and forks from it in a daemon that has to read it.
func TestDamagedSnapshot(t *testing.T) {
	for _, damage := range []string{"flip", "truncate", "device", "manifest"} {
		t.Run(damage, func(t *testing.T) {
			w := newWorld(t)
			d := w.start(t, options{})
			s := d.snapshot(t, "py", nil)
			d.stop(t)
			spoil(t, s.Dir, damage)
			d = w.start(t, options{})
			_, err := d.Fork(t.Context(), ForkRequest{Tag: "py", N: 1, Path: PathCold})
			if err == nil {
				var results []ForkResult
				results, err = d.Fork(t.Context(), ForkRequest{Tag: "py", N: 1, Path: PathCold})
				if err == nil {
					err = results[0].Err
				}
			}
			checkCode(t, "Fork", err, CodeSnapshotCorrupt)
			if !strings.Contains(fmt.Sprint(err), "py") {
				t.Errorf("error %q does not name the snapshot", err)
			}
			got, err := d.Snapshot(t.Context(), "py")
			if err != nil || got.Status != StatusFailed || got.Warning == "" || got.Bootable {
				t.Errorf("afterwards: got status %s, warning %q, bootable %v, %v, want it failed", got.Status, got.Warning, got.Bootable, err)
			}
			d.checkTidy(t, 0, "py")
			if err := d.DeleteSnapshot(t.Context(), "py", DeleteSafe); err != nil {
				t.Errorf("DeleteSnapshot: %v", err)
			}
			d.checkTidy(t, 0)
		})
	}
}

// TestDamageIsRemembered restarts the daemon after it found a snapshot damaged: it need not find out again, until somebody has it verified.
func TestDamageIsRemembered(t *testing.T) {
	w := newWorld(t)
	d := w.start(t, options{})
	s := d.snapshot(t, "py", nil)
	d.stop(t)
	name := filepath.Join(s.Dir, "memory")
	whole, err := os.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	spoil(t, s.Dir, "flip")
	d = w.start(t, options{})
	checkCode(t, "VerifySnapshot", d.VerifySnapshot(t.Context(), "py"), CodeSnapshotCorrupt)
	d.stop(t)
	d = w.start(t, options{})
	got, err := d.Snapshot(t.Context(), "py")
	if err != nil || got.Status != StatusFailed || got.Warning == "" || got.Bootable {
		t.Errorf("after a restart: got status %s, warning %q, bootable %v, %v, want it failed", got.Status, got.Warning, got.Bootable, err)
	}
	_, err = d.Fork(t.Context(), ForkRequest{Tag: "py", N: 1})
	checkCode(t, "Fork", err, CodeSnapshotCorrupt)
	checkCode(t, "VerifySnapshot", d.VerifySnapshot(t.Context(), "py"), CodeSnapshotCorrupt)
	if err := os.WriteFile(name, whole, 0o600); err != nil { // somebody has a copy
		t.Fatal(err)
	}
	if err := d.VerifySnapshot(t.Context(), "py"); err != nil {
		t.Errorf("VerifySnapshot of a repaired one: %v", err)
	}
	d.fork(t, "py", 1, nil)
	if _, err := d.SetPool(t.Context(), "py", 1); err != nil {
		t.Errorf("SetPool of a repaired one: %v", err)
	}
	d.stop(t)
	d = w.start(t, options{})
	if got, err := d.Snapshot(t.Context(), "py"); err != nil || got.Status != StatusReady || got.Warning != "" {
		t.Errorf("repaired, after a restart: %+v, %v", got, err)
	}
}

func spoil(t *testing.T, dir, damage string) {
	t.Helper()
	name := filepath.Join(dir, "memory")
	switch damage {
	case "device":
		name = filepath.Join(dir, "device-state")
	case "manifest":
		name = filepath.Join(dir, "manifest.json")
	}
	b, err := os.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	if damage == "truncate" {
		b = b[:len(b)/2]
	} else {
		b[len(b)/2] ^= 1
	}
	if err := os.Chmod(name, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(name, b, 0o600); err != nil {
		t.Fatal(err)
	}
}
