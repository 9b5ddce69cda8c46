package image

import (
	"fmt"
	"io"
	"path"
	"sort"
	"strings"

	"golang.org/x/sys/unix"
)

// cpioEntry is a file of an initramfs: a directory, a device, or a regular file, told apart by mode (S_IFMT bits included).
type cpioEntry struct {
	name         string // relative, slash-separated, clean
	mode         uint32
	major, minor uint32 // of a device
	data         []byte // of a regular file
}

// cpioTrailer ends an archive.
const cpioTrailer = "TRAILER!!!"

// writeCPIO writes an archive in the "newc" format, the one the kernel unpacks as an initramfs (see the kernel's
// Documentation/driver-api/early-userspace/buffer-format.rst). The same entries always make the same bytes: they are sorted, owned
// by root, dated 1970. Parents that are not among them are added.
func writeCPIO(w io.Writer, entries []cpioEntry) error {
	all := map[string]cpioEntry{}
	for _, e := range entries {
		if e.name == "" || path.Clean("/"+e.name) != "/"+e.name {
			return fmt.Errorf("initramfs entry %q: the name is not a clean relative path", e.name)
		}
		for dir := path.Dir(e.name); dir != "."; dir = path.Dir(dir) {
			if _, ok := all[dir]; !ok {
				all[dir] = cpioEntry{name: dir, mode: unix.S_IFDIR | 0o755}
			}
		}
		all[e.name] = e
	}
	names := make([]string, 0, len(all))
	for name := range all {
		names = append(names, name)
	}
	sort.Strings(names) // a parent is a prefix of its children, so it comes first

	for i, name := range names {
		if err := writeCPIOEntry(w, i+1, all[name]); err != nil {
			return fmt.Errorf("write initramfs entry %q: %w", name, err)
		}
	}
	return writeCPIOEntry(w, 0, cpioEntry{name: cpioTrailer})
}

func writeCPIOEntry(w io.Writer, inode int, e cpioEntry) error {
	if int64(len(e.data)) > 1<<32-1 {
		return fmt.Errorf("%d bytes do not fit a newc archive", len(e.data))
	}
	links := 1
	if e.mode&unix.S_IFMT == unix.S_IFDIR {
		links = 2
	}
	fields := []int{inode, int(e.mode), 0, 0, links, 0, len(e.data), 0, 0, int(e.major), int(e.minor), len(e.name) + 1, 0}
	var b strings.Builder
	b.WriteString("070701")
	for _, f := range fields {
		fmt.Fprintf(&b, "%08X", f)
	}
	b.WriteString(e.name)
	b.WriteByte(0)
	b.WriteString(pad4(b.Len()))
	if _, err := io.WriteString(w, b.String()); err != nil {
		return err
	}
	if _, err := w.Write(e.data); err != nil {
		return err
	}
	_, err := io.WriteString(w, pad4(len(e.data)))
	return err
}

// pad4 is what is missing to a multiple of four.
func pad4(n int) string { return "\x00\x00\x00"[:-n&3] }
