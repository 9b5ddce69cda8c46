package hostnet

import (
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"testing"
)

// outside runs the test again, alone, in a network namespace of its own, which is the host to it. It returns false there, and true out here.
func outside(t *testing.T) bool {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("network namespaces need root")
	}
	if err := Check(); err != nil {
		t.Skip(err)
	}
	if os.Getenv("HOSTNET_TEST") == t.Name() {
		return false
	}
	cmd := exec.Command("unshare", "--net", "--", os.Args[0], "-test.run=^"+t.Name()+"$", "-test.v")
	cmd.Env = append(os.Environ(), "HOSTNET_TEST="+t.Name())
	out, err := cmd.CombinedOutput()
	if err != nil || !bytes.Contains(out, []byte("--- PASS: "+t.Name())) {
		t.Errorf("in a network namespace of its own: %v\n%s", err, out)
	}
	return true
}

// run runs a program that must succeed.
func run(t *testing.T, name string, args ...string) string {
	t.Helper()
	out, err := exec.Command(name, args...).CombinedOutput()
	if err != nil {
		t.Fatalf("%s %v: %v\n%s", name, args, err, out)
	}
	return string(out)
}

// in runs a program in a slot's namespace.
func in(t *testing.T, s *Slot, name string, args ...string) string {
	t.Helper()
	path := fmt.Sprintf("/proc/%d/fd/%d", os.Getpid(), s.ns.Fd())
	return run(t, "nsenter", append([]string{"--net=" + path, "--", name}, args...)...)
}
