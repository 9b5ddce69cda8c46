package firecracker

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"regexp"
	"strings"
	"time"
)

var jailerLine = regexp.MustCompile(`(?m)^Jailer v(\d+\.\d+\.\S+)$`)

// CheckJailer says what is wrong with a file that is to be the jailer of a Firecracker, which is looked up in PATH, or which version it has.
func CheckJailer(ctx context.Context, binary, jailer string) (version string, err error) {
	firecracker, err := findBinary(cmp.Or(binary, DefaultBinary))
	if err != nil {
		return "", err
	}
	a, err := askVersion(ctx, firecracker)
	if err != nil {
		return "", err
	}
	return a.info.Version, checkPair(ctx, jailer, a.info.Version)
}

// checkPair checks a jailer, and that it is of the same release as a Firecracker of some version.
func checkPair(ctx context.Context, path, firecracker string) error {
	fi, err := os.Stat(path)
	switch {
	case err != nil:
		return fmt.Errorf("jailer: %w", err)
	case !fi.Mode().IsRegular():
		return fmt.Errorf("jailer %s is not a file", path)
	case fi.Mode()&0o111 == 0:
		return fmt.Errorf("jailer %s is not executable: chmod +x it", path)
	}
	m, said, err := version(ctx, jailerLine, path)
	if m == nil {
		return fmt.Errorf("%s --version: %.200q (%v): is it Firecracker's jailer?", path, said, err)
	}
	if m[1] != firecracker {
		return fmt.Errorf("jailer %s is of version %s, Firecracker of %s: use those of one release", path, m[1], firecracker)
	}
	return nil
}

// version runs a program for its version, and returns what was found in what it said, and the first line of that.
func version(ctx context.Context, line *regexp.Regexp, path string) (found []string, said string, err error) {
	ctx, cancel := context.WithTimeout(ctx, callLimit)
	defer cancel()
	cmd := exec.CommandContext(ctx, path, "--version")
	cmd.WaitDelay = time.Second
	out, err := cmd.CombinedOutput()
	said, _, _ = strings.Cut(strings.TrimSpace(string(out)), "\n")
	return line.FindStringSubmatch(string(out)), said, err
}

// checkJailer sees whether each Firecracker can be started through the jailer that was asked for. It is not done without if not.
func (e *Engine) checkJailer(ctx context.Context, firecracker string) error {
	if e.opt.Jailer == "" {
		return nil
	}
	if e.opt.Users == nil {
		return errors.New("a jailer can only be used by a daemon that is root and confines its machines (--confine auto or require)")
	}
	return checkPair(ctx, e.opt.Jailer, firecracker)
}

// arguments are Firecracker's own.
func (e *Engine) arguments() []string {
	args := []string{"--api-sock", apiSocket, "--log-path", "/proc/self/fd/2", "--level", "Warning"}
	if e.opt.Jailer == "" {
		args = append(args, "--id", "forkd") // the jailer gives it one
	}
	return args
}
