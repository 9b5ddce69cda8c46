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

func TestHaltedIn(t *testing.T) {
	for _, tc := range []struct {
		name, console string
		want          bool
	}{
		{"halted", "[    1.0] hello\r\n[   12.345678] reboot: System halted\r\n", true},
		{"powered off, as far as that goes", "[   12.345678] reboot: Power down\n", true},
		{"without the end of the line", "[   12.345678] reboot: Power down", true},
		{"rebooted, which ends a machine by itself", "[   12.345678] reboot: Restarting system\n", false},
		{"read of it", "the log says: [   12.345678] reboot: System halted\n", false},
		{"something more", "[   12.345678] reboot: System halted?\n", false},
	} {
		t.Run(tc.name, func(t *testing.T) {
			if got := HaltedIn([]byte(tc.console)); got != tc.want {
				t.Errorf("got %v, want %v", got, tc.want)
			}
		})
	}
}
