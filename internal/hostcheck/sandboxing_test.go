package hostcheck

import (
	"context"
	"errors"
	"slices"
	"strings"
	"testing"
	"testing/fstest"
)

// TestSandboxing is about what keeps machines apart from the host.
func TestSandboxing(t *testing.T) {
	limits := func(l Limits) Options { return Options{Limits: func() (Limits, error) { return l, nil }} }
	confined := func(level string, err error) Options {
		return Options{Confinement: func() (string, error) { return level, err }}
	}
	closed := func(chains ...string) Options {
		return Options{Closed: func() ([]string, error) { return chains, nil }}
	}
	network := Options{Network: func() error { return nil }}
	why := errors.New("no such controller")
	for _, tt := range []struct {
		name, check string
		opt         Options
		files       map[string]string
		legacy      string // what iptables-legacy says
		uid         int
		status      Status
		detail, fix string
	}{
		{name: "confined", check: "confinement", opt: confined("full", nil), status: OK, detail: "full: each monitor has a user id"},
		{name: "not confined", check: "confinement", opt: confined("none", nil), status: Warn, detail: "run as root", fix: "--confine require"},
		{name: "not root", check: "confinement", opt: confined("user", nil), status: Warn, detail: "the daemon's user", fix: "sudo"},
		{name: "can't be confined", check: "confinement", opt: confined("", why), status: Fail, detail: "no such controller", fix: "--confine off"},

		{name: "all limits", check: "cgroup", opt: limits(Limits{Version: 2, Dir: "/sys/fs/cgroup/x"}), status: OK, detail: "version 2, in /sys/fs/cgroup/x"},
		{name: "all but the disk", check: "cgroup", opt: limits(Limits{Version: 1, Dir: "/x", Missing: []string{"io"}, Why: why}), status: Warn, detail: "all but the disk"},
		{name: "not delegated", check: "cgroup", opt: limits(Limits{Version: 2, Missing: []string{"memory", "cpu", "pids", "io"}, Why: why}), status: Warn, detail: "no control group can be made", fix: "Delegate=yes"},
		{name: "no pids", check: "cgroup", opt: limits(Limits{Version: 2, Dir: "/x", Missing: []string{"pids"}, Why: why}), status: Warn, detail: "without pids", fix: "Delegate=yes"},

		{name: "forwards", check: "network", opt: network, files: map[string]string{forwardFile: "1\n"}, status: OK, detail: "ip_forward is 1"},
		{name: "will forward", check: "network", opt: network, files: map[string]string{forwardFile: "0\n"}, status: OK, detail: "switches net.ipv4.ip_forward on"},
		{name: "can't forward", check: "network", opt: network, files: map[string]string{forwardFile: "0\n", "proc/self/mounts": "proc /proc proc rw 0 0\nproc /proc/sys proc ro,nosuid 0 0\n"},
			status: Warn, detail: "/proc/sys can't be written", fix: "sysctl -w"},

		{name: "no firewall", check: "firewall", opt: closed(), status: OK},
		{name: "nftables", check: "firewall", opt: closed("inet filter forward"), status: Warn, detail: "dropped by inet filter forward", fix: `nft insert rule inet filter forward iifname "fk*" accept`},
		{name: "seen by root only", check: "firewall", opt: closed("inet filter forward"), uid: 1000, status: OK, detail: "only root"},
		{name: "legacy", check: "firewall", opt: closed(), files: map[string]string{"proc/net/ip_tables_names": "nat\nfilter\n"}, legacy: "-P FORWARD DROP\n-A FORWARD -j DOCKER\n",
			status: Warn, detail: "legacy", fix: "iptables-legacy -I FORWARD -i fk+"},
		{name: "legacy, opened", check: "firewall", opt: closed(), files: map[string]string{"proc/net/ip_tables_names": "filter\n"}, legacy: "-P FORWARD DROP\n-A FORWARD -i fk+ -j ACCEPT\n", status: OK},
	} {
		t.Run(tt.name, func(t *testing.T) {
			files := goodFiles()
			for name, text := range tt.files {
				files[name] = &fstest.MapFile{Data: []byte(text)}
			}
			h := goodHost(files)
			h.UID = tt.uid
			good := h.Output
			h.Output = func(ctx context.Context, program string, args ...string) (string, error) {
				if strings.Contains(program, "legacy") {
					return tt.legacy, nil
				}
				return good(ctx, program, args...)
			}
			checks := Run(t.Context(), h, tt.opt)
			got := checks[slices.IndexFunc(checks, func(c Check) bool { return c.Name == tt.check })]
			if got.Status != tt.status || !strings.Contains(got.Detail, tt.detail) || !strings.Contains(got.Fix, tt.fix) || (got.Fix == "") != (tt.fix == "") {
				t.Errorf("got %+v, want %s about %q, and %q to mend it", got, tt.status, tt.detail, tt.fix)
			}
		})
	}
}
