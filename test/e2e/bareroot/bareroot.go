// Package bareroot makes a root file system of this host's own programs, for guests that only run a few commands: quick to build and to boot.
//
// It is part of the test suite, never of the product.
package bareroot

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
)

// commands are all that it has.
var commands = []string{"sh", "cat", "sleep", "true", "mkdir", "chmod", "head", "wc", "env", "hostname", "date", "kill", "dd", "setsid"}

var libraryPath = regexp.MustCompile(`/[^ ]+`)

// Make makes the root in the directory tree: enough to run commands, and nothing that a guest could do without.
func Make(tree string) error {
	for _, dir := range []string{"bin", "etc", "tmp", "root"} {
		if err := os.MkdirAll(filepath.Join(tree, dir), 0o755); err != nil {
			return err
		}
	}
	for _, name := range commands {
		path, err := exec.LookPath(name)
		if err != nil {
			return fmt.Errorf("program for a guest: %w", err)
		}
		if err := copyFile(filepath.Join(tree, "bin", name), path); err != nil {
			return err
		}
		out, err := exec.Command("ldd", path).Output()
		if err != nil {
			return fmt.Errorf("ldd %s: %w", path, err)
		}
		for _, library := range libraryPath.FindAllString(string(out), -1) {
			dst := filepath.Join(tree, library)
			if _, err := os.Stat(dst); err == nil {
				continue
			}
			if err := os.MkdirAll(filepath.Dir(dst), 0o755); err != nil {
				return err
			}
			if err := copyFile(dst, library); err != nil {
				return err
			}
		}
	}
	return nil
}

func copyFile(dst, src string) error {
	data, err := os.ReadFile(src)
	if err != nil {
		return err
	}
	return os.WriteFile(dst, data, 0o755)
}
