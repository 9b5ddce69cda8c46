package bench

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"time"

	"github.com/forkd/forkd/client"
)

// ChainOptions say what chain to build and measure.
type ChainOptions struct {
	Tag      string // its base; "": the only snapshot that rests on no other
	Depth    int    // layers
	LayerMiB int    // what a command in the guest writes for each layer
	N        int    // children at each end, one after the other
	Progress func(format string, args ...any)
}

// ChainReport is the outcome, as `forkd bench chain --json` prints it.
type ChainReport struct {
	Subject
	Depth      int      `json:"depth"`
	LayerMiB   int      `json:"layer_mib"` // what a command wrote for each layer
	N          int      `json:"n"`
	Base       ChainEnd `json:"base"`        // depth 0
	Tip        ChainEnd `json:"tip"`         // at the depth
	ColdRatio  float64  `json:"cold_ratio"`  // tip to base, medians until the first answer
	ClaimRatio float64  `json:"claim_ratio"` //
	ChangedMiB float64  `json:"changed_mib"` // pages that the layers differ in, each from the one below
	DiskMiB    float64  `json:"disk_mib"`    // files of the layers, without the base
	DiskRatio  float64  `json:"disk_ratio"`  // of base and layers, to base and changed pages

	ResidentRatio float64 `json:"resident_ratio"` // the same of the memory that they take when loaded
}

// ChainEnd is a snapshot at an end of the chain.
type ChainEnd struct {
	FirstMS float64 `json:"first_ms"` // until the first answer of the first child, when no memory was loaded
	Cold    Run     `json:"cold"`
	Claim   Run     `json:"claim"`
	DiskMiB float64 `json:"disk_mib"`

	ResidentMiB float64 `json:"resident_mib"` // what its memory takes when it is loaded, the layers below included

	Shared Shared `json:"memory"`
}

// Shared is the memory that children use together.
type Shared struct {
	Children    int     `json:"children"`
	GuestMiB    float64 `json:"guest_mib"`     // of guests' memory, all of them, what is shared counted once
	OwnMiB      float64 `json:"own_mib"`       // of that, what is not shared; all of them
	ProcessMiB  float64 `json:"process_mib"`   // monitors too, all of them
	ChildPSSMiB float64 `json:"child_pss_mib"` // a child's part; the median
}

// sharers is how many children are looked at together.
const sharers = 10

// chain is one that is measured. It stands on a base of its own, so that it can be taken away and loaded anew.
type chain struct {
	c         *client.Client
	opt       ChainOptions
	name      string
	base, tip string // tags
	r         *ChainReport
}

// Chain builds a chain of snapshots, one resting on the other, and measures what children of its tip take more than those of its base. It
// removes what it made.
func Chain(ctx context.Context, c *client.Client, opt ChainOptions) (_ ChainReport, err error) {
	if opt.Progress == nil {
		opt.Progress = func(string, ...any) {}
	}
	subject, err := subjectOf(ctx, c, opt.Tag)
	if err != nil {
		return ChainReport{}, err
	}
	r := ChainReport{Subject: subject, Depth: opt.Depth, LayerMiB: opt.LayerMiB, N: opt.N}
	ch := &chain{c: c, opt: opt, name: fmt.Sprintf("bench-%x", time.Now().UnixNano()), r: &r}
	ch.base = ch.name + "-0"
	defer func() { err = errors.Join(err, ch.remove(context.WithoutCancel(ctx))) }()
	for _, step := range []func(context.Context) error{ch.build, ch.reload, ch.measure} {
		if err := step(ctx); err != nil {
			return r, err
		}
	}
	return r, ctx.Err()
}

