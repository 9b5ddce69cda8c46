package pack

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/forkd/forkd/internal/snapshot"
)

var errInjected = errors.New("injected")

// TestAdmit holds that the caller sees everything in its place, that its refusal takes all back, and that its word is final.
func TestAdmit(t *testing.T) {
	t.Parallel()
	file := newSource(t).pack(t, "tip", Options{})
	all := []string{"img1", "mid", "root", "tip"}

	to := newHost(t)
	_, err := to.unpack(t, file, UnpackOptions{Admit: func(_ context.Context, m snapshot.Manifest) error {
		if chain, err := to.store.Chain(m.ID); err != nil || len(chain) != 3 {
			t.Errorf("chain when admitted: %d, %v", len(chain), err)
		}
		return errInjected
	}})
	if !errors.Is(err, errInjected) {
		t.Errorf("Unpack() error = %v, want %v", err, errInjected)
	}
	if left := to.names(t); len(left) != 0 {
		t.Errorf("left of what was refused: %v", left)
	}

	// What was admitted stays, though the journal did.
	admitted := func(context.Context, snapshot.Manifest) error { return nil }
	failLast := func(s Step) error {
		if s == StepDone {
			return errInjected
		}
		return nil
	}
	if _, err := to.unpack(t, file, UnpackOptions{Admit: admitted, Hook: failLast}); !errors.Is(err, errInjected) {
		t.Errorf("Unpack() error = %v, want %v", err, errInjected)
	}
	if err := Recover(t.Context(), to.store, to.images, func(id string) bool { return id == "tip" }); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(all, to.names(t)); diff != "" {
		t.Errorf("stores (-want +got):\n%s", diff)
	}

	// One that is here already is admitted too, and refusing it takes nothing.
	_, err = to.unpack(t, file, UnpackOptions{Admit: func(_ context.Context, m snapshot.Manifest) error { return errInjected }})
	if diff := cmp.Diff(all, to.names(t)); diff != "" || !errors.Is(err, errInjected) {
		t.Errorf("refused: %v, stores (-want +got):\n%s", err, diff)
	}
}

// TestRecoverAsks holds that what nobody was told of goes, and what somebody relies on stays.
func TestRecoverAsks(t *testing.T) {
	t.Parallel()
	file := newSource(t).pack(t, "mid", Options{})
	for _, known := range []bool{true, false} {
		to := newHost(t)
		if _, err := to.unpack(t, file, UnpackOptions{}); err != nil {
			t.Fatal(err)
		}
		left := filepath.Join(to.store.Path(), journalPrefix+"X")
		if err := os.WriteFile(left, []byte(`{"image": "img1", "snapshots": ["root", "mid"]}`), 0o600); err != nil {
			t.Fatal(err)
		}
		if err := Recover(t.Context(), to.store, to.images, func(id string) bool { return known && id == "mid" }); err != nil {
			t.Fatal(err)
		}
		var want []string
		if known {
			want = []string{"img1", "mid", "root"}
		}
		if diff := cmp.Diff(want, to.names(t)); diff != "" {
			t.Errorf("known %v: stores (-want +got):\n%s", known, diff)
		}
	}
}
