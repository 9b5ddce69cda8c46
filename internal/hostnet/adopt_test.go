package hostnet

import (
	"fmt"
	"os"
	"os/exec"
	"strings"
	"testing"

	"github.com/forkd/forkd/internal/netpolicy"
)

// TestAdopt takes over networks that an earlier daemon made, with the policy that they hold and with another one: whatever is set then, nothing is left
// of what that daemon set.
func TestAdopt(t *testing.T) {
	if outside(t) {
		return
	}
	made := netpolicy.Policy{Mode: netpolicy.Allow, Rules: []string{"example.com"}, BandwidthMbit: 10}
	for _, found := range []netpolicy.Policy{made, {Mode: netpolicy.Open}, {}} {
		t.Run(found.String(), func(t *testing.T) {
			earlier := open(t, Config{})
			old := acquire(t, earlier)
			if err := old.SetPolicy(t.Context(), made); err != nil {
				t.Fatal(err)
			}
			takeTap(t, old)
			monitor := exec.Command("nsenter", fmt.Sprintf("--net=/proc/%d/fd/%d", os.Getpid(), old.ns.Fd()), "--", "sh", "-c", "echo; exec sleep 600")
			started, err := monitor.StdoutPipe()
			if err == nil {
				err = monitor.Start()
			}
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { _ = monitor.Process.Kill(); _ = monitor.Wait() })
			if _, err := started.Read(make([]byte, 1)); err != nil { // it is in the namespace
				t.Fatal(err)
			}
			if err := earlier.Close(); err != nil {
				t.Fatal(err)
			}

			s, err := open(t, Config{}).Adopt(monitor.Process.Pid, found)
			if err != nil || s == nil {
				t.Fatalf("Adopt: %v, %v", s, err)
			}
			want := netpolicy.Policy{Mode: netpolicy.Open}
			if err := s.SetPolicy(t.Context(), want); err != nil {
				t.Fatal(err)
			}
			if st, err := s.Status(); err != nil || st.Policy.String() != want.String() {
				t.Errorf("Status: %v, %v, want %v", st.Policy, err, want)
			}
			if shape := in(t, s, "tc", "qdisc", "show", "dev", tapName); strings.Contains(shape, "tbf") {
				t.Errorf("the bandwidth is limited still: %s", shape)
			}
			if rules := in(t, s, "nft", "list", "ruleset"); strings.Contains(rules, domainSets) || strings.Count(rules, sealPrefix) != 1 {
				t.Errorf("something is left of earlier policies:\n%s", rules)
			}
		})
	}
}
