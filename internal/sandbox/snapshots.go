package sandbox

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/forkd/forkd/internal/snapshot"
)

// Snapshots returns all snapshots that have a tag, by it, and those that failed after their request was answered.
func (m *Manager) Snapshots(ctx context.Context) ([]Snapshot, error) {
	who := callerOf(ctx)
	m.mu.Lock()
	views := make([]Snapshot, 0, len(m.frozen))
	manifests := make([]snapshot.Manifest, 0, len(m.frozen))
	for _, tag := range slices.Sorted(maps.Keys(m.frozen)) {
		if f := m.frozen[tag]; !f.deleting && who.sees(f) && !(f.tenant != who.Tenant && m.frozen[tagKey(who.Tenant, f.tag)] != nil) {
			views = append(views, m.viewLocked(who, f))
			manifests = append(manifests, f.manifest)
		}
	}
	var tombs []Snapshot
	for _, s := range m.tombs {
		if s.Tenant == who.Tenant {
			tombs = append(tombs, s)
		}
	}
	m.mu.Unlock()
	for i := range views {
		m.judge(ctx, &views[i], manifests[i])
	}
	if len(tombs) > 0 {
		views = append(views, tombs...)
		slices.SortFunc(views, func(a, b Snapshot) int { return cmp.Compare(a.Tag, b.Tag) })
	}
	return views, nil
}

// Snapshot returns the snapshot with a tag.
func (m *Manager) Snapshot(ctx context.Context, tag string) (Snapshot, error) {
	if err := checkTag(tag); err != nil {
		return Snapshot{}, err
	}
	m.mu.Lock()
	f, err := m.findLocked(ctx, tag)
	if err != nil {
		defer m.mu.Unlock()
		if s, ok := m.tombs[tagKey(callerOf(ctx).Tenant, tag)]; ok {
			return s, nil
		}
		return Snapshot{}, err
	}
	view, man := m.viewLocked(callerOf(ctx), f), f.manifest
	m.mu.Unlock()
	m.judge(ctx, &view, man)
	return view, nil
}

// viewLocked is a snapshot as a caller sees it, but for what judge adds. Preconditions: m.mu is held.
func (m *Manager) viewLocked(who Caller, f *frozen) Snapshot {
	man, stored := f.manifest, f.stored
	s := Snapshot{
		Tag: f.tag, ID: f.id, Dir: m.snapshots.Dir(f.id), CreatedAt: f.createdAt, Image: cmp.Or(man.Image.Name, f.image),
		MemMiB: man.Shape.MemMiB, VCPUs: man.Shape.VCPUs,
		Engine: man.Engine.Engine, EngineVersion: man.Engine.Version, Accel: man.Engine.Accel,
		LogicalBytes: int64(man.Shape.MemMiB) << 20, PhysicalBytes: stored.Memory.PhysicalBytes, DeviceBytes: stored.Device.Bytes,
		ContentHash: stored.Memory.SHA256, ParentID: f.parent, BranchedFrom: man.BranchedFrom,
		Pause: f.measured.Pause, DiffTime: f.measured.Diff, DiffPhysicalBytes: f.measured.DiffPhysical, DiffLogicalBytes: f.measured.DiffLogical,
		Status: f.status, Warning: cmp.Or(f.warning, f.measured.Warning), Python: man.Python, BootWarm: f.bootWarm,
		Resident: m.cache.Resident(f.id), ResidentBytes: m.cache.ResidentBytes(f.id), Pool: f.poolStatus(),
		Tenant: f.tenant, Public: f.public, Secrets: f.secrets, HasNetwork: man.Shape.Net, Network: f.network, Limits: man.Recipe.Limits,
		Recipe: Recipe{Image: cmp.Or(man.Recipe.Image, man.Image.Name), Probe: man.Recipe.Probe, Env: man.Recipe.Env},
	}
	for _, step := range man.Recipe.WarmUp {
		s.Recipe.WarmUp = append(s.Recipe.WarmUp, WarmUp{Kind: WarmUpKind(step.Kind), Code: step.Code})
	}
	s.Ancestors, s.Dependents = m.familyLocked(who, f)
	if n := len(s.Ancestors); n > 0 {
		s.ParentTag = s.Ancestors[n-1]
	}
	return s
}

