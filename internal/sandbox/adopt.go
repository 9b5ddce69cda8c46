package sandbox

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"

	"github.com/forkd/forkd/internal/memory"
	"github.com/forkd/forkd/internal/vmm"
)

// adoptImage finds out what a machine that outlived the daemon was started from: the memfds are gone from everywhere but the machine, which
// still holds them. The image becomes resident as that of the snapshot, so that new children share it, unless another one is.
func (m *Manager) adoptImage(ctx context.Context, c *child, id string) error {
	p := c.machine.Process()
	held, err := heldMemory(p)
	if err != nil {
		return err
	}
	img, err := held.image()
	if err != nil {
		return errors.Join(err, held.close())
	}
	take := func(context.Context) (*memory.Image, error) { return img, nil }
	ref, err := m.cache.Acquire(ctx, id, take)
	if err != nil {
		return errors.Join(err, img.Close())
	}
	switch there := ref.Image(); {
	case there == img:
	case sameFiles(there, img):
		err = img.Close()
	default:
		ref.Release()
		// A name that is no snapshot's: the image goes with the machine.
		id = "machine~" + c.id
		ref = m.cache.PutRef(id, img)
	}
	c.image = ref
	c.drop = func() { m.dropAdopted(id) }
	return err
}

// dropAdopted gives back an adopted image that is no snapshot's and that no other machine uses.
func (m *Manager) dropAdopted(id string) {
	m.mu.Lock()
	kept := m.byID[id] != nil
	m.mu.Unlock()
	if !kept {
		_ = m.cache.Drop(id) // in use: the last machine's end comes here again
	}
}

// sameFiles says whether two images are made of the same memfds.
func sameFiles(a, b *memory.Image) bool {
	files := func(img *memory.Image) []fileID {
		ids := []fileID{idOf(img.Base())}
		for _, l := range img.Layers() {
			ids = append(ids, idOf(l.File))
		}
		return ids
	}
	return slices.Equal(files(a), files(b))
}

// fileID is the inode of a memfd: all of them are on one device.
type fileID uint64

func idOf(f *os.File) fileID {
	info, err := f.Stat()
	if err != nil {
		return 0
	}
	return fileID(info.Sys().(*syscall.Stat_t).Ino)
}

// held is the guest memory that a machine was started from, as its process holds and maps it.
type held struct {
	base   *os.File
	layers []memory.Layer // oldest first
}

func (h *held) close() error {
	var errs []error
	if h.base != nil {
		errs = append(errs, h.base.Close())
	}
	for _, l := range h.layers {
		errs = append(errs, l.File.Close())
	}
	return errors.Join(errs...)
}

// image is made of the held files, which it owns when there is no error.
func (h *held) image() (*memory.Image, error) { return memory.NewImage(h.base, h.layers...) }

// heldMemory opens the memfds of a machine's guest memory: its layers by their numbers, the base by what else it maps.
func heldMemory(p vmm.Process) (_ *held, err error) {
	mapped, err := mappedMemory(p.PID)
	if err != nil {
		return nil, err
	}
	h := &held{}
	defer func() {
		if err != nil {
			_ = h.close() // opened for reading what they are
		}
	}()
	for _, fd := range p.LayerFDs {
		f, err := openHeld(p.PID, strconv.Itoa(fd))
		if err != nil {
			return nil, err
		}
		extents := mapped[idOf(f)]
		delete(mapped, idOf(f))
		h.layers = append(h.layers, memory.Layer{File: f, Extents: extents})
	}
	if len(mapped) != 1 {
		return nil, fmt.Errorf("process %d maps %d memfds of guests that are not its layers, not one", p.PID, len(mapped))
	}
	entries, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", p.PID))
	if err != nil {
		return nil, err
	}
	for _, e := range entries {
		f, err := openHeld(p.PID, e.Name())
		if err != nil {
			continue // not one of ours
		}
		if _, ok := mapped[idOf(f)]; ok {
			h.base = f
			return h, nil
		}
		_ = f.Close()
	}
	return nil, fmt.Errorf("process %d maps a memfd that it does not hold open", p.PID)
}

// openHeld opens a memfd of guest memory that a process holds. It keeps its name.
func openHeld(pid int, fd string) (*os.File, error) {
	path := fmt.Sprintf("/proc/%d/fd/%s", pid, fd)
	target, err := os.Readlink(path)
	if err != nil {
		return nil, err
	}
	name := strings.TrimSuffix(filepath.Base(target), " (deleted)")
	if !strings.HasPrefix(name, "memfd:forkd-"+memoryPrefix) {
		return nil, fmt.Errorf("descriptor %s of process %d is %s, not guest memory", fd, pid, target)
	}
	raw, err := syscall.Open(path, syscall.O_RDWR|syscall.O_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	return os.NewFile(uintptr(raw), name), nil
}

// mappedMemory reads which pages of which memfds of guest memory a process maps, from /proc/PID/maps: "FROM-TO PERMS OFFSET DEV INODE PATH".
func mappedMemory(pid int) (map[fileID][]memory.Extent, error) {
	f, err := os.Open(fmt.Sprintf("/proc/%d/maps", pid))
	if err != nil {
		return nil, err
	}
	defer func() { _ = f.Close() }()
	out := map[fileID][]memory.Extent{}
	lines := bufio.NewScanner(f)
	for lines.Scan() {
		fields := strings.Fields(lines.Text())
		if len(fields) < 6 || !strings.HasPrefix(fields[5], "/memfd:forkd-"+memoryPrefix) {
			continue
		}
		var from, to, offset, ino uint64
		if _, err := fmt.Sscanf(fields[0]+" "+fields[2]+" "+fields[4], "%x-%x %x %d", &from, &to, &offset, &ino); err != nil {
			return nil, fmt.Errorf("mappings of process %d: %q: %w", pid, lines.Text(), err)
		}
		out[fileID(ino)] = append(out[fileID(ino)], memory.Extent{First: offset / memory.PageSize, N: (to - from) / memory.PageSize})
	}
	for id, extents := range out {
		out[id] = memory.Normalize(extents)
	}
	return out, lines.Err()
}
