package confine

import (
	"errors"
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/forkd/forkd/internal/netns"
)

// TestOwnTap gives a probe one of two taps in its network namespace. It opens that one, once, and makes no other; in a jail, too.
func TestOwnTap(t *testing.T) {
	t.Run("cell", func(t *testing.T) { checkOwnTap(t, newTestCell(t)) })
	for name, jailer := range jailers(t) {
		t.Run("jail of the "+name, func(t *testing.T) { checkOwnTap(t, newJailedCell(t, jailer)) })
	}
}

func checkOwnTap(t *testing.T, c *Cell) {
	t.Helper()
	if _, err := os.Stat(netns.TunDevice); err != nil {
		t.Skipf("no taps here: %v", err)
	}
	var mine, other *os.File
	ns, err := netns.New(func() (err error) {
		if mine, err = netns.OpenTap("mine"); err == nil {
			other, err = netns.OpenTap("other")
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	defer ns.Close()
	give := func(uid uint32) error {
		if err := netns.HandOver(other, uid+1); err != nil {
			return err
		}
		return netns.HandOver(mine, uid)
	}
	j := probe(t, c, questions{Taps: []string{"mine", "mine", "other"}}, Command{NetNS: ns, Give: give})
	var opened []string
	for _, did := range j.saw.Did {
		if strings.Contains(did, "tap") {
			opened = append(opened, did)
		}
	}
	if got := fmt.Sprint(opened); got != "[open the tap mine]" {
		t.Errorf("it could do %s, want it to open its own tap once", got)
	}
	failed := errors.New("not given")
	before := len(c.users.used)
	if _, _, err := c.Start(Command{Give: func(uint32) error { return failed }}); err == nil {
		t.Error("it started without what could not be given to it")
	}
	if n := len(c.users.used); n != before {
		t.Errorf("%d user ids are in use, want %d", n, before)
	}
}
