package firecracker

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/forkd/forkd/internal/vmm"
)

// notAFile is a memory file that can't be opened: the machine's own directory.
const notAFile = "."

// maxState bounds a device state. Firecracker's own bound is 100 KiB.
const maxState = 16 << 20

// load hands Firecracker a device state. The guest stays paused.
func (s *session) load(ctx context.Context, state *os.File) error {
	if err := context.Cause(ctx); err != nil {
		return err
	}
	if err := copyState(s.state, state); err != nil {
		return err
	}
	request := snapshotLoad{}
	if s.abilities.save == SaveDiff {
		request.EnableDiff, request.TrackDirty = s.abilities.older(1, 13), !s.abilities.older(1, 13)
	}
	err := s.do(ctx, loadSnapshot(request))
	var refused *refusal
	if errors.As(err, &refused) && !refused.aboutTap() {
		return fmt.Errorf("%w: %w", err, vmm.ErrIncompatible)
	}
	if errors.Is(err, vmm.ErrGone) && s.process.Status != "signal: killed" { // it ended by itself: it can't make sense of the state
		return fmt.Errorf("%w: %w", err, vmm.ErrIncompatible)
	}
	return err
}

// copyState replaces what to holds.
func copyState(to, from *os.File) error {
	fi, err := from.Stat()
	if err != nil {
		return fmt.Errorf("device state: %w", err)
	}
	if fi.Size() == 0 || fi.Size() > maxState {
		return fmt.Errorf("device state has %d bytes: %w", fi.Size(), vmm.ErrIncompatible)
	}
	b := make([]byte, fi.Size())
	if _, err := io.ReadFull(io.NewSectionReader(from, 0, fi.Size()), b); err != nil {
		return fmt.Errorf("read device state: %w", err)
	}
	if err := to.Truncate(0); err != nil {
		return fmt.Errorf("write device state: %w", err)
	}
	if _, err := to.WriteAt(b, 0); err != nil {
		return fmt.Errorf("write device state: %w", err)
	}
	return nil
}

// SaveState implements vmm.Machine. A parent's memory is written to BootConfig.Memory at the same time.
func (m *machine) SaveState(ctx context.Context, w *os.File) error {
	m.mu.Lock()
	m.saved = true // even if it fails below, the guest may have been told
	m.mu.Unlock()
	s := m.session
	if err := s.state.Truncate(0); err != nil {
		return fmt.Errorf("state file: %w", err)
	}
	if err := s.save(ctx); err != nil {
		return err
	}
	return copyState(w, s.state)
}

func (s *session) save(ctx context.Context) error {
	if s.parent {
		return s.do(ctx, createSnapshot("Full", fdPath(fdMemory), saveLimit(s.memoryMiB)))
	}
	switch s.abilities.save {
	case SaveDiff:
		return s.saveWithMemory(ctx, "Diff")
	case SaveFull:
		return s.saveWithMemory(ctx, "Full")
	default:
		return s.saveStateOnly(ctx)
	}
}

// saveStateOnly relies on what was probed: the state is written, and complete, before the memory's file is opened.
func (s *session) saveStateOnly(ctx context.Context) error {
	err := s.do(ctx, createSnapshot("Full", notAFile, 0))
	var refused *refusal
	switch {
	case err == nil:
		return errors.New("save the device state: Firecracker wrote memory to a directory")
	case !errors.As(err, &refused) || !strings.Contains(refused.message, "memory backing file"):
		return err
	}
	return nil
}

// saveWithMemory has memory written to a file that is thrown away.
func (s *session) saveWithMemory(ctx context.Context, kind string) error {
	if s.scratch.file == nil {
		return errors.New("save the device state: this machine was started by a daemon that saved states without memory, which is not possible any more")
	}
	err := s.do(ctx, createSnapshot(kind, fdPath(s.scratch.fd), saveLimit(s.memoryMiB)))
	if dropped := s.scratch.file.Truncate(0); dropped != nil {
		err = errors.Join(err, fmt.Errorf("drop the memory that was saved with the state: %w", dropped))
	}
	return err
}

// scratch is what memory is written to that Firecracker does not save a state without: a memfd, so that a pause does not wait for a disk. While
// it is written it counts as the monitor's memory.
type scratch struct {
	file *os.File // nil: none is needed
	fd   int      // Firecracker's number of it
}

const scratchName = "scratch"

// addScratch has a Firecracker inherit a scratch file, if it needs one.
func (s *session) addScratch(c *command) (err error) {
	if s.abilities.save == SaveStateOnly {
		return nil
	}
	if s.scratch.file, err = memfdOf(scratchName, nil); err != nil {
		return fmt.Errorf("file for saved memory: %w", err)
	}
	s.scratch.fd = c.inherit(s.scratch.file)
	return nil
}

// findScratch finds the scratch file of a Firecracker that an earlier daemon started.
func (s *session) findScratch(pid int) error {
	if s.abilities.save == SaveStateOnly {
		return nil
	}
	dir := fmt.Sprintf("/proc/%d/fd", pid)
	entries, err := os.ReadDir(dir)
	if err != nil {
		return err
	}
	for _, e := range entries {
		path := filepath.Join(dir, e.Name())
		if target, err := os.Readlink(path); err != nil || !strings.HasPrefix(target, "/memfd:forkd-"+scratchName) {
			continue
		}
		if s.scratch.fd, err = strconv.Atoi(e.Name()); err != nil {
			return err
		}
		s.scratch.file, err = openMemfd(path, scratchName)
		return err
	}
	return nil
}
