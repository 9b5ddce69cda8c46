package e2e

import (
	"crypto/sha256"
	"fmt"
	"io"
	"maps"
	"os"
	"path/filepath"
	"slices"

	"github.com/forkd/forkd/client"
)

// settle waits until every snapshot is on disk.
func (g *graph) settle() {
	g.t.Helper()
	ctx, cancel := g.d.limited()
	defer cancel()
	eventually(g.t, tidyLimit, func() error {
		list, err := g.d.client.Snapshots(ctx)
		for _, s := range list {
			if s.Status != "ready" {
				return fmt.Errorf("snapshot %s is %s: %s", s.Tag, s.Status, s.Warning)
			}
		}
		return err
	})
	g.stopIfFailed()
}

// checkShape compares the tree with the model.
func (g *graph) checkShape() {
	g.t.Helper()
	ctx, cancel := g.d.limited()
	defer cancel()
	roots, err := g.d.client.Tree(ctx)
	if err != nil {
		g.t.Fatal(err)
	}
	seen := 0
	walk(roots, func(n client.TreeNode, depth int) {
		seen++
		tag := n.Snapshot.Tag
		want := g.nodes[tag]
		if want == nil || n.Snapshot.ParentTag != want.parent || depth != g.depth(tag) {
			g.t.Errorf("in the tree at depth %d: snapshot %q, resting on %q; want %+v", depth, tag, n.Snapshot.ParentTag, want != nil)
			return
		}
		slices.Sort(n.Sandboxes)
		if users := g.users(tag); !slices.Equal(n.Sandboxes, users) {
			g.t.Errorf("sandboxes that rest on %s: got %v, want %v", tag, n.Sandboxes, users)
		}
	})
	if seen != len(g.nodes) {
		g.t.Errorf("%d snapshots in the tree, want %d", seen, len(g.nodes))
	}
}

// checkAll compares every sandbox, and a child of every snapshot, with the model.
func (g *graph) checkAll() {
	g.restart()
	g.checkShape()
	for _, b := range g.oldest() {
		if b.suspended {
			g.d.resume(b.guest)
			b.suspended = false
			g.check(b)
		}
		g.kill(b)
	}
	deepest, leaves := 0, 0
	for tag, n := range g.nodes {
		deepest = max(deepest, g.depth(tag))
		if tag == pyTag {
			continue
		}
		if len(g.dependents(tag)) == 0 {
			leaves++
		}
		g.d.must("snapshot-verify", tag)
		child := g.d.fork1(of(tag))
		if err := n.compare(child); err != nil {
			g.t.Errorf("%v of %s at depth %d: %v", child, tag, g.depth(tag), err)
		}
		child.kill()
	}
	g.d.checkTidy()
	g.t.Logf("%d snapshots, %d of them leaves, depth up to %d, after %d steps", len(g.nodes), leaves, deepest, len(g.log))
}

// move packs a snapshot, takes it in with a daemon that has nothing, and goes on there.
func (g *graph) move(tag string) {
	file := filepath.Join(g.t.TempDir(), "moved.forkd")
	sum := g.d.pack(tag, file)
	there := &graph{t: g.t, d: ownDaemon(g.t, setup{empty: true}), dice: g.dice, boxes: map[string]*member{}, next: g.next,
		nodes: map[string]*node{"moved": {content: g.nodes[tag].content.clone()}}}
	res := there.d.unpack(file, "moved")
	if got, want := len(res.NewSnapshots), g.depth(tag)+1; got != want || !res.NewImage || len(res.PresentSnapshots) != 0 {
		g.t.Errorf("unpacked: %d snapshots, new image %v, want %d: %+v", got, res.NewImage, want, res)
	}
	b := there.fork("moved")
	there.write(b)
	branch := there.branch(b, client.BranchDiff, true)
	if got := there.d.pack("moved", filepath.Join(g.t.TempDir(), "again.forkd")); got != sum {
		g.t.Error("a pack that was taken in and packed again is another file")
	}
	// What comes from there goes back: all but the newest is here.
	back := filepath.Join(g.t.TempDir(), "back.forkd")
	there.d.pack(branch, back)
	res = g.d.unpack(back, "back")
	if len(res.NewSnapshots) != 1 || len(res.PresentSnapshots) != g.depth(tag)+1 || res.NewImage {
		g.t.Errorf("unpacked where all but one was: %+v", res)
	}
	g.nodes["back"] = &node{there.nodes[branch].content.clone(), tag}
	g.fork("back")
	g.checkShape()

	ctx, cancel := there.d.limited()
	defer cancel()
	err := there.d.client.DeleteSnapshot(ctx, "moved", client.DeleteUnused)
	wantError(g.t, "delete what a branch rests on", err, 409, "snapshot_in_use", branch)
	for _, b := range there.oldest() {
		there.kill(b)
	}
	there.d.must("rmi", "moved", "--cascade")
	there.d.must("image", "rm", pythonImage) // nothing rests on it any more
	there.d.checkTidy()
	if left := append(entries(filepath.Join(there.d.data, "snapshots")), there.d.must("image", "ls", "-q")); len(left) != 1 || left[0] != "" {
		g.t.Errorf("left after all was deleted: %v", left)
	}
}

// pack packs a snapshot into a file and returns its digest.
func (d *daemon) pack(tag, file string) (sum [sha256.Size]byte) {
	d.t.Helper()
	d.must("pack", "--tag", tag, "--out", file)
	data, err := os.Open(file)
	if err != nil {
		d.t.Fatal(err)
	}
	defer data.Close()
	h := sha256.New()
	if _, err := io.Copy(h, data); err != nil {
		d.t.Fatal(err)
	}
	return [sha256.Size]byte(h.Sum(nil))
}

func (d *daemon) unpack(file, tag string) client.Unpacked {
	d.t.Helper()
	in, err := os.Open(file)
	if err != nil {
		d.t.Fatal(err)
	}
	defer in.Close()
	ctx, cancel := d.limited()
	defer cancel()
	res, err := d.client.Unpack(ctx, in, client.UnpackOptions{Tag: tag})
	if err != nil {
		d.t.Fatalf("unpack %s: %v", tag, err)
	}
	return res
}

// fell takes the whole graph away, and is refused it as long as there is a reason.
func (g *graph) fell() {
	ctx, cancel := g.d.limited()
	defer cancel()
	err := g.d.client.DeleteSnapshot(ctx, pyTag, client.DeleteUnused)
	wantError(g.t, "delete of the root", err, 409, "snapshot_in_use", g.dependents(pyTag)...)
	err = g.d.client.DeleteSnapshot(ctx, pyTag, client.DeleteCascade)
	wantError(g.t, "delete of all, with a sandbox", err, 409, "snapshot_in_use", "sandboxes that live", "back")
	for _, b := range g.oldest() {
		g.kill(b)
	}
	g.d.must("rmi", pyTag, "--cascade")
	for _, tag := range slices.Sorted(maps.Keys(g.nodes)) {
		if g.restsOn(tag, pyTag) {
			continue
		}
		child := g.d.fork1(of(tag)) // what was stored whole needs nothing of it
		if err := g.nodes[tag].compare(child); err != nil {
			g.t.Errorf("%v of %s, when what it came from is gone: %v", child, tag, err)
		}
		child.kill()
	}
	g.d.checkTidy()
}