// build makes the base, which is not loaded yet then, and the layers.
func (ch *chain) build(ctx context.Context) error {
	ch.opt.Progress("storing %s anew", ch.r.Tag)
	if _, err := ch.c.Compact(ctx, ch.r.Tag, ch.base); err != nil {
		return err
	}
	var err error
	if ch.r.Base.FirstMS, err = ch.first(ctx, ch.base); err != nil {
		return err
	}
	ch.opt.Progress("building %d layers of %d MiB", ch.opt.Depth, ch.opt.LayerMiB)
	ch.tip = ch.base
	var disk, changed int64
	for i := range ch.opt.Depth {
		tag := fmt.Sprintf("%s-%d", ch.name, i+1)
		code := fmt.Sprintf("dd if=/dev/urandom of=/root/%s bs=65536 count=%d 2>/dev/null", tag, ch.opt.LayerMiB*16)
		snap, err := ch.c.SnapshotDiff(ctx, ch.tip, client.DiffRequest{Tag: tag, Steps: []client.WarmUp{{Kind: "exec", Code: code}}}, nil)
		if err != nil {
			return fmt.Errorf("layer %d: %w", i+1, err)
		}
		ch.tip = tag
		disk, changed = disk+snap.MemoryPhysicalBytes, changed+snap.DiffPhysicalBytes
	}
	info, err := ch.c.SnapshotInfo(ctx, ch.base)
	if err != nil {
		return err
	}
	ch.r.DiskMiB, ch.r.ChangedMiB = mib(disk), mib(changed)
	ch.r.Base.DiskMiB, ch.r.Tip.DiskMiB = mib(info.MemoryPhysicalBytes), mib(info.MemoryPhysicalBytes+disk)
	ch.r.DiskRatio = ratio(float64(info.MemoryPhysicalBytes+disk), float64(info.MemoryPhysicalBytes+changed))
	return nil
}

// reload packs the chain, removes it and takes it in again: nothing of it is loaded then. The base comes by itself, too: else it had no tag.
func (ch *chain) reload(ctx context.Context) (err error) {
	ch.opt.Progress("packing the chain and taking it in again")
	ends := []string{ch.base, ch.tip}
	var files []*os.File
	defer func() {
		for _, f := range files {
			err = errors.Join(err, f.Close(), os.Remove(f.Name()))
		}
	}()
	for _, tag := range ends {
		f, err := os.CreateTemp("", "forkd-bench-")
		if err != nil {
			return err
		}
		files = append(files, f)
		if err := ch.pack(ctx, tag, f); err != nil {
			return fmt.Errorf("pack %s: %w", tag, err)
		}
	}
	if err := ch.c.DeleteSnapshot(ctx, ch.base, client.DeleteCascade); err != nil {
		return err
	}
	for i, tag := range ends {
		got, err := ch.c.Unpack(ctx, files[i], client.UnpackOptions{Tag: tag})
		if err != nil {
			return fmt.Errorf("unpack %s: %w", tag, err)
		}
		if want := []int{1, ch.opt.Depth}[i]; len(got.NewSnapshots) != want {
			return fmt.Errorf("the pack of %s yielded %d snapshots, want %d", tag, len(got.NewSnapshots), want)
		}
	}
	ch.r.Tip.FirstMS, err = ch.first(ctx, ch.tip)
	return err
}

// pack writes a pack, to be read again.
func (ch *chain) pack(ctx context.Context, tag string, f *os.File) error {
	body, err := ch.c.Pack(ctx, tag, client.PackOptions{})
	if err != nil {
		return err
	}
	_, err = io.Copy(f, body)
	if err := errors.Join(err, body.Close()); err != nil {
		return err
	}
	_, err = f.Seek(0, io.SeekStart)
	return err
}

// first measures a child of a snapshot whose memory is not loaded.
func (ch *chain) first(ctx context.Context, tag string) (float64, error) {
	info, err := ch.c.SnapshotInfo(ctx, tag)
	if err != nil {
		return 0, err
	}
	if info.Resident {
		return 0, fmt.Errorf("snapshot %s is in memory before its first child", tag)
	}
	child := MeasureOne(ctx, ch.c, tag, "cold", AnswerPing)
	return ms(child.Answer), errors.Join(child.Err, KillAll(context.WithoutCancel(ctx), ch.c, []Child{child}))
}

