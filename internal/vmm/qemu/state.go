package qemu

import (
	"context"
	"errors"
	"fmt"
	"os"
)

// SaveState implements vmm.Machine.
func (m *machine) SaveState(ctx context.Context, w *os.File) error {
	save, release, err := m.StageState(ctx, w)
	if err != nil {
		return err
	}
	return errors.Join(save(ctx), release(ctx))
}

// StageState does ahead, while the guest runs, what of SaveState can be done ahead. save must be called at most once, while the machine is
// paused; it is one command, without allocations of note. release gives back what was staged, whether or not it was used.
func (m *machine) StageState(ctx context.Context, w *os.File) (save, release func(context.Context) error, err error) {
	own, err := os.OpenFile(fmt.Sprintf("/proc/self/fd/%d", w.Fd()), os.O_WRONLY|os.O_TRUNC, 0)
	if err != nil {
		return nil, nil, fmt.Errorf("device state file: %w", err)
	}
	defer own.Close()
	var set struct {
		ID int `json:"fdset-id"`
	}
	if err := m.do(ctx, "add-fd", nil, &set, own); err != nil {
		return nil, nil, fmt.Errorf("save device state: %w", err)
	}
	args := map[string]any{"filename": fmt.Sprintf("/dev/fdset/%d", set.ID), "live": false}
	save = func(ctx context.Context) error {
		if err := m.do(ctx, "xen-save-devices-state", args, nil); err != nil {
			return fmt.Errorf("save device state: %w", err)
		}
		return nil
	}
	release = func(ctx context.Context) error {
		if err := m.do(ctx, "remove-fd", map[string]any{"fdset-id": set.ID}, nil); err != nil {
			return fmt.Errorf("give back the device state's file: %w", err)
		}
		return nil
	}
	return save, release, nil
}
