package confine

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/forkd/forkd/internal/confine/jailertest"
	"github.com/forkd/forkd/internal/netns"
)

// TestMain makes this test's binary the program that is confined, when it is asked to.
func TestMain(m *testing.M) {
	if jailertest.Is(os.Args[0]) {
		os.Exit(jailertest.Main(os.Args))
	}
	if os.Getenv(oldCallVariable) != "" {
		if err := oldCall(); err != nil {
			panic(err)
		}
		return
	}
	if ask := os.Getenv("FORKD_CONFINE_PROBE"); ask != "" {
		var q questions
		if err := json.Unmarshal([]byte(ask), &q); err != nil {
			panic(err)
		}
		if err := json.NewEncoder(os.Stdout).Encode(q.answer()); err != nil {
			panic(err)
		}
		_, _ = io.Copy(io.Discard, os.Stdin) // until nobody needs it any more
		return
	}
	os.Exit(m.Run())
}

// jailed is a probe that runs in a cell.
type jailed struct {
	t     *testing.T
	child *os.Process
	uid   uint32
	hold  *os.File // the probe ends when it is closed
	saw   answers
}

// probe starts a probe in a cell, as a monitor is started there, and returns when it has looked around.
func probe(t *testing.T, c *Cell, q questions, cmd Command) *jailed {
	t.Helper()
	ask, err := json.Marshal(q)
	if err != nil {
		t.Fatal(err)
	}
	in, hold, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer in.Close()
	out, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer out.Close()
	cmd.Env = append(cmd.Env, "FORKD_CONFINE_PROBE="+string(ask))
	cmd.Files = append([]*os.File{in, w, w}, cmd.Files...)
	child, uid, err := c.Start(cmd)
	w.Close()
	if err != nil {
		hold.Close()
		t.Fatal(err)
	}
	j := &jailed{t: t, child: child, uid: uid, hold: hold}
	t.Cleanup(j.end)
	if err := json.NewDecoder(out).Decode(&j.saw); err != nil {
		t.Fatalf("the probe said nothing of use: %v", err)
	}
	return j
}

// end ends the probe and waits for that.
func (j *jailed) end() {
	j.hold.Close()
	if state, err := j.child.Wait(); err != nil || !state.Success() {
		j.t.Errorf("the probe ended with %v, %v", state, err)
	}
}

// testDevices are those that monitors get.
func testDevices() []string { return []string{"/dev/kvm", netns.TunDevice} }

// newTestCell is a cell whose program is this test's binary.
func newTestCell(t *testing.T) *Cell {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("only root can confine anything")
	}
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	c, err := New(Spec{Binary: self, Devices: testDevices()}, NewUsers(DefaultUIDs))
	if errors.Is(err, unix.EPERM) {
		t.Skipf("this root may not make namespaces: %v", err)
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return c
}

func pathOf(pid int, name string) string { return fmt.Sprintf("/proc/%d/%s", pid, name) }
