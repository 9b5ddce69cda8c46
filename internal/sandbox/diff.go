package sandbox

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"strings"
	"time"

	"github.com/forkd/forkd/internal/image"
	"github.com/forkd/forkd/internal/limits"
	"github.com/forkd/forkd/internal/memory"
	"github.com/forkd/forkd/internal/snapshot"
)

func (r DiffRequest) check() error {
	if err := checkTag(r.From); err != nil {
		return err
	}
	if err := checkTag(r.Tag); err != nil {
		return err
	}
	switch {
	case len(r.Steps) == 0:
		return invalid("give at least one command", "snapshot %s would be the same as %s", r.Tag, r.From)
	case len(r.Steps) > maxWarmUps:
		return invalid("put them into a script", "%d steps, the limit is %d", len(r.Steps), maxWarmUps)
	case r.Timeout < 0:
		return invalid("0 is for the default", "timeout of %v is negative", r.Timeout)
	}
	for i, w := range r.Steps {
		if err := w.check(i); err != nil {
			return err
		}
	}
	return checkEnv(r.Env)
}

// SnapshotDiff makes a snapshot of another one in which some steps were run: it stores only what they changed. tell, which may be nil, is
// called with the steps. When it fails nothing is left.
func (m *Manager) SnapshotDiff(ctx context.Context, req DiffRequest, tell func(Progress)) (Snapshot, error) {
	if err := req.check(); err != nil {
		return Snapshot{}, err
	}
	ctx, done, err := m.enter(ctx)
	if err != nil {
		return Snapshot{}, err
	}
	defer done()
	from, release, err := m.use(ctx, req.From)
	if err != nil {
		return Snapshot{}, err
	}
	defer release()
	if tell == nil {
		tell = func(Progress) {}
	}
	d := newDifference(m, from, callerOf(ctx), req, tell)
	if err := d.run(ctx); err != nil {
		m.warn(d.undo.run(), "unwind a snapshot", req.Tag)
		m.emit(Event{Kind: EventSnapshotFailed, Tenant: callerOf(ctx).Tenant, Tag: req.Tag, Reason: err.Error()})
		return Snapshot{}, fault(err, "snapshot %s", req.Tag)
	}
	m.emit(Event{Kind: EventSnapshotReady, Tenant: callerOf(ctx).Tenant, Tag: req.Tag})
	return m.Snapshot(ctx, req.Tag)
}

// difference is a snapshot in the making that rests on another one. Its parent machine is a child of that.
type difference struct {
	creation
	from *frozen
}

func newDifference(m *Manager, from *frozen, who Caller, req DiffRequest, tell func(Progress)) *difference {
	env := map[string]string{}
	for _, kv := range from.manifest.Recipe.Env {
		k, v, _ := strings.Cut(kv, "=")
		env[k] = v
	}
	maps.Copy(env, req.Env)
	man := from.manifest
	d := &difference{from: from, creation: creation{m: m, tell: tell, undo: &cleanup{}, shape: man.Shape, python: man.Python,
		image: image.Image{ID: man.Image.ID, Name: man.Image.Name},
		req:   SnapshotRequest{Tag: req.Tag, Image: from.image, WarmUp: req.Steps, Timeout: req.Timeout, Env: env}}}
	d.frozen = &frozen{id: newID("sn"), tag: req.Tag, tenant: who.Tenant, secrets: from.secrets, image: from.image, imageID: from.imageID, createdAt: time.Now(), under: from,
		status: StatusWriting, parent: from.id, network: from.inherited(who)}
	d.frozen.manifest = man
	d.frozen.manifest.ID, d.frozen.manifest.CreatedAt, d.frozen.manifest.BranchedFrom = d.frozen.id, d.frozen.createdAt.UTC().Round(0), ""
	d.frozen.manifest.Recipe.Env = environ(nil, env)
	d.frozen.manifest.Recipe.WarmUp = append(man.Recipe.WarmUp[:len(man.Recipe.WarmUp):len(man.Recipe.WarmUp)], d.req.recipe().WarmUp...)
	return d
}

