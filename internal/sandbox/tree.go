package sandbox

import (
	"cmp"
	"context"
	"errors"
	"maps"
	"slices"
	"time"

	"github.com/forkd/forkd/internal/snapshot"
	"github.com/forkd/forkd/internal/store"
)

// Tree returns all snapshots as a forest, with the sandboxes that came of each; oldest first. Snapshots without a tag are in it when others rest
// on them.
func (m *Manager) Tree(ctx context.Context) ([]TreeNode, error) {
	who := callerOf(ctx)
	m.mu.Lock()
	nodes := map[string]*treeNode{}
	for id, f := range m.byID {
		if f.owner == "" && !f.deleting && who.sees(f) {
			nodes[id] = &treeNode{TreeNode{Snapshot: m.viewLocked(who, f)}, f.parent, f.manifest}
		}
	}
	for _, b := range m.boxes {
		if a := m.restsOnLocked(b); a != nil && nodes[a.id] != nil && b.tenant == who.Tenant {
			nodes[a.id].Sandboxes = append(nodes[a.id].Sandboxes, b.id)
		}
	}
	m.mu.Unlock()
	children := map[string][]*treeNode{}
	var roots []*treeNode
	for _, n := range nodes {
		m.judge(ctx, &n.Snapshot, n.manifest)
		slices.Sort(n.Sandboxes)
		if nodes[n.parent] == nil {
			roots = append(roots, n)
		} else {
			children[n.parent] = append(children[n.parent], n)
		}
	}
	return plant(roots, children), nil
}

type treeNode struct {
	TreeNode
	parent   string
	manifest snapshot.Manifest
}

func plant(level []*treeNode, children map[string][]*treeNode) []TreeNode {
	slices.SortFunc(level, func(a, b *treeNode) int {
		return cmp.Or(a.Snapshot.CreatedAt.Compare(b.Snapshot.CreatedAt), cmp.Compare(a.Snapshot.ID, b.Snapshot.ID))
	})
	var out []TreeNode
	for _, n := range level {
		n.Children = plant(children[n.Snapshot.ID], children)
		out = append(out, n.TreeNode)
	}
	return out
}

// restsOnLocked returns the snapshot that a sandbox needs on disk: to be branched, and to be resumed when it is suspended; nil for none.
// Preconditions: m.mu is held.
func (m *Manager) restsOnLocked(b *box) *frozen {
	if state := b.state.Load(); state != nil && m.byID[state.parent] != nil {
		return m.byID[state.parent]
	}
	if b.frozen.kept {
		return b.frozen
	}
	return anchorLocked(b.frozen)
}

// AddSnapshot publishes a tag for a snapshot that was just unpacked into the store, and makes what it rests on known.
func (m *Manager) AddSnapshot(ctx context.Context, tag, id string) error {
	if err := checkTag(tag); err != nil {
		return err
	}
	ctx, done, err := m.enter(ctx)
	if err != nil {
		return err
	}
	defer done()
	if err := m.adoptChain(ctx, tag, id); err != nil {
		return fault(err, "snapshot %s", tag)
	}
	m.emit(Event{Kind: EventSnapshotReady, Tenant: callerOf(ctx).Tenant, Tag: tag})
	return nil
}

