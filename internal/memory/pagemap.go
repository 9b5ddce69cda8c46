package memory

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"
	"sync"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Bits of /proc/PID/pagemap, from Documentation/admin-guide/mm/pagemap.rst.
const (
	pmPresent   = 1 << 63
	pmSwapped   = 1 << 62 // or a marker or another special entry
	pmFile      = 1 << 61 // a page of the file: the process has none of its own
	pmUFFDWP    = 1 << 57
	pmSoftDirty = 1 << 55
	pmFrame     = 1<<55 - 1 // where a page is: in memory, in swap, or nowhere, which is what markers say
)

// From linux/fs.h, kernel 6.7.
const (
	pagemapScan = 0xc0606610 // PAGEMAP_SCAN

	pageIsWritten = 1 << 1 // has no write-protect bit
	pageIsFile    = 1 << 2
	pageIsPresent = 1 << 3
	pageIsSwapped = 1 << 4
)

// pmScanArg is struct pm_scan_arg.
type pmScanArg struct {
	size, flags, start, end, walkEnd, vec, vecLen, maxPages      uint64
	categoryInverted, categoryMask, categoryAnyofMask, returnAll uint64
}

// pageRegion is struct page_region.
type pageRegion struct{ start, end, categories uint64 }

// pagemap tells which pages of its image a process has replaced by its own: copied on a write, present or swapped out. It stays
// with the address space it was opened for, whatever becomes of the pid.
type pagemap struct {
	proc    *process
	file    *os.File
	noScan  bool          // the kernel has no PAGEMAP_SCAN
	marker  func() uint64 // the frame of a marker, 0 when it can't be told
	regions [512]pageRegion
	entries [8192]uint64
}

func openPagemap(p *process) (*pagemap, error) {
	f, err := os.Open(fmt.Sprintf("/proc/%d/pagemap", p.PID))
	if err != nil {
		return nil, p.blame(fmt.Errorf("page table of monitor %d: %w", p.PID, err))
	}
	return &pagemap{proc: p, file: f, marker: sync.OnceValue(markerFrame)}, nil
}

func (m *pagemap) close() { m.file.Close() }

// owned calls found for each run of the process's own pages within e, in order.
func (m *pagemap) owned(g *guestMap, e Extent, found func(Extent)) error {
	return m.each(g, e, func(run Mapping, part Extent) error {
		if !m.noScan {
			err := m.scan(run, part, found)
			if !errors.Is(err, unix.ENOTTY) && !errors.Is(err, unix.EINVAL) {
				return err
			}
			m.noScan = true
		}
		return m.read(run, part, m.ownPage, found)
	})
}

// ownedProtected is owned for write-protected pages. Of these a scan can't tell a marker from a page that was swapped out.
func (m *pagemap) ownedProtected(g *guestMap, e Extent, found func(Extent)) error {
	return m.each(g, e, func(run Mapping, part Extent) error { return m.read(run, part, m.ownPage, found) })
}

// rewritten calls found for each run of the process's own pages within e that were written since clearSoftDirty.
func (m *pagemap) rewritten(g *guestMap, e Extent, found func(Extent)) error {
	return m.each(g, e, func(run Mapping, part Extent) error {
		return m.read(run, part, func(entry uint64) bool { return m.ownPage(entry) && entry&pmSoftDirty != 0 }, found)
	})
}

func (m *pagemap) each(g *guestMap, e Extent, do func(Mapping, Extent) error) error {
	if err := within(g.runs, e, do); err != nil {
		return m.proc.blame(fmt.Errorf("page table of monitor %d: %w", m.proc.PID, err))
	}
	return nil
}

