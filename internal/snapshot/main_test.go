package snapshot

import (
	"fmt"
	"os"
	"os/exec"
	"testing"
)

// helperVariable makes the test binary another process of a test: its value is the name of a helper.
const helperVariable = "FORKD_TEST_HELPER"

func TestMain(m *testing.M) {
	if os.Getenv(helperVariable) != "crash" {
		os.Exit(m.Run())
	}
	if err := runCrasher(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func helperCommand(name string, args ...string) *exec.Cmd {
	cmd := exec.Command(os.Args[0], args...)
	cmd.Env = append(os.Environ(), helperVariable+"="+name)
	return cmd
}
