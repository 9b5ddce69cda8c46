package memory

import (
	"bufio"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/forkd/forkd/internal/vmm"
)

// MappedImage makes the image that a monitor was started from out of what the monitor itself holds and maps, for a daemon that has
// started again: its predecessor's memfds are still there, in the children that map them. The image shares their memory, and
// only it can be the Image of a Target, since one that was read from disk anew has other files. Its files have the names that they were made
// with. It wraps vmm.ErrGone when there is no such monitor any more.
func MappedImage(id vmm.Process, bytes int64) (_ *Image, err error) {
	p, err := openProcess(id)
	if err != nil {
		return nil, err
	}
	defer p.close()
	m, err := mappedFiles(p, bytes)
	if err == nil {
		var img *Image
		if img, err = m.image(p, uint64(bytes)/PageSize); err == nil {
			return img, nil
		}
	}
	return nil, fmt.Errorf("image of monitor %d: %w", id.PID, p.blame(errors.Join(err, m.close())))
}

// SameFiles says whether two images are made of the same memfds.
func SameFiles(a, b *Image) bool {
	return slices.EqualFunc(a.files(), b.files(), func(a, b *sharedFile) bool {
		one, err := inodeOf(a.file)
		other, err2 := inodeOf(b.file)
		return err == nil && err2 == nil && one == other
	})
}

// NameOf is the name that a memfd was made with: what New was called with. It returns "" for a file that New did not make.
func NameOf(f *os.File) string {
	name, ok := strings.CutPrefix("/"+f.Name(), memfdName)
	if !ok {
		return ""
	}
	return name
}

// memfds are the files that a process maps its guest's memory from.
type memfds struct {
	file     map[inode]*os.File // those of the guest's size that it holds or maps
	order    []inode            // of the files that it maps, as first mapped
	mappings []Mapping
}

func (m *memfds) close() error {
	var errs []error
	for _, f := range m.file {
		errs = append(errs, f.Close())
	}
	return errors.Join(errs...)
}

// mappedFiles opens the memfds of a guest's size that a process holds, and finds out which of their pages it maps. It is to be closed on an
// error as well.
func mappedFiles(p *process, bytes int64) (*memfds, error) {
	found := &memfds{file: map[inode]*os.File{}}
	if err := found.openHeld(p, bytes); err != nil {
		return found, err
	}
	maps, err := os.Open(fmt.Sprintf("/proc/%d/maps", p.PID))
	if err != nil {
		return found, err
	}
	defer maps.Close()
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
		if !private || found.file[m.file] == nil {
			continue
		}
		if !slices.Contains(found.order, m.file) {
			found.order = append(found.order, m.file)
		}
		found.mappings = append(found.mappings, m)
	}
	if err := lines.Err(); err != nil || !empty {
		return found, err
	}
	return found, errUnmapped
}

// openHeld opens the memfds of a guest's size that a process holds: it takes no more than the right to trace it, other than what it maps does.
func (m *memfds) openHeld(p *process, bytes int64) error {
	dir := fmt.Sprintf("/proc/%d/fd/", p.PID)
	entries, err := os.ReadDir(dir)
	if err != nil {
		return err
	}
	for _, e := range entries {
		target, err := os.Readlink(dir + e.Name())
		if err != nil || !strings.HasPrefix(target, memfdName) {
			continue // it was closed meanwhile, or is none of ours
		}
		info, err := os.Stat(dir + e.Name())
		if err != nil || info.Size() != bytes || m.file[inodeOfInfo(info)] != nil {
			continue
		}
		fd, err := unix.Open(dir+e.Name(), unix.O_RDWR|unix.O_CLOEXEC, 0)
		if err != nil {
			return fmt.Errorf("%s%s: %w", dir, e.Name(), err)
		}
		f := os.NewFile(uintptr(fd), strings.TrimSuffix(strings.TrimPrefix(target, "/"), " (deleted)"))
		opened, err := inodeOf(f)
		if err != nil {
			return closeAfter(f, err)
		}
		if m.file[opened] != nil {
			f.Close()
			continue
		}
		m.file[opened] = f
	}
	return nil
}

// image makes an image of the files, which it owns when there is no error: a base and, of each layer that the monitor holds, the extents that
// are mapped. The base is the file that is mapped and no layer; should nothing be mapped from it any more, the lowest layer does in its place.
func (m *memfds) image(p *process, pages uint64) (*Image, error) {
	if len(m.mappings) == 0 {
		return nil, fmt.Errorf("it maps no memfd of a guest with %d pages", pages)
	}
	g, err := newGuestMap(m.mappings, pages)
	if err != nil {
		return nil, err
	}
	var order []inode // base first
	for _, fd := range p.LayerFDs {
		info, err := os.Stat(fmt.Sprintf("/proc/%d/fd/%d", p.PID, fd))
		if err != nil {
			return nil, err
		}
		id := inodeOfInfo(info)
		if m.file[id] == nil {
			return nil, fmt.Errorf("descriptor %d is not guest memory", fd)
		}
		order = append(order, id)
	}
	rest := slices.DeleteFunc(slices.Clone(m.order), func(id inode) bool { return slices.Contains(order, id) })
	if len(rest) > 1 {
		return nil, fmt.Errorf("it maps %d memfds of guests that are not its layers, not one", len(rest))
	}
	order = append(rest, order...)
	extents := map[inode][]Extent{}
	for _, part := range g.mappings {
		extents[part.file] = append(extents[part.file], part.Extent)
	}
	var layers []Layer
	for _, id := range order[1:] {
		layers = append(layers, Layer{m.file[id], Normalize(extents[id])})
	}
	img, err := NewImage(m.file[order[0]], layers...)
	if err != nil {
		return nil, err
	}
	for id, f := range m.file { // those that it holds and does not map
		if !slices.Contains(order, id) {
			f.Close()
		}
	}
	return img, nil
}
