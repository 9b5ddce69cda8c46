package vmm

import (
	"bytes"
	"regexp"
	"strings"
)

// Words of a Linux kernel that are on the console whatever its log level is (kernel/panic.c, kernel/reboot.c).
const (
	panicWords  = "Kernel panic - not syncing: "
	rebootWords = "reboot: " // "reboot: Restarting system", "reboot: Power down": somebody asked for it
)

// panicTail is how much of a console is looked at: a panic is followed by a trace of some KiB.
const panicTail = 16 << 10

// PanicIn says what the kernel of a guest that has rebooted died of, from its console; "" when it did not. All our guests reboot when their kernels
// panic, and to their monitors that looks like any other reboot. A guest can lie about its own end: nothing but words depends on it.
func PanicIn(console []byte) string {
	tail := console[max(0, len(console)-panicTail):]
	at := bytes.LastIndex(tail, []byte(panicWords))
	if at < 0 || bytes.Contains(tail[at:], []byte(rebootWords)) {
		return ""
	}
	line, _, _ := strings.Cut(string(tail[at+len(panicWords):]), "\n")
	line = strings.Map(func(r rune) rune {
		if r < ' ' || r == 0x7f {
			return -1
		}
		return r
	}, strings.ToValidUTF8(line, "?"))
	line = strings.TrimSuffix(strings.TrimSpace(line), " ]---")
	const most = 200
	if len(line) > most {
		line = strings.ToValidUTF8(line[:most], "")
	}
	if line == "" {
		return "for a reason that it did not say"
	}
	return line
}

// haltLine is the last thing a kernel says that stops for good and has no power to switch off (kernel/reboot.c).
var haltLine = regexp.MustCompile(`(?m)^\[ *\d+\.\d+\] reboot: (?:System halted|Power down)\r?$`)

// HaltedIn tells whether a kernel said on its console, which is given from the begin of a line on, that it stops for good. Programs can say so, too:
// of their own machine.
func HaltedIn(console []byte) bool { return haltLine.Match(console) }
