package hostnet

import (
	"os/exec"
	"slices"
	"testing"
)

// TestClosed makes firewalls of other programs and asks which of them drop what machines send.
func TestClosed(t *testing.T) {
	if _, err := exec.LookPath("nft"); err != nil {
		t.Skip("nft is not installed")
	}
	if outside(t) {
		return
	}
	nft := func(words string) { run(t, "nft", words) }
	for _, step := range []struct {
		name string
		do   string
		want []string
	}{
		{"none", "add table ip filter", nil},
		{"one that accepts", "add chain ip filter FORWARD { type filter hook forward priority 0; policy accept; }", nil},
		{"one that drops", "add chain ip filter FORWARD { policy drop; }", []string{"ip filter FORWARD"}},
		{"one that drops what comes in", "add table inet in; add chain inet in input { type filter hook input priority 0; policy drop; }", []string{"ip filter FORWARD"}},
		{"another", "add table inet fw; add chain inet fw passing { type filter hook forward priority 0; policy drop; }", []string{"ip filter FORWARD", "inet fw passing"}},
		{"one that is opened", `add rule inet fw passing iifname "fk*" accept`, []string{"ip filter FORWARD"}},
		{"one that is opened in another chain", `add chain ip filter USER; add rule ip filter USER iifname "fk*" accept; add rule ip filter FORWARD jump USER`, nil},
	} {
		nft(step.do)
		got, err := Closed()
		if err != nil || !slices.Equal(got, step.want) {
			t.Errorf("%s: got %q, %v, want %q", step.name, got, err, step.want)
		}
	}
}