// run makes the snapshot step by step; undo has what takes the steps made so far back.
func (d *difference) run(ctx context.Context) error {
	m := d.m
	if err := m.enlist(ctx, d.frozen, 0, d.undo); err != nil {
		return err
	}
	if err := m.hit(ctx, pointDiffRecorded); err != nil {
		return err
	}
	turn := m.boots.enqueue(callerOf(ctx).Tenant)
	defer turn.release()
	if err := turn.wait(ctx); err != nil {
		return err
	}
	got, img, err := d.freezeChild(ctx)
	if err != nil {
		return err
	}
	defer func() { _ = got.device.Close() }() // a memfd: nothing can be lost
	ref := m.cache.PutRef(d.frozen.id, img)
	defer ref.Release()
	d.undo.add(func() error { ref.Release(); return m.cache.Drop(d.frozen.id) })
	d.tell(Progress{Step: "store", Total: int64(memory.Pages(got.Layer.Extents)) * memory.PageSize})
	man, err := m.persist(ctx, persisting{frozen: d.frozen, layer: got.Layer, image: img, base: got.base, device: got.device,
		staged: pointDiffStaged, publish: pointDiffPublished}, d.undo)
	if err != nil {
		return err
	}
	return d.publish(context.WithoutCancel(ctx), man, got)
}

// publish says that the snapshot is there.
func (d *difference) publish(ctx context.Context, man snapshot.Manifest, got *instant) error {
	m, f := d.m, d.frozen
	figures := measure(got, f.createdAt)
	figures.Warning = ""
	m.warn(m.db.SetMeasured(ctx, f.id, figures), "record the figures of a snapshot", f.id)
	if err := m.db.MarkSnapshotReady(ctx, f.id, d.bootWarm); err != nil {
		return err
	}
	if err := m.hit(ctx, pointDiffReady); err != nil {
		return err
	}
	d.undo.release()
	m.mu.Lock()
	f.measured = figures
	m.mu.Unlock()
	m.admitSnapshot(f, man, d.bootWarm, 0)
	return nil
}

var diffPoints = launchPoints{prepared: pointDiffPrepared, loaded: pointDiffLoaded, identified: pointDiffIdentified}

// freezeChild forks a child, runs the steps in it and ends it, frozen: what it changed is in the instant, the image has all.
func (d *difference) freezeChild(ctx context.Context) (_ *instant, _ *memory.Image, err error) {
	m := d.m
	grants, err := m.admit(callerOf(ctx).Tenant, d.from, ForkRequest{}, 1)
	if err != nil {
		return nil, nil, err
	}
	d.tell(Progress{Step: "fork", Detail: d.from.name()})
	who := individual{name: d.frozen.id, env: d.frozen.manifest.Recipe.Env, network: d.frozen.network}
	l, err := m.limitsOf(d.from, limits.Limits{})
	if err != nil {
		grants[0].release()
		return nil, nil, err
	}
	c, err := m.launch(ctx, d.from, d.frozen.id, grants[0], who, l, diffPoints)
	if err != nil {
		grants[0].release()
		return nil, nil, err
	}
	d.parent = c
	defer func() { m.warn(c.dispose(), "end the machine of a snapshot", d.frozen.id) }()
	if err := d.prepareParent(ctx, d.warmUp); err != nil {
		return nil, nil, err
	}
	d.tell(Progress{Step: "freeze"})
	if err := c.agent.Quiesce(ctx); err != nil {
		return nil, nil, fmt.Errorf("quiesce the guest: %w", err)
	}
	got, err := m.capture(ctx, c, capturing{id: d.frozen.id, mode: memory.ModeStop, disk: true, stay: true})
	if err != nil {
		return nil, nil, err
	}
	img, err := got.base.Derive(got.Layer)
	if err != nil {
		_ = got.close()
		return nil, nil, err
	}
	if err := m.hit(ctx, pointDiffFrozen); err != nil {
		return nil, nil, errors.Join(err, got.device.Close(), img.Close()) // the layer is the image's
	}
	return got, img, nil
}
