package vmm

import (
	"strings"
	"testing"
)

func TestPanicIn(t *testing.T) {
	const panicked = "[    9.1] Kernel panic - not syncing: sysrq triggered crash\r\n[    9.2] CPU: 0 PID: 1 Comm: sh\r\n"
	for _, tc := range []struct{ name, console, want string }{
		{"nothing", "", ""},
		{"a panic", "[    1.0] hello\n" + panicked + "[    9.9] Rebooting in 1 seconds..\n", "sysrq triggered crash"},
		{"the end of one", panicked + "[    9.9] ---[ end Kernel panic - not syncing: sysrq triggered crash ]---\r\n", "sysrq triggered crash"},
		{"a reboot by somebody who has read of one", panicked + "[   12.0] reboot: Restarting system\n", ""},
		{"a reboot", "[   12.0] reboot: Restarting system\n", ""},
		{"one without a reason", "Kernel panic - not syncing: \x1b\n", "for a reason that it did not say"},
		{"one with a long reason", "Kernel panic - not syncing: " + strings.Repeat("ä", 200), strings.Repeat("ä", 100)},
		{"one long ago", panicked + strings.Repeat("x\n", panicTail), ""},
	} {
		t.Run(tc.name, func(t *testing.T) {
			if got := PanicIn([]byte(tc.console)); got != tc.want {
				t.Errorf("got %q, want %q", got, tc.want)
			}
		})
	}
}
