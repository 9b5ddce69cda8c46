package memory

import (
	"bufio"
	"bytes"
	"cmp"
	"fmt"
	"io"
	"os"
	"slices"
	"strconv"

	"golang.org/x/sys/unix"
)

// Mapping is a run of guest memory as a process maps it.
type Mapping struct {
	Extent        // the guest's pages
	Addr   uint64 // where the process has the first of them
	file   inode
}

// end is the address behind the mapping.
func (m Mapping) end() uint64 { return m.Addr + uint64(m.Bytes()) }

// at is the address of a page of the mapping.
func (m Mapping) at(page uint64) uint64 { return m.Addr + (page-m.First)*PageSize }

// guestMap is where a process has its guest's memory, every page of it once.
type guestMap struct {
	mappings []Mapping // in guest order
	runs     []Mapping // the same, neighbours joined where addresses go on as the guest's pages do
	byAddr   []Mapping // runs in address order
}

// guestFiles are the files that guest memory is mapped from, by inode.
func guestFiles(img *Image) (map[inode]bool, error) {
	files := map[inode]bool{}
	for _, f := range img.files() {
		id, err := inodeOf(f.file)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", f.file.Name(), err)
		}
		files[id] = true
	}
	return files, nil
}

// readGuestMap finds the private mappings of an image's files in a process. A file's offsets are the guest's addresses. It is
// an error when they don't cover guest memory exactly.
func readGuestMap(p *process, img *Image) (*guestMap, error) {
	files, err := guestFiles(img)
	if err != nil {
		return nil, err
	}
	f, err := os.Open(fmt.Sprintf("/proc/%d/maps", p.PID))
	if err != nil {
		return nil, p.blame(fmt.Errorf("mappings of monitor %d: %w", p.PID, err))
	}
	defer f.Close()
	found, err := parseMaps(f, files)
	if err != nil {
		return nil, p.blame(fmt.Errorf("mappings of monitor %d: %w", p.PID, err))
	}
	g, err := newGuestMap(found, uint64(img.Bytes())/PageSize)
	if err != nil {
		return nil, p.blame(fmt.Errorf("guest memory of monitor %d: %w", p.PID, err))
	}
	return g, nil
}

func newGuestMap(mappings []Mapping, pages uint64) (*guestMap, error) {
	slices.SortFunc(mappings, func(a, b Mapping) int { return cmp.Compare(a.First, b.First) })
	g := &guestMap{mappings: mappings}
	next := uint64(0)
	for _, m := range mappings {
		if m.First != next {
			return nil, fmt.Errorf("page %d is mapped where page %d was expected: is that the image it was started from?", m.First, next)
		}
		next = m.End()
		if k := len(g.runs) - 1; k >= 0 && g.runs[k].end() == m.Addr {
			g.runs[k].N += m.N
			continue
		}
		g.runs = append(g.runs, m)
	}
	if next != pages {
		return nil, fmt.Errorf("%d of %d pages are mapped: is that the image it was started from?", next, pages)
	}
	g.byAddr = slices.Clone(g.runs)
	slices.SortFunc(g.byAddr, func(a, b Mapping) int { return cmp.Compare(a.Addr, b.Addr) })
	return g, nil
}

// pages is the size of guest memory.
func (g *guestMap) pages() uint64 { return g.mappings[len(g.mappings)-1].End() }

// page tells which of the guest's pages is at an address.
func (g *guestMap) page(addr uint64) (uint64, bool) {
	i, _ := slices.BinarySearchFunc(g.byAddr, addr, func(m Mapping, addr uint64) int {
		if m.end() <= addr {
			return -1
		}
		return 1
	})
	if i == len(g.byAddr) || addr < g.byAddr[i].Addr {
		return 0, false
	}
	m := g.byAddr[i]
	return m.First + (addr-m.Addr)/PageSize, true
}

// within calls do for the parts of an extent that lie in one of parts, which is g.runs or g.mappings.
func within(parts []Mapping, e Extent, do func(m Mapping, part Extent) error) error {
	i, _ := slices.BinarySearchFunc(parts, e.First, func(m Mapping, page uint64) int {
		if m.End() <= page {
			return -1
		}
		return 1
	})
	for ; e.N > 0 && i < len(parts); i++ {
		part := Extent{e.First, min(e.N, parts[i].End()-e.First)}
		if err := do(parts[i], part); err != nil {
			return err
		}
		e.First, e.N = part.End(), e.N-part.N
	}
	return nil
}

// errUnmapped is what a process looks like that is ending: its memory goes first.
var errUnmapped = fmt.Errorf("it has no memory any more: %w", unix.ESRCH)

// parseMaps picks the private mappings of files out of /proc/PID/maps.
func parseMaps(r io.Reader, files map[inode]bool) ([]Mapping, error) {
	var found []Mapping
	lines := bufio.NewScanner(r)
	lines.Buffer(make([]byte, 64<<10), 1<<20)
	empty := true
	for lines.Scan() {
		empty = false
		m, private, err := parseMapsLine(lines.Bytes())
		if err != nil {
			return nil, fmt.Errorf("%q: %w", lines.Text(), err)
		}
		if !files[m.file] {
			continue
		}
		if !private {
			return nil, fmt.Errorf("%q is shared: a child maps its image privately", lines.Text())
		}
		found = append(found, m)
	}
	if err := lines.Err(); err != nil || !empty {
		return found, err
	}
	return nil, errUnmapped
}

// parseMapsLine reads "7f12a000-7f13a000 rw-p 00001000 00:01 1234 /memfd:forkd-x (deleted)". It allocates nothing: a monitor of
// an image with deep layers has thousands of these.
func parseMapsLine(line []byte) (m Mapping, private bool, err error) {
	var fields [5][]byte
	for i := range fields {
		fields[i], line, _ = bytes.Cut(line, []byte(" "))
	}
	from, to, _ := bytes.Cut(fields[0], []byte("-"))
	major, minor, _ := bytes.Cut(fields[3], []byte(":"))
	var n [6]uint64
	for i, s := range [...][]byte{from, to, fields[2], major, minor} {
		if n[i], err = strconv.ParseUint(string(s), 16, 64); err != nil {
			return Mapping{}, false, err
		}
	}
	if n[5], err = strconv.ParseUint(string(fields[4]), 10, 64); err != nil {
		return Mapping{}, false, err
	}
	if n[1] < n[0] || n[0]%PageSize != 0 || n[1]%PageSize != 0 || n[2]%PageSize != 0 {
		return Mapping{}, false, fmt.Errorf("not a range of pages")
	}
	m = Mapping{
		Extent: Extent{n[2] / PageSize, (n[1] - n[0]) / PageSize}, Addr: n[0],
		file: inode{uint32(n[3]), uint32(n[4]), n[5]},
	}
	return m, bytes.HasSuffix(fields[1], []byte("p")), nil
}
