package vmmtest

import (
	"bytes"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"time"

	"github.com/forkd/forkd/internal/vmm"
)

// stateMagic begins a device state; a SHA-256 of the rest follows, then JSON.
const stateMagic = "forkd fake device state 1\n"

// stateLimit is the longest device state in bytes.
const stateLimit = 64 << 10

// deviceState is what a fake machine has outside its memory.
type deviceState struct {
	Family string // random id of the parent, also in the memory: a state goes with memory of its own family only
	Shape  vmm.Shape
	Saves  int // how many states were saved on the way from the parent to here
	Uptime time.Duration
}

func (s deviceState) write(w *os.File) error {
	body, err := json.Marshal(s)
	if err != nil {
		return err
	}
	sum := sha256.Sum256(body)
	all := append(append([]byte(stateMagic), sum[:]...), body...)
	if err := w.Truncate(0); err != nil {
		return err
	}
	_, err = w.WriteAt(all, 0)
	return err
}

func readState(r *os.File) (deviceState, error) {
	var s deviceState
	all, err := io.ReadAll(io.NewSectionReader(r, 0, stateLimit))
	if err != nil {
		return s, err
	}
	rest, ok := bytes.CutPrefix(all, []byte(stateMagic))
	if !ok || len(rest) < sha256.Size {
		return s, errors.New("not a fake device state")
	}
	sum := sha256.Sum256(rest[sha256.Size:])
	if !bytes.Equal(sum[:], rest[:sha256.Size]) {
		return s, errors.New("the device state is damaged")
	}
	return s, json.Unmarshal(rest[sha256.Size:], &s)
}

// Preconditions: hw.mu is held.
func (hw *hardware) save(w *os.File) error {
	switch {
	case w == nil:
		return errors.New("no descriptor came with the request")
	case hw.gate.isOpen():
		return errors.New("the machine runs: pause it first")
	}
	hw.guest.saves++
	state := deviceState{Family: hw.guest.family(), Shape: hw.cfg.Shape, Saves: hw.guest.saves, Uptime: hw.guest.uptime()}
	return state.write(w)
}

// Preconditions: hw.mu is held.
func (hw *hardware) load(r *os.File, faults map[Step]Action) error {
	switch {
	case r == nil:
		return errors.New("no descriptor came with the request")
	case hw.loaded:
		return errors.New("a device state was loaded before")
	}
	state, err := readState(r)
	if err != nil {
		return err
	}
	if state.Shape != hw.cfg.Shape {
		return fmt.Errorf("the device state is of a machine with %+v, this one has %+v", state.Shape, hw.cfg.Shape)
	}
	if family := hw.guest.family(); state.Family != family {
		return fmt.Errorf("the device state is of family %q, the memory of %q", state.Family, family)
	}
	hw.guest.restore(state, faults)
	hw.loaded = true
	return nil
}