// familyLocked returns what a snapshot rests on, root first, and what rests on it, as far as a caller may know. Preconditions: m.mu is held.
func (m *Manager) familyLocked(who Caller, f *frozen) (ancestors, dependents []string) {
	for parent := f.parent; parent != "" && len(ancestors) <= len(m.byID); {
		below := m.byID[parent]
		if below == nil {
			ancestors = append(ancestors, parent)
			break
		}
		name := notShared
		if who.sees(below) {
			name = below.name()
		}
		ancestors = append(ancestors, name)
		parent = below.parent
	}
	slices.Reverse(ancestors)
	for _, d := range m.dependentsLocked(f) {
		if d.tenant == who.Tenant {
			dependents = append(dependents, d.name())
		}
	}
	return ancestors, dependents
}

// dependentsLocked returns the snapshots that rest on f, directly or not, those nearest to it first, without the states of suspended
// sandboxes: these count as users. Preconditions: m.mu is held.
func (m *Manager) dependentsLocked(f *frozen) []*frozen {
	var all []*frozen
	seen := map[string]bool{f.id: true}
	for grown := true; grown; {
		grown = false
		for _, id := range slices.SortedFunc(maps.Keys(m.byID), func(a, b string) int { return cmp.Compare(m.byID[a].name(), m.byID[b].name()) }) {
			other := m.byID[id]
			if !seen[id] && other.owner == "" && other.parent != "" && seen[other.parent] {
				seen[id] = true
				all = append(all, other)
				grown = true
			}
		}
	}
	return all
}

// judge says whether a snapshot can be restored on this host.
func (m *Manager) judge(ctx context.Context, s *Snapshot, man snapshot.Manifest) {
	if s.Status != StatusReady {
		return
	}
	if _, err := m.restorable(ctx, man); err != nil {
		s.Warning = err.Error()
		return
	}
	s.Bootable = true
}

// VerifySnapshot reads the whole snapshot from disk and checks every digest.
func (m *Manager) VerifySnapshot(ctx context.Context, tag string) error {
	if err := checkTag(tag); err != nil {
		return err
	}
	ctx, done, err := m.enter(ctx)
	if err != nil {
		return err
	}
	defer done()
	f, release, err := m.useToVerify(ctx, tag)
	if err != nil {
		return err
	}
	defer release()
	if err = m.snapshots.Verify(ctx, f.id); err == nil {
		err = m.noteSound(context.WithoutCancel(ctx), f)
	}
	m.noteCorrupt(f, err)
	return fault(err, "verify snapshot %s", tag)
}

// ImageInUse returns an error that names the snapshots which need an image; nil when none does.
func (m *Manager) ImageInUse(id string) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	var tags []string
	hidden := false
	for _, f := range m.byID {
		switch {
		case f.manifest.Image.ID != id && (f.status != StatusWriting || f.imageID != id):
		case f.owner != "" && f.tenant == DefaultTenant:
			return newError(CodeImageInUse, nil, "kill it first", "image %s is needed by the suspended sandbox %s", id, f.owner)
		case f.tenant != DefaultTenant:
			hidden = true
		default:
			tags = append(tags, f.name())
		}
	}
	if hidden {
		return newError(CodeImageInUse, nil, "it can be removed when they are deleted", "image %s is needed by snapshots of other tenants", id)
	}
	if len(tags) == 0 {
		return nil
	}
	slices.Sort(tags)
	return newError(CodeImageInUse, nil, "delete them first: `forkd rmi "+strings.Join(tags, " ")+"`", "image %s is needed by snapshots: %s", id, strings.Join(tags, ", "))
}

