// Package filelock locks files for as long as a process lives.
package filelock

import (
	"errors"
	"os"
	"time"

	"golang.org/x/sys/unix"
)

// ErrHeld says that another process has the lock.
var ErrHeld = errors.New("another process has it locked")

// grace is how long a lock may be had after its process has been killed: until a process that it was just starting, which has a copy of all its
// descriptors, executes its program. On a busy host that can take a while.
const grace = 3 * time.Second

// Soon locks a file as long as it is open, or fails with ErrHeld when another process goes on having it. A lock can't be awaited with a limit, so it is
// asked for again.
func Soon(f *os.File) error { return within(f, grace) }

func within(f *os.File, limit time.Duration) error {
	const most = 50 * time.Millisecond
	end := time.Now().Add(limit)
	for pause := time.Millisecond; ; pause = min(2*pause, most) {
		err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
		switch {
		case errors.Is(err, unix.EINTR):
		case !errors.Is(err, unix.EWOULDBLOCK):
			return err
		case time.Now().After(end):
			return ErrHeld
		}
		time.Sleep(pause)
	}
}
