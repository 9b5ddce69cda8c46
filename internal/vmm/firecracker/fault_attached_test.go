package firecracker

import (
	"context"
	"strings"
	"testing"
	"time"

	"github.com/forkd/forkd/internal/vmm"
	"github.com/forkd/forkd/internal/vmm/probeguest"
)

// faultCauses are what errors say of faults.
var faultCauses = map[string]string{"kill": vmm.ErrGone.Error(), "stall": "deadline exceeded", "garbage": "malformed HTTP", "half": "unexpected EOF", "close": "EOF", "refuse": "ordered to refuse"}

// TestResumeFaults fails the call that lets a machine run, after it was loaded and after a branch.
func TestResumeFaults(t *testing.T) {
	for _, kind := range faultKinds {
		t.Run(kind, func(t *testing.T) {
			h := newFakeHost(t, fakeOrders{Fault: "PATCH /vm Resumed", Kind: kind})
			h.freeze(t)
			dir, before := t.TempDir(), processes(t)
			m, err := h.child(t.Context(), dir)
			if err != nil {
				t.Fatal(err)
			}
			ctx, cancel := context.WithTimeout(t.Context(), limitOf(kind))
			defer cancel()
			if err := life(ctx, m, tempFile(t)); err == nil || !strings.Contains(err.Error(), "resume") || !strings.Contains(err.Error(), faultCauses[kind]) {
				t.Errorf("got %v, want an error about resume and %q", err, faultCauses[kind])
			}
			if err := m.Kill(); err != nil {
				t.Errorf("Kill: %v", err)
			}
			checkNothingLeft(t, dir, before)
		})
	}
}

// limitOf is how long a call may take that fails in a way.
func limitOf(kind string) time.Duration {
	if kind == "stall" {
		return time.Second
	}
	return 20 * time.Second
}

// TestSourceRunsOn: whatever becomes of the calls of a branch, its source runs on when it is resumed, unless it is gone.
func TestSourceRunsOn(t *testing.T) {
	for _, call := range []string{"PATCH /vm Paused", "PUT /snapshot/create", "PATCH /vm Resumed"} {
		for _, kind := range append(faultKinds[1:], "lost") { // all but its death
			t.Run(strings.ReplaceAll(call, "/", ":")+" "+kind, func(t *testing.T) {
				h := newFakeHost(t, fakeOrders{Fault: call, Kind: kind, Once: true}, func(o *Options) { o.Serial = true })
				h.freeze(t)
				m, err := h.child(t.Context(), t.TempDir())
				if err != nil {
					t.Fatal(err)
				}
				defer m.Kill()
				ctx, cancel := context.WithTimeout(t.Context(), limitOf(kind))
				defer cancel()
				if err := m.Resume(ctx); err != nil && call != "PATCH /vm Resumed" {
					t.Fatal(err)
				}
				if err := m.Pause(ctx); err == nil && call != "PATCH /vm Resumed" {
					if err := m.SaveState(ctx, tempFile(t)); err == nil {
						t.Error("the branch did not fail")
					}
				}
				if err := m.Resume(t.Context()); err != nil {
					t.Errorf("Resume: %v", err)
				}
				ask(t, m, []byte{probeguest.Echo}, probeguest.Echo)
			})
		}
	}
}

// TestAttachFaults fails the call by which a machine is taken over: the error names it, and the machine is left as it is.
func TestAttachFaults(t *testing.T) {
	for _, kind := range faultKinds {
		t.Run(kind, func(t *testing.T) {
			h := newFakeHost(t, fakeOrders{Fault: "GET /", Kind: kind})
			h.freeze(t)
			dir, before := t.TempDir(), processes(t)
			m, err := h.child(t.Context(), dir)
			if err != nil {
				t.Fatal(err)
			}
			ctx, cancel := context.WithTimeout(t.Context(), limitOf(kind))
			defer cancel()
			cause := faultCauses[kind]
			if _, err := h.Attach(ctx, m.Process()); err == nil || !strings.Contains(err.Error(), "ask for the machine's state") || !strings.Contains(err.Error(), cause) {
				t.Errorf("got %v, want an error about its state and %q", err, cause)
			}
			if err := m.Kill(); err != nil {
				t.Errorf("Kill: %v", err)
			}
			checkNothingLeft(t, dir, before)
		})
	}
}

// TestGuestHalts: Firecracker goes on with a guest that has halted; its machine ends.
func TestGuestHalts(t *testing.T) {
	h := newFakeHost(t, fakeOrders{}, func(o *Options) { o.Serial = true })
	h.freeze(t)
	m, err := h.child(t.Context(), t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	defer m.Kill()
	if err := m.Resume(t.Context()); err != nil {
		t.Fatal(err)
	}
	heard, limit := m.(Serial).Listen(), time.After(callLimit)
	// A line comes in pieces; the first two are none of a kernel's.
	for _, piece := range []string{strings.Repeat("x", longestLine+1), "[ 1.5] reboot: System halted\n", "[   12.3", "45678] reboot: Power", " down\r\n"} {
		select {
		case <-m.Done():
			t.Fatalf("it ended before %q: %+v", piece, m.Exit())
		default:
		}
		if _, err := m.(Serial).Write([]byte(piece)); err != nil {
			t.Fatal(err)
		}
		for n := 0; n < len(piece); {
			select {
			case b := <-heard:
				n += len(b)
			case <-limit:
				t.Fatalf("it said %d bytes of %q", n, piece)
			}
		}
	}
	select {
	case <-m.Done():
	case <-limit:
		t.Fatal("it has not ended")
	}
	if got := m.Exit(); got.Reason != vmm.ExitShutdown {
		t.Errorf("it ended so: %+v", got)
	}
}
