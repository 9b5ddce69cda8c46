package e2e

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/forkd/forkd/client"
)

// number reads a setting of a test.
func number(t *testing.T, variable string, standard int) int {
	t.Helper()
	text := os.Getenv(variable)
	if text == "" {
		return standard
	}
	n, err := strconv.Atoi(text)
	if err != nil || n < 1 {
		t.Fatalf("%s=%s: want a number that is at least 1", variable, text)
	}
	return n
}

// graph is a daemon's snapshots and sandboxes beside what should be in them.
type graph struct {
	t     *testing.T
	d     *daemon
	dice  *rand.Rand
	nodes map[string]*node   // by tag
	boxes map[string]*member // by id
	next  int
	log   []string
}

// node is a snapshot.
type node struct {
	content
	parent string // the tag that it rests on; "" for none
}

// member is a sandbox.
type member struct {
	*guest
	content
	on        string // the snapshot that it rests on
	suspended bool
}

const (
	graphRoot = "root" // of what is compared; it rests on the seed's snapshot
	mostBoxes = 4
)

// TestSnapshotGraph does random things to a growing graph of real snapshots and compares every child with a model. FORKD_TREE_SEED repeats
// what an earlier run did.
func TestSnapshotGraph(t *testing.T) {
	t.Parallel()
	seed := uint64(number(t, "FORKD_TREE_SEED", int(time.Now().UnixNano()%1e9)+1))
	depth := number(t, "FORKD_TREE_DEPTH", few(5, 3))
	t.Logf("FORKD_TREE_SEED=%d", seed)
	g := &graph{t: t, d: ownDaemon(t, setup{}), dice: rand.New(rand.NewPCG(seed, 0)), nodes: map[string]*node{}, boxes: map[string]*member{}}
	defer func() {
		if t.Failed() {
			t.Logf("FORKD_TREE_SEED=%d; what was done:\n%s", seed, strings.Join(g.log, "\n"))
		}
	}()
	g.plant()
	deck := g.deck()
	for step := range number(t, "FORKD_TREE_STEPS", len(deck)) {
		if step%len(deck) == 0 {
			g.dice.Shuffle(len(deck), func(i, j int) { deck[i], deck[j] = deck[j], deck[i] })
		}
		g.makeRoom()
		deck[step%len(deck)]()
		g.stopIfFailed()
	}
	for g.depth(g.deepest()) < depth {
		g.deepen()
		g.stopIfFailed()
	}
	g.checkAll()
	g.move(g.deepest())
	g.stopIfFailed()
	g.fell()
}

// note writes down what is done.
func (g *graph) note(format string, args ...any) {
	g.log = append(g.log, fmt.Sprintf(format, args...))
}

func (g *graph) stopIfFailed() {
	if g.t.Failed() {
		g.t.FailNow()
	}
}

// plant makes the snapshot that has the area, and one child of it.
func (g *graph) plant() {
	g.d.snapshotDiff(pyTag, graphRoot, areaCode)
	g.nodes[pyTag] = &node{}
	g.nodes[graphRoot] = &node{content: content{files: map[string]writtenFile{}}, parent: pyTag}
	g.fork(graphRoot)
}

// deck is everything that is done, as often as it is worth it.
func (g *graph) deck() []func() {
	fork := func() { g.fork(g.anyNode()) }
	write := func() { g.write(g.anyBox()) }
	branch := func(mode client.BranchMode, wait bool) func() {
		return func() { g.branch(g.anyBox(), mode, wait) }
	}
	return []func(){
		fork, fork, write, write, write,
		branch(client.BranchLive, true), branch(client.BranchLive, false), branch(client.BranchDiff, true), branch(client.BranchFull, true),
		g.diff, g.diff,
		func() { g.forkRunning(g.anyBox(), "") }, func() { g.forkRunning(g.anyBox(), g.tag()) },
		func() { g.suspend(g.anyBox()) }, func() { g.check(g.anyBox()) },
		g.compact, func() { g.remove(client.DeleteUnused) }, func() { g.remove(client.DeleteCascade) },
		g.restart,
	}
}

func (g *graph) tag() string {
	g.next++
	return fmt.Sprintf("t%03d", g.next)
}

// anyNode picks a snapshot; often the deepest one, so that there are deep ones.
func (g *graph) anyNode() string {
	if g.dice.IntN(2) == 0 {
		return g.deepest()
	}
	tags := slices.DeleteFunc(slices.Sorted(maps.Keys(g.nodes)), func(tag string) bool { return tag == pyTag })
	return tags[g.dice.IntN(len(tags))]
}

