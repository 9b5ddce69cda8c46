package qemu

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"time"

	"golang.org/x/sys/unix"

	"github.com/forkd/forkd/internal/vmm/vmproc"
)

const saveCommand = "xen-save-devices-state"

// SaveState implements vmm.Machine.
func (m *machine) SaveState(ctx context.Context, w *os.File) error {
	set, err := m.addFile(ctx, w)
	if err != nil {
		return err
	}
	err = m.do(ctx, saveCommand, set.arguments(), nil)
	if err = errors.Join(err, m.removeFile(ctx, set)); err != nil {
		return fmt.Errorf("save device state: %w", err)
	}
	return nil
}

// StageState does ahead, while the guest runs, all of SaveState that can be done ahead. save must be called at most once, while the machine
// is paused. release gives back what was staged, whether or not it was used, and may come when the guest runs again.
//
// QEMU takes one byte of a command per round of its main loop: the ninety of this one take it about as long as carrying it out. So all but the
// last are sent ahead, on a connection of their own, since others have to be stopped and let go on in between.
func (m *machine) StageState(ctx context.Context, w *os.File) (save, release func(context.Context) error, err error) {
	set, err := m.addFile(ctx, w)
	if err != nil {
		return nil, nil, err
	}
	second, err := m.secondConnection(ctx)
	if errors.Is(err, os.ErrNotExist) || errors.Is(err, unix.ECONNREFUSED) { // a machine that an older forkd started
		return func(ctx context.Context) error { return m.do(ctx, saveCommand, set.arguments(), nil) },
			func(ctx context.Context) error { return m.removeFile(ctx, set) }, nil
	}
	if err == nil {
		err = second.stage(saveCommand, set.arguments())
	}
	if err != nil {
		if second != nil {
			second.close()
		}
		return nil, nil, errors.Join(fmt.Errorf("stage device state: %w", goneOr(err)), m.removeFile(ctx, set))
	}
	save = func(ctx context.Context) error {
		if err := second.finish(ctx, saveCommand); err != nil {
			return fmt.Errorf("save device state: %w", goneOr(err))
		}
		return nil
	}
	release = func(ctx context.Context) error {
		second.close() // with it goes what was staged and not finished
		return m.removeFile(ctx, set)
	}
	return save, release, nil
}

// fileSet is a file that QEMU was handed, under a name of its own.
type fileSet struct {
	ID int `json:"fdset-id"`
}

func (s fileSet) arguments() any {
	return struct {
		Filename string `json:"filename"`
		Live     bool   `json:"live"`
	}{Filename: fmt.Sprintf("/dev/fdset/%d", s.ID)}
}

const addFileLimit = 10 * time.Second

// addFile empties a file and hands it to QEMU.
func (m *machine) addFile(ctx context.Context, w *os.File) (fileSet, error) {
	var set fileSet
	own, err := os.OpenFile(fmt.Sprintf("/proc/self/fd/%d", w.Fd()), os.O_WRONLY|os.O_TRUNC, 0)
	if err != nil {
		return set, fmt.Errorf("device state file: %w", err)
	}
	defer own.Close()
	// Who asked for this may leave, but not before QEMU has said under which number it holds the file.
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), addFileLimit)
	defer cancel()
	if err := m.do(ctx, "add-fd", nil, &set, own); err != nil {
		return set, fmt.Errorf("device state file: %w", err)
	}
	return set, nil
}

func (m *machine) removeFile(ctx context.Context, set fileSet) error {
	return m.do(ctx, "remove-fd", set, nil)
}

// secondConnection opens the second control connection.
func (m *machine) secondConnection(ctx context.Context) (*monitor, error) {
	conn, err := vmproc.Dial(ctx, m.session.process.ID.Dir, stateSocket)
	if err != nil {
		return nil, err
	}
	q := newMonitor(conn, func(string, json.RawMessage) {}) // events come to the first as well
	if err := q.negotiate(ctx); err != nil {
		q.close()
		return nil, err
	}
	return q, nil
}

// stage sends a command but for its last byte.
func (q *monitor) stage(command string, args any) error {
	b, err := encode(command, args)
	if err != nil {
		return err
	}
	_, err = q.conn.Write(b[:len(b)-1])
	return err
}

// finish sends the last byte of the command that was staged and waits for its end.
func (q *monitor) finish(ctx context.Context, command string) error {
	free, err := q.take(ctx)
	if err != nil {
		return fmt.Errorf("%s: %w", command, err)
	}
	defer free()
	if _, err := q.conn.Write([]byte{'}'}); err != nil {
		return fmt.Errorf("%s: %w", command, err)
	}
	_, err = q.answer(ctx, command)
	return err
}
