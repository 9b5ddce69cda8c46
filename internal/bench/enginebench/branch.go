package enginebench

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"slices"
	"time"

	"github.com/forkd/forkd/internal/memory"
	"github.com/forkd/forkd/internal/vmm"
	"github.com/forkd/forkd/internal/vmm/firecracker"
	"github.com/forkd/forkd/internal/vmm/probeguest"
)

// What is measured of branches.
const (
	dirtyMiB      = 64
	controlOf     = 10 // so many branches have one that is captured without protection, at the end
	checkedRounds = 2  // a branch's child must see each page of its guest
)

// branches measures branches of a guest that rewrites 64 MiB without rest and checks each page against the round before.
func (r *rig) branches(ctx context.Context, opt Options, report *Report) error {
	if r.uffd == nil {
		return errors.New("this host has no userfaultfd: there are no live branches on it")
	}
	for _, mib := range []int{256, 2048} {
		r.say("%d branches of a guest of %d MiB", opt.Branches, mib)
		b, err := r.branchesOf(ctx, mib, opt.Branches)
		if err != nil {
			return fmt.Errorf("%d MiB: %w", mib, err)
		}
		report.Branches = append(report.Branches, b)
	}
	return nil
}

// source starts a child whose memory is all resident, and has it work.
func (r *rig) source(ctx context.Context, f *frozen) (_ vmm.Machine, err error) {
	m, err := r.child(ctx, f.shape, f.image, f.state)
	if err != nil {
		return nil, err
	}
	for _, step := range []func() error{
		func() error { return m.Resume(ctx) },
		func() error {
			return ask(ctx, m, probeguest.Command(probeguest.Read, pages(f.shape.MemMiB)), probeguest.Read)
		},
		func() error {
			return ask(ctx, m, probeguest.Command(probeguest.Work, dirtyMiB<<20/memory.PageSize), probeguest.Work)
		},
	} {
		if err := step(); err != nil {
			return nil, errors.Join(err, m.Kill())
		}
	}
	return m, nil
}

func (r *rig) branchesOf(ctx context.Context, mib, n int) (_ Branch, err error) {
	b := Branch{MemMiB: mib, DirtyMiB: dirtyMiB, Branches: n, Control: max(n/controlOf, 1)}
	f, err := r.freeze(ctx, mib)
	if err != nil {
		return b, err
	}
	defer f.close()
	m, err := r.source(ctx, f)
	if err != nil {
		return b, err
	}
	defer func() { err = errors.Join(err, m.Kill()) }()
	var times [6][]time.Duration
	var still []time.Duration
	for range n {
		got, stood, torn, err := r.branch(ctx, f, m, false)
		if err != nil {
			return b, err
		}
		still = append(still, stood)
		if torn > 0 {
			b.Torn++
			b.TornPages += uint64(torn)
		}
		for i, d := range []time.Duration{got.Pause, got.Stop, got.Hold, got.Resume, got.Ahead, got.After} {
			times[i] = append(times[i], d)
		}
	}
	b.PauseP50MS, b.PauseP90MS, b.PauseMaxMS = quantile(times[0], 0.5), quantile(times[0], 0.9), quantile(times[0], 1)
	for i, p := range []*float64{&b.StopP50MS, &b.HoldP50MS, &b.ResumeP50MS, &b.AheadP50MS, &b.AfterP50MS} {
		*p = quantile(times[i+1], 0.5)
	}
	b.StillP50MS, b.StillP90MS, b.StillMaxMS = quantile(still, 0.5), quantile(still, 0.9), quantile(still, 1)
	if torn, _, err := status(ctx, m); err != nil || torn > 0 {
		return b, fmt.Errorf("the source itself has %d torn pages: %w", torn, err)
	}
	for range b.Control {
		_, _, torn, err := r.branch(ctx, f, m, true)
		if err != nil {
			return b, fmt.Errorf("control: %w", err)
		}
		if torn > 0 {
			b.ControlTorn++
		}
	}
	return b, nil
}

// branch captures a guest. It tells for how long the guest itself saw its work stand still at most, from shortly before the branch until it is asked
// again right after its pause, and counts what a child of the branch finds torn.
func (r *rig) branch(ctx context.Context, f *frozen, m vmm.Machine, unprotected bool) (_ memory.CaptureTimes, still time.Duration, torn uint32, err error) {
	state, err := memory.New("bench-state", memory.PageSize)
	if err != nil {
		return memory.CaptureTimes{}, 0, 0, err
	}
	defer state.Close()
	hooks := memory.Hooks{
		Pause:  func(ctx context.Context) error { return errors.Join(m.Pause(ctx), m.SaveState(ctx, state)) },
		Resume: func(ctx context.Context) error { return errors.Join(m.Resume(ctx), tell(m, probeguest.Still)) },
	}
	target := memory.Target{Process: m.Process(), Image: f.image}
	if _, err := hear(ctx, m, []byte{probeguest.Still}, wholeStill); err != nil {
		return memory.CaptureTimes{}, 0, 0, err
	}
	var got *memory.Captured
	said, err := hearAfter(ctx, m, nil, func() (err error) {
		got, err = memory.Capture(ctx, target, hooks, memory.CaptureOptions{Mode: memory.ModeLive, FillGaps: true, Unprotected: unprotected})
		return err
	}, wholeStill)
	if err != nil {
		return memory.CaptureTimes{}, 0, 0, err
	}
	ticks := uint64(binary.LittleEndian.Uint32(said[1:])) * probeguest.StillUnit
	still = time.Duration(ticks * uint64(time.Millisecond) / r.tscKHz)
	img, err := f.image.Derive(got.Layer)
	if err != nil {
		return got.Times, still, 0, err
	}
	defer func() { err = errors.Join(err, img.Close()) }()
	torn, err = r.check(ctx, f.shape, img, state)
	return got.Times, still, torn, err
}

// wholeStill tells whether all of a guest's answer to Still was heard.
func wholeStill(heard []byte) bool { return len(heard) >= 5 }

// tell writes to a guest's serial port.
func tell(m vmm.Machine, what byte) error {
	_, err := m.(firecracker.Serial).Write([]byte{what})
	return err
}

// check runs a child until it has seen all pages that its guest works on.
func (r *rig) check(ctx context.Context, shape vmm.Shape, img *memory.Image, state *os.File) (torn uint32, err error) {
	child, err := r.child(ctx, shape, img, state)
	if err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, child.Kill()) }()
	if err := child.Resume(ctx); err != nil {
		return 0, err
	}
	_, first, err := status(ctx, child)
	for round := first; err == nil && round < first+checkedRounds; {
		torn, round, err = status(ctx, child)
	}
	return torn, err
}

// quantile is the time below which a part of the times is, in ms.
func quantile(times []time.Duration, part float64) float64 {
	if len(times) == 0 {
		return 0
	}
	sorted := slices.Sorted(slices.Values(times))
	i := min(int(part*float64(len(sorted))), len(sorted)-1)
	return float64(sorted[i].Microseconds()) / 1000
}
