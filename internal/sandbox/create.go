package sandbox

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	"github.com/forkd/forkd/internal/image"
	"github.com/forkd/forkd/internal/memory"
	"github.com/forkd/forkd/internal/snapshot"
	"github.com/forkd/forkd/internal/vmm"
)

// creation is a snapshot in the making.
type creation struct {
	m        *Manager
	req      SnapshotRequest
	frozen   *frozen
	image    image.Image
	shape    vmm.Shape
	tell     func(Progress)
	undo     *cleanup
	parent   *child
	ram      *os.File // the parent's memory
	python   bool
	bootWarm time.Duration
}

// CreateSnapshot boots a parent from an image, warms it up, freezes it and publishes the snapshot. tell, which may be nil, is called with
// the steps. When it fails nothing is left.
func (m *Manager) CreateSnapshot(ctx context.Context, req SnapshotRequest, tell func(Progress)) (Snapshot, error) {
	if err := req.check(m.limits); err != nil {
		return Snapshot{}, err
	}
	ctx, done, err := m.enter(ctx)
	if err != nil {
		return Snapshot{}, err
	}
	defer done()
	img, err := m.images.Get(req.Image)
	if err == nil {
		err = m.mayUseImage(ctx, img, req.Image)
	}
	if err != nil {
		return Snapshot{}, fault(err, "snapshot %s: image %.80s", req.Tag, req.Image)
	}
	if err := m.checkNetwork("snapshot "+req.Tag, true, req.Network); err != nil {
		return Snapshot{}, err
	}
	if tell == nil {
		tell = func(Progress) {}
	}
	c := &creation{m: m, req: req, image: img, tell: tell, undo: &cleanup{},
		shape: vmm.Shape{MemMiB: cmp.Or(req.MemMiB, m.limits.DefaultMemMiB), VCPUs: cmp.Or(req.VCPUs, 1)}}
	if err := c.run(ctx); err != nil {
		m.warn(c.undo.run(), "unwind a snapshot", req.Tag)
		m.emit(Event{Kind: EventSnapshotFailed, Tenant: callerOf(ctx).Tenant, Tag: req.Tag, Reason: err.Error()})
		return Snapshot{}, fault(err, "snapshot %s", req.Tag)
	}
	m.emit(Event{Kind: EventSnapshotReady, Tenant: callerOf(ctx).Tenant, Tag: req.Tag})
	return m.Snapshot(ctx, req.Tag)
}

// run makes the snapshot step by step; undo has what takes the steps made so far back.
func (c *creation) run(ctx context.Context) error {
	if err := c.claimTag(ctx); err != nil {
		return err
	}
	turn := c.m.boots.enqueue(callerOf(ctx).Tenant)
	defer turn.release()
	if err := turn.wait(ctx); err != nil {
		return err
	}
	device, err := c.freezeParent(ctx)
	if err != nil {
		return err
	}
	defer func() { _ = device.Close() }() // a memfd: nothing can be lost
	man, ref, err := c.publish(ctx, device)
	if err != nil {
		return err
	}
	defer ref.Release()
	if err := c.m.db.MarkSnapshotReady(context.WithoutCancel(ctx), man.ID, c.bootWarm); err != nil {
		return err
	}
	if err := c.m.hit(ctx, pointSnapshotReady); err != nil {
		return err
	}
	c.undo.release()
	c.m.admitSnapshot(c.frozen, man, c.bootWarm, c.req.PoolSize)
	return nil
}

// claimTag takes the tag, before any work is done: of two who want it one fails at once.
func (c *creation) claimTag(ctx context.Context) error {
	m := c.m
	f := &frozen{id: newID("sn"), tag: c.req.Tag, tenant: callerOf(ctx).Tenant, image: c.req.Image, imageID: c.image.ID, createdAt: time.Now(), status: StatusWriting, network: c.req.Network}
	c.frozen = f
	if err := m.enlist(ctx, f, c.req.PoolSize, c.undo); err != nil {
		return err
	}
	return m.hit(ctx, pointSnapshotRecorded)
}

// freezeParent boots and warms up the parent and ends it, frozen: its memory is in c.ram, its device state is returned.
func (c *creation) freezeParent(ctx context.Context) (*os.File, error) {
	m := c.m
	grants, err := m.memory.take(1, m.limits.parentNeed(c.shape))
	if err != nil {
		return nil, err
	}
	if len(grants) == 0 {
		free, _ := m.memory.free()
		return nil, &Error{Code: CodeInsufficientMemory, RetryAfter: retryLater, Hint: "end sandboxes, shrink pools, or ask for less memory",
			Message: fmt.Sprintf("no memory for a parent of snapshot %s: it takes %d MiB, %d MiB are left", c.req.Tag, m.limits.parentNeed(c.shape).total()>>20, max(free, 0)>>20)}
	}
	defer grants[0].release() // the memory is a resident image's afterwards
	if c.ram, err = memory.New(memoryName(c.frozen.id), int64(c.shape.MemMiB)<<20); err != nil {
		return nil, err
	}
	c.undo.add(func() error { return c.closeRAM() })
	if err := c.bootParent(ctx, grants[0]); err != nil {
		return nil, err
	}
	c.undo.add(c.parent.dispose)
	if err := c.prepareParent(ctx, c.awaitAgent, c.awaitProbe, c.warmUp); err != nil {
		return nil, err
	}
	device, err := c.saveParent(ctx)
	if err != nil {
		return nil, err
	}
	if err := m.hit(ctx, pointSnapshotFrozen); err != nil {
		return nil, errors.Join(err, device.Close())
	}
	return device, nil
}

