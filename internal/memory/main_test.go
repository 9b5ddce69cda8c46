package memory

import (
	"fmt"
	"os"
	"os/exec"
	"testing"
)

// helperVariable makes the test binary another process of a test: its value is the name of a helper.
const helperVariable = "FORKD_TEST_HELPER"

// TestMain runs a helper instead of the tests if it is asked to. Helpers are stand-ins for monitors: they get their arguments as a
// program does.
func TestMain(m *testing.M) {
	helpers := map[string]func(args []string) error{
		"mapper":  runMapper,  // usage_test.go
		"guest":   runGuest,   // window_guest_test.go
		"handler": runHandler, // window_fail_test.go
	}
	helper, ok := helpers[os.Getenv(helperVariable)]
	if !ok {
		os.Exit(m.Run())
	}
	if err := helper(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func helperCommand(name string, args ...string) *exec.Cmd {
	cmd := exec.Command(os.Args[0], args...)
	cmd.Env = append(os.Environ(), helperVariable+"="+name)
	return cmd
}