// DeleteSnapshot removes a snapshot, its tag, and what mode says besides. Its own pool never stands in the way.
func (m *Manager) DeleteSnapshot(ctx context.Context, tag string, mode DeleteMode) error {
	if err := checkTag(tag); err != nil {
		return err
	}
	if mode != DeleteSafe && mode != DeleteCascade && mode != DeleteForce {
		return invalid(`use "cascade", "force" or nothing`, "delete mode %.80q is not known", mode)
	}
	ctx, done, err := m.enter(ctx)
	if err != nil {
		return err
	}
	defer done()
	if m.disinter(ctx, tag) {
		return nil
	}
	targets, boxes, err := m.condemn(ctx, tag, mode)
	if err != nil {
		return err
	}
	if err := m.finishAll(boxes, ending{state: StateStopped, reason: "its snapshot was deleted"}); err != nil {
		m.pardon(targets)
		return err
	}
	if err := m.unused(targets); err != nil {
		m.pardon(targets)
		return err
	}
	ids := make([]string, len(targets))
	for i, f := range targets {
		ids[i] = f.id
	}
	ctx = context.WithoutCancel(ctx) // from here on it is carried out
	if err := m.db.MarkSnapshotsDeleting(ctx, ids...); err != nil {
		m.pardon(targets)
		return fault(err, "delete snapshot %s", tag)
	}
	m.warn(m.hit(ctx, pointDeleteRecorded), "delete a snapshot", tag)
	for _, f := range targets {
		if err := m.remove(ctx, f); err != nil {
			return fault(err, "delete snapshot %s", f.name())
		}
	}
	return nil
}

// disinter forgets a branch that failed after its request was answered, and says whether there was one.
func (m *Manager) disinter(ctx context.Context, tag string) bool {
	key := tagKey(callerOf(ctx).Tenant, tag)
	m.mu.Lock()
	defer m.mu.Unlock()
	_, ok := m.tombs[key]
	delete(m.tombs, key)
	return ok
}

// condemn picks the snapshots to delete, dependents before what they rest on, and takes them out of use; and the sandboxes to end first.
func (m *Manager) condemn(ctx context.Context, tag string, mode DeleteMode) ([]*frozen, []*box, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	f, err := m.ownLocked(ctx, tag)
	if err != nil {
		return nil, nil, err
	}
	dependents := m.dependentsLocked(f)
	if others(f.tenant, dependents) {
		return nil, nil, usedByOthers(tag)
	}
	if len(dependents) > 0 && mode != DeleteCascade {
		return nil, nil, newError(CodeSnapshotInUse, nil, "delete them first, or use --cascade", "snapshot %s has snapshots that rest on it: %s", tag, names(dependents))
	}
	slices.Reverse(dependents)
	targets := append(dependents, f)
	targets = append(targets, m.litterLocked(targets)...)
	var boxes []*box
	for _, t := range targets {
		used := m.usersLocked(t)
		if slices.ContainsFunc(used, func(b *box) bool { return b.tenant != f.tenant }) {
			return nil, nil, usedByOthers(tag)
		}
		if err := inUse(t, used, mode); err != nil {
			return nil, nil, err
		}
		boxes = append(boxes, used...)
	}
	for _, t := range targets {
		t.deleting = true
	}
	return targets, boxes, nil
}

// usedByOthers is the error of who would delete what other tenants rely on: nothing of theirs is named, and nothing of it ended.
func usedByOthers(tag string) error {
	return newError(CodeSnapshotInUse, nil, "share it no more, and delete it when they are done", "snapshot %s is in use by other tenants", tag)
}

// unused makes sure that nothing took to condemned snapshots while their sandboxes were being ended. What is still being written may say that
// it will rest on one, and won't: see rest.
func (m *Manager) unused(targets []*frozen) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, f := range targets {
		if f.forks > 0 {
			return beingUsed(f)
		}
		for _, other := range m.byID {
			if other.parent == f.id && other.status != StatusWriting && !other.deleting {
				if other.tenant != f.tenant {
					return usedByOthers(f.name())
				}
				return newError(CodeSnapshotInUse, nil, "delete it first", "snapshot %s has a snapshot that rests on it: %s", f.name(), other.name())
			}
		}
	}
	return nil
}

