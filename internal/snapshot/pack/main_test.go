package pack

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strconv"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/forkd/forkd/internal/snapshot"
)

// helperVariable makes the test binary another process of a test: its value is the name of a helper.
const helperVariable = "FORKD_TEST_HELPER"

func TestMain(m *testing.M) {
	if os.Getenv(helperVariable) != "unpack" {
		os.Exit(m.Run())
	}
	if err := runUnpacker(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

// runUnpacker unpacks file args[0] into the stores args[1] and args[2], and kills itself before step number args[3].
func runUnpacker(args []string) error {
	fatal, err := strconv.Atoi(args[3])
	if err != nil {
		return err
	}
	n := 0
	step := func() error {
		if n++; n == fatal {
			_ = unix.Kill(os.Getpid(), unix.SIGKILL)
			select {} // the signal is on its way
		}
		return nil
	}
	f, err := os.Open(args[0])
	if err != nil {
		return err
	}
	defer f.Close()
	store, err := snapshot.Open(args[1], snapshot.WithHook(func(snapshot.Step) error { return step() }))
	if err != nil {
		return err
	}
	_, err = Unpack(context.Background(), f, store, &fakeImages{args[2]}, UnpackOptions{Hook: func(Step) error { return step() }})
	return err
}

func helperCommand(name string, args ...string) *exec.Cmd {
	cmd := exec.Command(os.Args[0], args...)
	cmd.Env = append(os.Environ(), helperVariable+"="+name)
	return cmd
}

func killed(err error) bool {
	var exit *exec.ExitError
	return errors.As(err, &exit) && exit.Sys().(syscall.WaitStatus).Signal() == syscall.SIGKILL
}
