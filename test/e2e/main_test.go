package e2e

import (
	"fmt"
	"os"
	"testing"
)

// theLab is shared by all tests of this process: a package's tests have no other way to share what is expensive.
var theLab lab

func TestMain(m *testing.M) {
	code := m.Run()
	for _, problem := range theLab.close() {
		fmt.Fprintln(os.Stderr, "left over after all tests:", problem)
		code = 1
	}
	os.Exit(code)
}

// needVM skips a test where no machines are to be booted.
func needVM(t *testing.T) {
	t.Helper()
	if os.Getenv("FORKD_VM_TESTS") != "1" {
		t.Skip("boots virtual machines; set FORKD_VM_TESTS=1 to run it")
	}
}