// deepest is the end of the longest chain on the root.
func (g *graph) deepest() string {
	best := graphRoot
	for _, tag := range slices.Sorted(maps.Keys(g.nodes)) {
		if g.restsOn(tag, graphRoot) && g.depth(tag) >= g.depth(best) {
			best = tag
		}
	}
	return best
}

// depth is how many snapshots one rests on.
func (g *graph) depth(tag string) int {
	n := 0
	for parent := g.nodes[tag].parent; parent != ""; parent = g.nodes[parent].parent {
		n++
	}
	return n
}

// dependents are the snapshots that rest on one, directly or not.
func (g *graph) dependents(tag string) (all []string) {
	for _, other := range slices.Sorted(maps.Keys(g.nodes)) {
		if other != tag && g.restsOn(other, tag) {
			all = append(all, other)
		}
	}
	return all
}

func (g *graph) restsOn(tag, below string) bool {
	for ; tag != ""; tag = g.nodes[tag].parent {
		if tag == below {
			return true
		}
	}
	return false
}

// users are the sandboxes that rest on a snapshot itself.
func (g *graph) users(tag string) (ids []string) {
	for _, id := range slices.Sorted(maps.Keys(g.boxes)) {
		if g.boxes[id].on == tag {
			ids = append(ids, id)
		}
	}
	return ids
}

// oldest returns the sandboxes in the order they were made, which a seed repeats; their ids are made up.
func (g *graph) oldest() []*member {
	return slices.SortedFunc(maps.Values(g.boxes), func(a, b *member) int { return a.order() - b.order() })
}

func (m *member) order() int { n, _ := strconv.Atoi(m.Metadata["order"]); return n }

// anyBox picks a sandbox and wakes it.
func (g *graph) anyBox() *member {
	if len(g.boxes) == 0 {
		g.fork(g.anyNode())
	}
	list := g.oldest()
	b := list[g.dice.IntN(len(list))]
	if b.suspended {
		g.note("resume %s", b.ID)
		g.d.resume(b.guest)
		b.suspended = false
		g.check(b)
	}
	return b
}

// makeRoom ends a sandbox when there are many.
func (g *graph) makeRoom() {
	for len(g.boxes) >= mostBoxes {
		list := g.oldest()
		g.kill(list[g.dice.IntN(len(list))])
	}
}

func (g *graph) kill(b *member) {
	g.note("kill %s", b.ID)
	b.guest.kill()
	delete(g.boxes, b.ID)
}

// admit takes a new sandbox in and looks at what is in it.
func (g *graph) admit(s *guest, c content, on string) *member {
	b := &member{guest: s, content: c.clone(), on: on}
	g.boxes[b.ID] = b
	g.note("  is %s", b.ID)
	g.check(b)
	return b
}

// numbered gives a sandbox its place in the order.
func (g *graph) numbered() map[string]string {
	g.next++
	return map[string]string{"order": strconv.Itoa(g.next)}
}

func (g *graph) fork(tag string) *member {
	g.note("fork %s", tag)
	s := g.d.fork1(of(tag), func(r *client.ForkRequest) { r.Metadata = g.numbered() })
	return g.admit(s, g.nodes[tag].content, tag)
}

func (g *graph) check(b *member) {
	if b.suspended {
		return
	}
	if err := b.compare(b.guest); err != nil {
		g.t.Errorf("%v, which rests on %s: %v", b.guest, b.on, err)
	}
}

func (g *graph) write(b *member) {
	ch := b.newChange(g.tag(), g.dice)
	g.note("write %s in %s", ch.mark, b.ID)
	b.py(ch.code())
	b.apply(ch)
}

// branch makes a snapshot of a sandbox, which goes on and changes: the snapshot must not.
func (g *graph) branch(b *member, mode client.BranchMode, wait bool) string {
	tag := g.tag()
	g.note("branch %s as %s, %s, wait %v", b.ID, tag, mode, wait)
	snap := g.d.branch(b.guest, client.BranchRequest{Tag: tag, Mode: mode, Wait: client.Bool(wait)})
	if snap.Warning != "" || snap.BranchedFrom != b.ID {
		g.t.Errorf("branch %s of %s: warning %q, branched from %s", tag, b.ID, snap.Warning, snap.BranchedFrom)
	}
	g.nodes[tag] = &node{b.content.clone(), b.on}
	if mode == client.BranchFull {
		g.nodes[tag].parent = ""
	}
	g.write(b)
	g.makeRoom()
	g.fork(tag)
	return tag
}