// usersLocked returns the sandboxes of a snapshot that live, suspended ones included. Preconditions: m.mu is held.
func (m *Manager) usersLocked(f *frozen) []*box {
	var users []*box
	for _, b := range m.boxes {
		if b.frozen == f || m.restsOnLocked(b) == f {
			users = append(users, b)
		}
	}
	slices.SortFunc(users, func(a, b *box) int { return cmp.Compare(a.id, b.id) })
	return users
}

// inUse reports why a snapshot can't be deleted in that mode.
func inUse(f *frozen, users []*box, mode DeleteMode) error {
	switch {
	case f.deleting: // by somebody else
		return &Error{Code: CodeSnapshotInUse, Message: "snapshot " + f.name() + " is being deleted already", Hint: "try again in a moment", RetryAfter: retryLater}
	case f.status == StatusWriting:
		return newError(CodeSnapshotInUse, nil, "wait until it is ready", "snapshot %s is still being made", f.name())
	case f.forks > 0:
		return beingUsed(f)
	case len(users) > 0 && mode != DeleteForce:
		const shown = 10
		ids := make([]string, 0, shown)
		for _, b := range users[:min(len(users), shown)] {
			ids = append(ids, b.id)
		}
		if len(users) > shown {
			ids = append(ids, fmt.Sprintf("and %d more", len(users)-shown))
		}
		return newError(CodeSnapshotInUse, nil, "kill them first, or use --force", "snapshot %s has sandboxes that live: %s", f.name(), strings.Join(ids, ", "))
	}
	return nil
}

func beingUsed(f *frozen) error {
	return &Error{Code: CodeSnapshotInUse, Message: fmt.Sprintf("%d requests are using snapshot %s at this moment", f.forks, f.name()),
		Hint: "try again in a moment", RetryAfter: retryLater}
}

func names(snapshots []*frozen) string {
	tags := make([]string, len(snapshots))
	for i, f := range snapshots {
		tags[i] = f.name()
	}
	return strings.Join(tags, ", ")
}

// pardon puts condemned snapshots back into use.
func (m *Manager) pardon(targets []*frozen) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, f := range targets {
		f.deleting = false
	}
}

// remove carries out the removal of a condemned snapshot. When it fails the snapshot shows as failed and may be deleted again; the next
// Recover tries as well.
func (m *Manager) remove(ctx context.Context, f *frozen) error {
	if f.pool != nil {
		f.pool.close()
	}
	err := m.removeFiles(ctx, f)
	if err == nil {
		err = m.db.RemoveSnapshot(ctx, f.id)
	}
	m.mu.Lock()
	if err != nil {
		f.deleting, f.status, f.warning = false, StatusFailed, "its removal failed: "+err.Error()
	} else {
		m.unlistLocked(f)
	}
	m.mu.Unlock()
	if err != nil {
		return err
	}
	m.emit(Event{Kind: EventSnapshotDeleted, Tenant: f.tenant, Tag: f.tag})
	return nil
}

func (m *Manager) removeFiles(ctx context.Context, f *frozen) error {
	if err := f.close(); err != nil {
		return err
	}
	for _, id := range []string{f.id, f.id + flatSuffix} {
		if err := m.cache.Drop(id); err != nil {
			m.warn(err, "drop the resident image of a deleted snapshot", f.name()) // it goes when it is unused
		}
	}
	if err := m.snapshots.Remove(f.id); err != nil && !errors.Is(err, snapshot.ErrNotFound) {
		return err
	}
	m.warn(m.hit(ctx, pointDeleteRemoved), "delete a snapshot", f.name())
	return nil
}
