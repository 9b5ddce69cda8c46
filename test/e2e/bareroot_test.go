package e2e

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
)

// bareCommands are all that the bare image has.
var bareCommands = []string{"sh", "cat", "sleep", "true", "mkdir", "chmod", "head", "wc", "env", "hostname", "date", "kill", "dd", "setsid"}

var libraryPath = regexp.MustCompile(`/[^ ]+`)

// makeBareRoot makes a root file system of this host's own programs: enough to run commands, and nothing that a guest could do without.
func makeBareRoot(tree string) error {
	for _, dir := range []string{"bin", "etc", "tmp", "root"} {
		if err := os.MkdirAll(filepath.Join(tree, dir), 0o755); err != nil {
			return err
		}
	}
	for _, name := range bareCommands {
		path, err := exec.LookPath(name)
		if err != nil {
			return err
		}
		if err := copyFile(filepath.Join(tree, "bin", name), path, 0o755); err != nil {
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
			if err := copyFile(dst, library, 0o755); err != nil {
				return err
			}
		}
	}
	return nil
}