// scan asks the kernel for the pages that are not the file's. What looks swapped and protected may be a marker that was left
// over, which only the entry itself tells.
func (m *pagemap) scan(run Mapping, e Extent, found func(Extent)) error {
	arg := pmScanArg{
		start: run.at(e.First), end: run.at(e.First) + uint64(e.Bytes()),
		vec: uint64(uintptr(unsafe.Pointer(&m.regions))), vecLen: uint64(len(m.regions)),
		categoryInverted: pageIsFile, categoryMask: pageIsFile, categoryAnyofMask: pageIsPresent | pageIsSwapped,
		returnAll: pageIsPresent | pageIsSwapped | pageIsWritten,
	}
	arg.size = uint64(unsafe.Sizeof(arg))
	for arg.start < arg.end {
		n, _, errno := unix.Syscall(unix.SYS_IOCTL, m.file.Fd(), pagemapScan, uintptr(unsafe.Pointer(&arg)))
		if errno != 0 {
			return errno
		}
		for _, r := range m.regions[:n] {
			part := Extent{run.First + (r.start-run.Addr)/PageSize, (r.end - r.start) / PageSize}
			if r.categories&(pageIsPresent|pageIsWritten) != 0 {
				found(part)
				continue
			}
			if err := m.read(run, part, m.ownPage, found); err != nil {
				return err
			}
		}
		if arg.walkEnd <= arg.start {
			return fmt.Errorf("PAGEMAP_SCAN stands still at %#x", arg.start)
		}
		arg.start = arg.walkEnd
	}
	return nil
}

// read looks at every entry of a range.
func (m *pagemap) read(run Mapping, e Extent, want func(uint64) bool, found func(Extent)) error {
	pending := Extent{}
	for e.N > 0 {
		entries := m.entries[:min(e.N, uint64(len(m.entries)))]
		b := unsafe.Slice((*byte)(unsafe.Pointer(&entries[0])), len(entries)*8)
		n, err := m.file.ReadAt(b, int64(run.at(e.First)/PageSize*8))
		if n < len(b) {
			if err == nil || err == io.EOF {
				err = unix.ESRCH // no address space any more
			}
			return err
		}
		for i, entry := range entries {
			if !want(entry) {
				continue
			}
			page := e.First + uint64(i)
			if pending.N > 0 && pending.End() != page {
				found(pending)
				pending.N = 0
			}
			if pending.N == 0 {
				pending.First = page
			}
			pending.N++
		}
		e = from(e, e.First+uint64(len(entries)))
	}
	if pending.N > 0 {
		found(pending)
	}
	return nil
}

// ownPage reports whether an entry is a page of the process's own. A page that is not there but write-protected has a marker,
// which looks like a page in swap, but at a place that no page can have; which one depends on the kernel. When in doubt it is a
// page.
func (m *pagemap) ownPage(entry uint64) bool {
	switch {
	case entry&(pmPresent|pmSwapped) == 0 || entry&pmFile != 0:
		return false
	case entry&pmPresent != 0 || entry&pmUFFDWP == 0:
		return true
	}
	marker := m.marker()
	return marker == 0 || entry&pmFrame != marker
}

// markerFrame makes a marker in our own memory and looks at it.
func markerFrame() (frame uint64) {
	protectOwnPage(func(page []byte) error {
		entry, err := ownEntry(page)
		if err == nil && entry&pmSwapped != 0 && entry&pmUFFDWP != 0 {
			frame = entry & pmFrame
		}
		return err
	})
	return frame
}

// ownEntry is the entry of a page of our own.
func ownEntry(page []byte) (uint64, error) {
	f, err := os.Open("/proc/self/pagemap")
	if err != nil {
		return 0, err
	}
	defer f.Close()
	var entry [8]byte
	_, err = f.ReadAt(entry[:], int64(uintptr(unsafe.Pointer(&page[0]))/PageSize*8))
	return binary.LittleEndian.Uint64(entry[:]), err
}

// clearSoftDirty starts to tell written pages anew, for the whole process.
func clearSoftDirty(p *process) error {
	const softDirtyBits = "4"
	if err := os.WriteFile(fmt.Sprintf("/proc/%d/clear_refs", p.PID), []byte(softDirtyBits), 0); err != nil {
		return p.blame(fmt.Errorf("clear soft-dirty bits of monitor %d: %w", p.PID, err))
	}
	return nil
}

// hasSoftDirty reports whether the kernel keeps soft-dirty bits (CONFIG_MEM_SOFT_DIRTY), by a page of our own that was just
// written.
func hasSoftDirty() bool {
	page, err := unix.Mmap(-1, 0, PageSize, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	if err != nil {
		return false
	}
	defer unix.Munmap(page)
	page[0] = 1
	entry, err := ownEntry(page)
	return err == nil && entry&pmSoftDirty != 0
}
