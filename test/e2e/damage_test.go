package e2e

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/forkd/forkd/client"
)

// TestDamagedSnapshots damages a snapshot on disk while no daemon has it in memory. It is named, and nothing of it is restored.
func TestDamagedSnapshots(t *testing.T) {
	t.Parallel()
	d := ownDaemon(t, setup{})
	ctx, cancel := d.limited()
	defer cancel()
	info, err := d.client.SnapshotInfo(ctx, pyTag)
	if err != nil {
		t.Fatal(err)
	}
	d.stop()
	flip := func(at func(size int) int) func([]byte) []byte {
		return func(b []byte) []byte { b[at(len(b))] ^= 1; return b }
	}
	middle := func(size int) int { return size / 2 }
	tests := []struct {
		name, file string
		damage     func([]byte) []byte // nil: the file is removed
	}{
		{"memory cut", "memory", func(b []byte) []byte { return b[:len(b)-1] }},
		{"memory longer", "memory", func(b []byte) []byte { return append(b, 0) }},
		{"memory with a bit flipped", "memory", flip(middle)},
		{"memory with the last bit flipped", "memory", flip(func(size int) int { return size - 1 })},
		{"memory gone", "memory", nil},
		{"index with a bit flipped", "memory.index", flip(middle)},
		{"device state cut", "device-state", func(b []byte) []byte { return b[:len(b)/2] }},
		{"device state with a bit flipped", "device-state", flip(middle)},
		{"manifest cut", "manifest.json", func(b []byte) []byte { return b[:len(b)/2] }},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			d := d.in(t)
			repair := damage(t, filepath.Join(info.Dir, tt.file), tt.damage)
			d.start(setup{})
			defer func() { d.stop(); repair() }()
			names := []string{info.ID, tt.file}
			if tt.name == tests[0].name { // the others are known to be damaged, in another way
				_, err := d.tryFork(2)
				wantError(t, "fork", err, 422, "snapshot_corrupt", names...)
			}
			err := d.client.VerifySnapshot(t.Context(), pyTag)
			wantError(t, "verify", err, 422, "snapshot_corrupt", names...)
			_, err = d.tryFork(2)
			wantError(t, "fork", err, 422, "snapshot_corrupt", names...)
			if got := d.forkd("fork", "--tag", pyTag); got.code != 1 || !strings.Contains(got.stderr, tt.file) || !strings.Contains(got.stderr, "hint:") {
				t.Errorf("forkd fork: %v", got)
			}
			list, err := d.client.Snapshots(t.Context())
			if err != nil || len(list) != 1 || list[0].Status != "failed" || list[0].Bootable || !strings.Contains(list[0].Warning, tt.file) {
				t.Errorf("listed after it was found damaged: %+v, %v", list, err)
			}
			d.checkSandboxes()
			if n := len(machinesIn(d.run)); n != 0 {
				t.Errorf("%d monitors run", n)
			}
		})
	}
	// With the damage undone all is well again, once that was looked at; and a damaged one can be removed.
	d.start(setup{})
	if _, err := d.tryFork(1); !client.IsCode(err, "snapshot_corrupt") {
		t.Errorf("fork of a repaired snapshot that nobody has verified: %v", err)
	}
	d.must("snapshot-verify", pyTag)
	if got := d.fork1().py("6 * 7"); got != "42" {
		t.Errorf("6 * 7: %s", got)
	}
	d.killGuests()
	d.stop()
	damage(t, filepath.Join(info.Dir, "memory"), flip(middle))
	d.start(setup{})
	if _, err := d.client.SetPool(t.Context(), pyTag, 1); err != nil {
		t.Error(err)
	}
	eventually(t, tidyLimit, func() error { // it is found out in the background
		_, err := d.client.Snapshots(t.Context())
		return err
	})
	err = d.client.VerifySnapshot(t.Context(), pyTag)
	wantError(t, "verify", err, 422, "snapshot_corrupt", info.ID)
	if err := d.client.DeleteSnapshot(t.Context(), pyTag, client.DeleteUnused); err != nil {
		t.Errorf("remove a damaged snapshot: %v", err)
	}
	d.checkTidy()
}

// damage changes a file that others may have links to, and returns what undoes it.
func damage(t *testing.T, path string, change func([]byte) []byte) (repair func()) {
	t.Helper()
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	whole := path + ".whole"
	data, err := os.ReadFile(path)
	must(err)
	must(os.Rename(path, whole))
	if change != nil {
		must(os.WriteFile(path, change(data), 0o600))
	}
	return func() { must(os.Rename(whole, path)) }
}