// adoptChain makes snapshots of a chain known that are not yet; the last one, id, gets the tag.
func (m *Manager) adoptChain(ctx context.Context, tag, id string) error {
	tenant := callerOf(ctx).Tenant
	m.mu.Lock()
	defer m.mu.Unlock() // over disk and database, too: nobody may take the tag, or delete what is rested on, in between
	chain, err := m.snapshots.Chain(id)
	if errors.Is(err, snapshot.ErrNotFound) {
		return newError(CodeSnapshotNotFound, err, "", "snapshot %.80s is not in the store", id)
	}
	if err != nil {
		return err
	}
	if m.frozen[tagKey(tenant, tag)] != nil {
		return newError(CodeSnapshotExists, nil, "delete it first, or choose another tag", "a snapshot with the tag %s exists", tag)
	}
	for _, man := range chain {
		if err := m.limits.fits(man); err != nil {
			return err
		}
		if f := m.byID[man.ID]; f != nil && f.tenant != tenant && (!f.public || man.ID == id) {
			return newError(CodeSnapshotExists, nil, "make one of your own", "snapshot %s is here already and can't be taken in again", man.ID)
		}
	}
	tip := chain[len(chain)-1]
	known := m.byID[tip.ID]
	if known != nil && (known.tag != "" || known.owner != "") {
		return newError(CodeSnapshotExists, nil, "fork that one", "the snapshot is here already and has the tag %s", known.tag)
	}
	var fresh []*frozen
	var recs []store.Snapshot
	for _, man := range chain {
		switch f := m.byID[man.ID]; {
		case f == nil:
			f = stored(store.Snapshot{ID: man.ID, Tenant: tenant, Image: man.Image.Name, CreatedAt: man.CreatedAt}, man)
			fresh = append(fresh, f)
			recs = append(recs, store.Snapshot{ID: f.id, Tenant: tenant, Status: store.SnapshotReady, Image: f.image, CreatedAt: f.createdAt})
		case f.deleting || f.status == StatusFailed:
			return newError(CodeSnapshotInUse, nil, "try again when it is gone", "snapshot %s, which it rests on, can't be used or is being deleted", f.name())
		}
	}
	if known == nil {
		fresh[len(fresh)-1].tag, recs[len(recs)-1].Tag = tag, tag
	}
	if err := m.recordChain(context.WithoutCancel(ctx), tenant, tag, tip.ID, recs, known); err != nil {
		return err
	}
	if known != nil { // others rested on it, and nobody could use it by itself
		m.unlistLocked(known)
		again := stored(store.Snapshot{ID: tip.ID, Tenant: tenant, Tag: tag, Image: known.image, CreatedAt: known.createdAt}, tip)
		fresh = append(fresh, again)
	}
	for _, f := range fresh {
		m.listLocked(f)
		if f.tag != "" {
			f.pool = m.newPool(f, 0)
		}
	}
	return nil
}

func (m *Manager) recordChain(ctx context.Context, tenant, tag, id string, recs []store.Snapshot, known *frozen) error {
	if known != nil {
		return m.db.AddTag(ctx, tenant, tag, id, time.Now())
	}
	return m.db.AddSnapshots(ctx, recs...)
}

// Hold keeps a snapshot, and with it what it rests on, from being deleted until release: for who reads its files.
func (m *Manager) Hold(ctx context.Context, tag string) (id string, release func(), err error) {
	if err := checkTag(tag); err != nil {
		return "", nil, err
	}
	f, release, err := m.use(ctx, tag)
	if err != nil {
		return "", nil, err
	}
	return f.id, release, nil
}

// stored is a snapshot that is on disk.
func stored(rec store.Snapshot, man snapshot.Manifest) *frozen {
	return &frozen{id: rec.ID, tag: rec.Tag, tenant: rec.Tenant, public: rec.Public, secrets: rec.Secrets, owner: rec.Owner, image: rec.Image, imageID: man.Image.ID, createdAt: rec.CreatedAt, bootWarm: rec.BootWarm,
		status: StatusReady, manifest: man, stored: man, parent: man.Parent, measured: rec.Measured, network: rec.Network}
}

// litterLocked returns the snapshots that would serve nothing any more when some were gone: those without a tag that nothing else rests on,
// the ones that rest on others first. Preconditions: m.mu is held.
func (m *Manager) litterLocked(gone []*frozen) []*frozen {
	out := map[string]bool{}
	for _, f := range gone {
		out[f.id] = true
	}
	var litter []*frozen
	for grown := true; grown; {
		grown = false
		for _, id := range slices.Sorted(maps.Keys(m.byID)) {
			f := m.byID[id]
			if f.tag != "" || f.owner != "" || out[id] || f.status == StatusWriting || f.deleting || f.forks > 0 || m.neededLocked(f, out) {
				continue
			}
			out[id], grown = true, true
			litter = append(litter, f)
		}
	}
	return litter
}

// neededLocked says whether anything but what is going rests on a snapshot. Preconditions: m.mu is held.
func (m *Manager) neededLocked(f *frozen, going map[string]bool) bool {
	for id, other := range m.byID {
		if other.parent == f.id && !going[id] {
			return true
		}
	}
	return len(m.usersLocked(f)) > 0
}
