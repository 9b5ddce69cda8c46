package qemu

import (
	"os"
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

func readFile(t *testing.T, path string) []byte {
	t.Helper()
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return b
}
