package qemu

import (
	"os/exec"
	"testing"
)

func needQEMU(t *testing.T) string {
	t.Helper()
	path, err := exec.LookPath(DefaultBinary)
	if err != nil {
		t.Skipf("%s is not installed", DefaultBinary)
	}
	return path
}
