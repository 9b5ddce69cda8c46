package memory

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/forkd/forkd/internal/vmm"
)

// MaxOverlay is how many extents are mapped over a base at most: each takes up to two mappings of a monitor's 65,530.
const MaxOverlay = 10_000

// ErrTooManyExtents says that an image has more extents than can be mapped into a monitor.
var ErrTooManyExtents = errors.New("too many extents to map")

// Overlay maps the layers of an image over its base in a monitor, which has mapped the base whole. fds are the numbers
// under which the monitor holds the files of img.Layers(), in order; nil stands for the monitor's LayerFDs. All is done in one
// stop of its idle thread, and checked afterwards. On an error the monitor's memory is in between and the monitor must be
// killed; nothing has been changed if the error wraps ErrTooManyExtents (flatten the image) or ErrNotPermitted (flatten it,
// too: no layers can be mapped on this host).
//
// Preconditions: the monitor has not run the guest. It has not loaded a device state either, unless it reads nothing of guest memory
// when it does (vmm.Features.LayersLoaded).
func Overlay(ctx context.Context, id vmm.Process, img *Image, fds []int) error {
	layers := img.Layers()
	if len(layers) == 0 {
		return nil
	}
	if n := extentCount(img.Plan()); n > MaxOverlay {
		return fmt.Errorf("image of %d layers has %d extents, a monitor can be given %d: %w: flatten it",
			len(layers), n, MaxOverlay, ErrTooManyExtents)
	}
	if fds == nil {
		fds = id.LayerFDs
	}
	p, err := openProcess(id)
	if err != nil {
		return err
	}
	defer p.close()
	if err := checkLayerFDs(p, layers, fds); err != nil {
		return p.blame(err)
	}
	before, err := readGuestMap(p, img)
	if err != nil {
		return err
	}
	rows := overlayCalls(before, img.Plan(), fds) // the same files as img.Layers(), in the same order
	err = inThread(ctx, p, func(r *remote) error {
		if err := r.callAll(ctx, rows); err != nil {
			return fmt.Errorf("map layers: %w", err)
		}
		for _, row := range rows {
			if at := row.args[0]; row.result != at {
				return fmt.Errorf("map layers: mapped at %#x instead of %#x", row.result, at)
			}
		}
		return nil
	})
	if err != nil {
		return fmt.Errorf("overlay: %w", err)
	}
	return checkOverlay(p, img, before)
}

// checkLayerFDs makes sure that the monitor holds the very files that we mean under those numbers.
func checkLayerFDs(p *process, layers []Layer, fds []int) error {
	if len(fds) != len(layers) {
		return fmt.Errorf("overlay: monitor %d holds %d layers, the image has %d", p.PID, len(fds), len(layers))
	}
	for i, l := range layers {
		want, err := inodeOf(l.File)
		if err != nil {
			return fmt.Errorf("overlay: layer %d: %w", i, err)
		}
		theirs, err := os.Stat(fmt.Sprintf("/proc/%d/fd/%d", p.PID, fds[i]))
		if err != nil {
			return fmt.Errorf("overlay: descriptor %d of monitor %d: %w", fds[i], p.PID, err)
		}
		if got := inodeOfInfo(theirs); got != want {
			return fmt.Errorf("overlay: descriptor %d of monitor %d is not layer %d, %s", fds[i], p.PID, i, l.File.Name())
		}
	}
	return nil
}

// overlayCalls are the system calls that map layers over guest memory.
func overlayCalls(g *guestMap, layers []Layer, fds []int) []callRow {
	const prot, flags = unix.PROT_READ | unix.PROT_WRITE, unix.MAP_PRIVATE | unix.MAP_FIXED | unix.MAP_NORESERVE
	var rows []callRow
	for i, l := range layers {
		for _, e := range l.Extents {
			within(g.runs, e, func(run Mapping, part Extent) error {
				args := [6]uint64{run.at(part.First), uint64(part.Bytes()), prot, flags, uint64(fds[i]), uint64(part.Offset())}
				rows = append(rows, callRow{nr: unix.SYS_MMAP, args: args})
				return nil
			})
		}
	}
	return rows
}

// checkOverlay looks whether guest memory is where it was and every page of it comes from the file that the image says.
func checkOverlay(p *process, img *Image, before *guestMap) error {
	after, err := readGuestMap(p, img)
	if err != nil {
		return fmt.Errorf("overlay: check: %w", err)
	}
	if !slices.Equal(rangesOf(after.runs), rangesOf(before.runs)) {
		return fmt.Errorf("overlay: check: monitor %d has its guest's memory at other addresses than before", p.PID)
	}
	base := []Extent{{0, after.pages()}}
	for _, l := range img.Layers() {
		base = Subtract(base, l.Extents)
		if err := checkFile(p, after, l.File, l.Extents); err != nil {
			return err
		}
	}
	return checkFile(p, after, img.Base(), base)
}

// checkFile looks whether exactly those extents are mapped from a file.
func checkFile(p *process, g *guestMap, f *os.File, want []Extent) error {
	id, err := inodeOf(f)
	if err != nil {
		return fmt.Errorf("overlay: check: %s: %w", f.Name(), err)
	}
	var got []Extent
	for _, m := range g.mappings {
		if m.file == id {
			got = append(got, m.Extent)
		}
	}
	if got = Normalize(got); !slices.Equal(got, want) {
		return fmt.Errorf("overlay: check: monitor %d maps %d pages of %s in %d extents, not %d in %d",
			p.PID, Pages(got), f.Name(), len(got), Pages(want), len(want))
	}
	return nil
}

func extentCount(layers []Layer) int {
	n := 0
	for _, l := range layers {
		n += len(l.Extents)
	}
	return n
}

func rangesOf(runs []Mapping) []Mapping {
	out := slices.Clone(runs)
	for i := range out {
		out[i].file = inode{}
	}
	return out
}
