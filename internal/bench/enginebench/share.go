package enginebench

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"os"
	"slices"

	"github.com/forkd/forkd/internal/memory"
	"github.com/forkd/forkd/internal/vmm"
	"github.com/forkd/forkd/internal/vmm/probeguest"
)

// What is measured of sharing.
const (
	shareMiB      = 2048
	shareChildren = 50
	touchMiB      = 8
)

// share measures what children of a large snapshot cost that each touch a part of it.
func (r *rig) share(ctx context.Context, _ Options, report *Report) (err error) {
	r.say("%d children of a snapshot of %d MiB that touch %d MiB each", shareChildren, shareMiB, touchMiB)
	f, err := r.freeze(ctx, shareMiB)
	if err != nil {
		return err
	}
	defer f.close()
	var machines []vmm.Machine
	defer func() {
		for _, m := range machines {
			err = errors.Join(err, m.Kill())
		}
	}()
	before, err := available()
	if err != nil {
		return err
	}
	for range shareChildren {
		m, err := r.child(ctx, f.shape, f.image, f.state)
		if err != nil {
			return err
		}
		machines = append(machines, m)
		if err := m.Resume(ctx); err != nil {
			return err
		}
		touch := append(probeguest.Command(probeguest.Touch, touchMiB<<20/memory.PageSize), probeguest.Halt)
		if err := ask(ctx, m, touch, probeguest.Halt); err != nil {
			return err
		}
	}
	after, err := available()
	if err != nil {
		return err
	}
	s := &Share{MemMiB: shareMiB, Children: shareChildren, TouchedMiB: touchMiB, AvailableUsedM: float64(before-after) / 1024}
	if err := s.measure(machines, f.image); err != nil {
		return err
	}
	report.Share = s
	return nil
}

func (s *Share) measure(machines []vmm.Machine, img *memory.Image) error {
	var anon, pss []int64
	for _, m := range machines {
		u, err := memory.Measure(m.Process().PID, img)
		if err != nil {
			return err
		}
		anon, pss = append(anon, u.GuestAnonKiB), append(pss, u.PSSKiB)
		// The guests' share of the image is not theirs: what is left is their own pages and their monitors.
		s.AnonMiB += float64(u.GuestAnonKiB) / 1024
		s.OverImageMiB += float64(u.PSSKiB-u.GuestPSSKiB+u.GuestAnonKiB) / 1024
	}
	slices.Sort(anon)
	slices.Sort(pss)
	s.ChildAnonMiB, s.ChildPSSMiB = float64(anon[len(anon)/2])/1024, float64(pss[len(pss)/2])/1024
	s.PerChildMiB = s.OverImageMiB / float64(len(machines))
	return nil
}

// available is the host's available memory in KiB.
func available() (int64, error) {
	f, err := os.Open("/proc/meminfo")
	if err != nil {
		return 0, err
	}
	defer f.Close()
	for lines := bufio.NewScanner(f); lines.Scan(); {
		var kib int64
		if n, _ := fmt.Sscanf(lines.Text(), "MemAvailable: %d kB", &kib); n == 1 {
			return kib, nil
		}
	}
	return 0, errors.New("the host does not say how much memory is available")
}
