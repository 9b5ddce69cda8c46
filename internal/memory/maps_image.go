package memory

import (
	"bufio"
	"fmt"
	"os"
	"strings"

	"github.com/forkd/forkd/internal/vmm"
)

// MappedImage makes the image that a monitor was started from out of what the monitor itself maps, for a daemon that has
// started again: its predecessor's memfds are still there, in the children that map them. The image shares their memory, and
// only it can be the Image of a Target, since one that was read from disk anew has other files. It wraps vmm.ErrGone when there
// is no such monitor any more.
func MappedImage(id vmm.Process, bytes int64) (_ *Image, err error) {
	p, err := openProcess(id)
	if err != nil {
		return nil, err
	}
	defer p.close()
	files, err := mappedFiles(p, bytes)
	defer func() {
		if err != nil {
			files.close()
		}
	}()
	if err != nil {
		return nil, fmt.Errorf("image of monitor %d: %w", id.PID, p.blame(err))
	}
	img, err := files.image(p, uint64(bytes)/PageSize)
	if err != nil {
		return nil, fmt.Errorf("image of monitor %d: %w", id.PID, p.blame(err))
	}
	return img, nil
}

// memfds are the files that a process maps its guest's memory from.
type memfds struct {
	file     map[inode]*os.File
	order    []inode // as first mapped
	mappings []Mapping
}

func (m *memfds) close() {
	for _, f := range m.file {
		f.Close()
	}
}

// mappedFiles opens the memfds of a guest's size that a process maps.
func mappedFiles(p *process, bytes int64) (*memfds, error) {
	found := &memfds{file: map[inode]*os.File{}}
	maps, err := os.Open(fmt.Sprintf("/proc/%d/maps", p.PID))
	if err != nil {
		return found, err
	}
	defer maps.Close()
	other := map[inode]bool{} // of another size
	lines := bufio.NewScanner(maps)
	empty := true
	for lines.Scan() {
		empty = false
		if !strings.Contains(lines.Text(), memfdName) {
			continue
		}
		m, private, err := parseMapsLine(lines.Bytes())
		if err != nil {
			return found, fmt.Errorf("%q: %w", lines.Text(), err)
		}
		if !private || other[m.file] {
			continue
		}
		if found.file[m.file] == nil {
			f, err := openMapping(p, m, bytes)
			if err != nil {
				return found, err
			}
			if f == nil {
				other[m.file] = true
				continue
			}
			found.file[m.file], found.order = f, append(found.order, m.file)
		}
		found.mappings = append(found.mappings, m)
	}
	if err := lines.Err(); err != nil || !empty {
		return found, err
	}
	return found, errUnmapped
}

// openMapping opens the file of a mapping, or returns nil if it is of another size.
func openMapping(p *process, m Mapping, bytes int64) (*os.File, error) {
	f, err := os.Open(fmt.Sprintf("/proc/%d/map_files/%x-%x", p.PID, m.Addr, m.end()))
	if err != nil {
		return nil, err
	}
	info, err := f.Stat()
	if err != nil {
		return nil, closeAfter(f, err)
	}
	if got := inodeOfInfo(info); got != m.file {
		return nil, closeAfter(f, fmt.Errorf("mapping at %#x has changed", m.Addr))
	}
	if info.Size() != bytes {
		return nil, f.Close()
	}
	return f, nil
}

// image makes an image of the files: a base and, of each other file, the extents that are mapped. The base is the file that the
// monitor does not hold as a layer; should nothing be mapped from it any more, any layer does in its place.
func (m *memfds) image(p *process, pages uint64) (*Image, error) {
	g, err := newGuestMap(m.mappings, pages)
	if err != nil {
		return nil, err
	}
	layer := map[inode]bool{}
	for _, fd := range p.LayerFDs {
		info, err := os.Stat(fmt.Sprintf("/proc/%d/fd/%d", p.PID, fd))
		if err != nil {
			return nil, err
		}
		layer[inodeOfInfo(info)] = true
	}
	base := m.order[0]
	for _, id := range m.order {
		if !layer[id] {
			base = id
		}
	}
	extents := map[inode][]Extent{}
	for _, part := range g.mappings {
		extents[part.file] = append(extents[part.file], part.Extent)
	}
	var layers []Layer
	for _, id := range m.order {
		if id != base {
			layers = append(layers, Layer{m.file[id], Normalize(extents[id])})
		}
	}
	return NewImage(m.file[base], layers...)
}