// measure compares the ends.
func (ch *chain) measure(ctx context.Context) (err error) {
	r := ch.r
	ch.opt.Progress("forking %d children of each end cold, one after the other", r.N)
	if r.Base.Cold, r.Tip.Cold, err = ch.alternate(ctx, "cold"); err != nil {
		return err
	}
	ch.opt.Progress("claiming %d children of each end, each from a full pool", r.N)
	if r.Base.Claim, r.Tip.Claim, err = ch.alternate(ctx, "pool"); err != nil {
		return err
	}
	for _, tag := range []string{ch.base, ch.tip} {
		if _, err := ch.c.SetPool(ctx, tag, 0); err != nil {
			return err
		}
	}
	r.ColdRatio = ratio(r.Tip.Cold.Answer.P50MS, r.Base.Cold.Answer.P50MS)
	r.ClaimRatio = ratio(r.Tip.Claim.Answer.P50MS, r.Base.Claim.Answer.P50MS)
	ch.opt.Progress("measuring the memory of %d children of each end", sharers)
	for tag, end := range map[string]*ChainEnd{ch.base: &r.Base, ch.tip: &r.Tip} {
		if end.Shared, err = ch.shared(ctx, tag); err != nil {
			return err
		}
		info, err := ch.c.SnapshotInfo(ctx, tag)
		if err != nil {
			return err
		}
		end.ResidentMiB = mib(info.ResidentBytes)
	}
	r.ResidentRatio = ratio(r.Tip.ResidentMiB, r.Base.ResidentMiB+r.ChangedMiB)
	return nil
}

// alternate measures children of both ends in turns, so that both see the same host.
func (ch *chain) alternate(ctx context.Context, path string) (base, tip Run, err error) {
	ends := []string{ch.base, ch.tip}
	children := make([][]Child, len(ends))
	start := time.Now()
	for range ch.opt.N {
		for i, tag := range ends {
			if err := ctx.Err(); err != nil {
				return base, tip, err
			}
			if path == "pool" { // nothing may start beside the claim
				for _, tag := range ends {
					if err := FillPool(ctx, ch.c, tag, 1); err != nil {
						return base, tip, err
					}
				}
			}
			child := MeasureOne(ctx, ch.c, tag, path, AnswerPing)
			children[i] = append(children[i], child)
			if err := KillAll(ctx, ch.c, []Child{child}); err != nil {
				return base, tip, err
			}
		}
	}
	return Summarise(children[0], start), Summarise(children[1], start), nil
}

// shared looks at children that live together.
func (ch *chain) shared(ctx context.Context, tag string) (s Shared, err error) {
	list, err := ch.c.Fork(ctx, client.ForkRequest{SnapshotTag: tag, N: client.Int(sharers), Path: "cold"})
	children := make([]Child, len(list))
	for i := range list {
		children[i].ID = list[i].ID
	}
	defer func() { err = errors.Join(err, KillAll(context.WithoutCancel(ctx), ch.c, children)) }()
	if err != nil {
		return s, fmt.Errorf("fork %d children: %w", sharers, err)
	}
	var guest, own, process int64
	var each []int64
	for _, child := range list {
		st, err := ch.c.Stats(ctx, child.ID)
		if err != nil {
			return s, err
		}
		guest, own, process = guest+st.GuestPSSKiB, own+st.GuestAnonKiB, process+st.PSSKiB
		each = append(each, st.GuestPSSKiB)
	}
	slices.Sort(each)
	return Shared{Children: len(list), GuestMiB: mib(guest << 10), OwnMiB: mib(own << 10), ProcessMiB: mib(process << 10),
		ChildPSSMiB: mib(Percentile(each, 50) << 10)}, nil
}

// remove takes the chain away, whatever there is of it.
func (ch *chain) remove(ctx context.Context) error {
	for _, tag := range []string{ch.base, ch.tip} {
		if tag != "" {
			_, _ = ch.c.SetPool(ctx, tag, 0) // it may be gone
		}
	}
	err := ch.c.DeleteSnapshot(ctx, ch.base, client.DeleteCascade)
	if client.IsCode(err, "snapshot_not_found") {
		return nil
	}
	return err
}