func (c *creation) closeRAM() error {
	if c.ram == nil {
		return nil // a resident image owns it
	}
	return c.ram.Close()
}

// saveParent stops the parent for good. It must never run again: it would write into the snapshot.
func (c *creation) saveParent(ctx context.Context) (_ *os.File, err error) {
	c.tell(Progress{Step: "freeze"})
	ctx, cancel := context.WithTimeout(ctx, c.m.limits.LaunchTimeout)
	defer cancel()
	device, err := memory.New("device-"+c.frozen.id, memory.PageSize)
	if err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			_ = device.Close()
		}
	}()
	if err := c.parent.agent.Quiesce(ctx); err != nil {
		return nil, fmt.Errorf("quiesce the guest: %w", err)
	}
	if err := c.parent.machine.Pause(ctx); err != nil {
		return nil, err
	}
	if err := c.parent.machine.SaveState(ctx, device); err != nil {
		return nil, err
	}
	if err := c.m.hit(ctx, pointSnapshotSaved); err != nil {
		return nil, err
	}
	return device, c.parent.dispose()
}

// publish writes the snapshot to disk and makes its memory resident. The reference keeps it so until the record is made.
func (c *creation) publish(ctx context.Context, device *os.File) (snapshot.Manifest, *memory.Ref, error) {
	m := c.m
	c.tell(Progress{Step: "store", Total: int64(c.shape.MemMiB) << 20})
	staging, err := m.snapshots.Stage(c.frozen.id)
	if err != nil {
		return snapshot.Manifest{}, nil, err
	}
	c.undo.add(staging.Abort)
	// Before it is sealed, so that pages of zeros are given back on the way.
	if err := staging.WriteMemory(ctx, c.ram, nil); err != nil {
		return snapshot.Manifest{}, nil, err
	}
	if err := memory.Seal(c.ram); err != nil {
		return snapshot.Manifest{}, nil, err
	}
	if err := staging.WriteDevice(ctx, device); err != nil {
		return snapshot.Manifest{}, nil, err
	}
	if err := m.hit(ctx, pointSnapshotStaged); err != nil {
		return snapshot.Manifest{}, nil, err
	}
	draft, err := c.manifest(ctx)
	if err != nil {
		return snapshot.Manifest{}, nil, err
	}
	man, err := staging.Publish(ctx, draft)
	if err != nil {
		return snapshot.Manifest{}, nil, err
	}
	c.undo.add(func() error { return m.snapshots.Remove(man.ID) })
	if err := m.hit(ctx, pointSnapshotPublished); err != nil {
		return snapshot.Manifest{}, nil, err
	}
	img, err := memory.NewImage(c.ram)
	if err != nil {
		return snapshot.Manifest{}, nil, err
	}
	c.ram = nil
	ref := m.cache.PutRef(man.ID, img)
	c.undo.add(func() error { return m.cache.Drop(man.ID) })
	return man, ref, nil
}

func (c *creation) manifest(ctx context.Context) (snapshot.Manifest, error) {
	info, err := c.m.engine.Probe(ctx)
	if err != nil {
		return snapshot.Manifest{}, err
	}
	return snapshot.Manifest{
		FormatVersion: snapshot.FormatVersion, ID: c.frozen.id, CreatedAt: c.frozen.createdAt.UTC().Round(0),
		Image: snapshot.ImageRef{ID: c.image.ID, Name: c.image.Name, KernelSHA256: c.image.Kernel.SHA256,
			InitramfsSHA256: c.image.Initramfs.SHA256, RootfsSHA256: c.image.Rootfs.SHA256},
		Engine: info, Shape: c.shape, Recipe: c.req.recipe(), Python: c.python,
	}, nil
}

// admitSnapshot makes a published snapshot usable.
func (m *Manager) admitSnapshot(f *frozen, man snapshot.Manifest, bootWarm time.Duration, poolSize int) {
	m.mu.Lock()
	defer m.mu.Unlock()
	f.status, f.manifest, f.stored, f.parent, f.bootWarm, f.imageID = StatusReady, man, man, man.Parent, bootWarm, man.Image.ID
	f.pool = m.newPool(f, poolSize)
}