func (g *graph) diff() {
	from, tag := g.anyNode(), g.tag()
	ch := g.nodes[from].newChange(tag, g.dice)
	g.note("diff of %s as %s", from, tag)
	g.settle()
	g.d.snapshotDiff(from, tag, ch.code())
	g.nodes[tag] = &node{g.nodes[from].content.clone(), from}
	g.nodes[tag].apply(ch)
}

// snapshotDiff freezes what some code changes in a child of a snapshot.
func (d *daemon) snapshotDiff(from, tag, code string) {
	d.t.Helper()
	ctx, cancel := d.limited()
	defer cancel()
	if _, err := d.client.SnapshotDiff(ctx, from, client.DiffRequest{Tag: tag, Steps: []client.WarmUp{{Kind: "eval", Code: code}}}, nil); err != nil {
		d.t.Fatalf("diff %s of %s: %v", tag, from, err)
	}
}

func (g *graph) forkRunning(b *member, tag string) {
	g.note("fork running %s, tag %q", b.ID, tag)
	ctx, cancel := g.d.limited()
	defer cancel()
	forked, err := g.d.client.ForkRunning(ctx, b.ID, client.ForkRunningRequest{N: client.Int(1), Tag: tag, Metadata: g.numbered()})
	if err != nil {
		g.t.Fatalf("fork of %v: %v", b.guest, err)
	}
	on := b.on
	if tag != "" {
		g.nodes[tag] = &node{b.content.clone(), b.on}
		on = tag
	}
	is := b.content.clone()
	g.write(b)
	g.admit(&guest{forked.Sandboxes[0], g.d}, is, on)
}

func (g *graph) suspend(b *member) {
	g.note("suspend %s", b.ID)
	g.d.suspend(b.guest)
	b.suspended = true
}

func (g *graph) compact() {
	from, tag := g.anyNode(), g.tag()
	g.note("compact %s to %s", from, tag)
	g.settle()
	g.d.must("snapshot-compact", "--from", from, "--to", tag)
	g.nodes[tag] = &node{content: g.nodes[from].content.clone()}
	g.makeRoom()
	g.fork(tag)
}

// remove deletes a snapshot, or is refused it for the right reason.
func (g *graph) remove(mode client.DeleteMode) {
	g.settle()
	tags := slices.DeleteFunc(slices.Sorted(maps.Keys(g.nodes)), func(tag string) bool { return tag == pyTag || tag == graphRoot })
	if len(tags) == 0 {
		return
	}
	g.removeTag(tags[g.dice.IntN(len(tags))], mode)
	g.removeTag(graphRoot, client.DeleteUnused) // everything rests on it, or nothing may be left to compare
}

func (g *graph) removeTag(tag string, mode client.DeleteMode) {
	ctx, cancel := g.d.limited()
	defer cancel()
	dependents, users := g.dependents(tag), g.users(tag)
	if mode == client.DeleteCascade {
		for _, below := range dependents {
			users = append(users, g.users(below)...)
		}
	} else if len(dependents) == 0 && tag == graphRoot {
		return
	}
	err := g.d.client.DeleteSnapshot(ctx, tag, mode)
	g.note("delete %s %s, on which %v and the sandboxes %v rest: %v", tag, mode, dependents, users, err)
	switch {
	case len(dependents) > 0 && mode != client.DeleteCascade:
		wantError(g.t, "delete "+tag, err, 409, "snapshot_in_use", dependents...)
	case len(users) > 0:
		wantError(g.t, "delete "+tag, err, 409, "snapshot_in_use", "sandboxes that live")
	case err != nil:
		g.t.Errorf("delete %s, which nothing rests on: %v", tag, err)
	default:
		for _, gone := range append(dependents, tag) {
			delete(g.nodes, gone)
		}
	}
	g.checkShape()
}

// restart has another daemon take over. Every other time the one before is killed.
func (g *graph) restart() {
	killed := g.dice.IntN(2) == 0
	g.note("restart, killed %v", killed)
	g.settle()
	if killed {
		g.d.kill9()
	} else {
		g.d.stop()
	}
	g.d.start(setup{})
	for _, b := range g.oldest() {
		g.check(b)
	}
}

// deepen adds one to the depth.
func (g *graph) deepen() {
	g.makeRoom()
	b := g.fork(g.deepest())
	g.write(b)
	g.branch(b, client.BranchLive, true)
}
