// Package hostcpu tells what the rest of forkd has to know of the host's processor: the rate of its time stamp counter, which a guest
// can't find out by itself on a machine without timers, and its flags. It is about the host only and keeps nothing.
package hostcpu

import (
	"bufio"
	"fmt"
	"io/fs"
	"maps"
	"slices"
	"strings"
)

// Info is what the kernel says of the first processor.
type Info struct {
	Vendor string // "GenuineIntel", "AuthenticAMD"
	Family string // a number
	Model  string // for people
	Flags  map[string]bool
}

// Virtualised tells whether the host is itself a virtual machine.
func (i Info) Virtualised() bool { return i.Flags["hypervisor"] }

// StableTSC tells whether the time stamp counter runs at one rate in all power states. Guests' clocks rest on that.
func (i Info) StableTSC() bool { return i.Flags["constant_tsc"] && i.Flags["nonstop_tsc"] }

// Features are the flags in order, with spaces between them.
func (i Info) Features() string { return strings.Join(slices.Sorted(maps.Keys(i.Flags)), " ") }

// Read reads proc/cpuinfo below root, which is os.DirFS("/") but for tests.
func Read(root fs.FS) (Info, error) {
	f, err := root.Open("proc/cpuinfo")
	if err != nil {
		return Info{}, fmt.Errorf("read processor description: %w", err)
	}
	defer f.Close()
	info := Info{Flags: map[string]bool{}}
	lines := bufio.NewScanner(f)
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		key, value, ok := strings.Cut(lines.Text(), ":")
		if !ok {
			break // the first processor ends with an empty line
		}
		value = strings.TrimSpace(value)
		switch strings.TrimSpace(key) {
		case "vendor_id":
			info.Vendor = value
		case "cpu family":
			info.Family = value
		case "model name":
			info.Model = value
		case "flags":
			for flag := range strings.FieldsSeq(value) {
				info.Flags[flag] = true
			}
		}
	}
	if err := lines.Err(); err != nil {
		return Info{}, fmt.Errorf("read processor description: %w", err)
	}
	return info, nil
}
