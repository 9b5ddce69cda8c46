package sandbox

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"
)

// model is what should be in every sandbox and snapshot: the text at each of a few places in memory, and in files of the same names.
type model struct {
	t         *testing.T
	d         *daemon
	rand      *rand.Rand
	boxes     map[string]content
	suspended map[string]bool
	snapshots map[string]content
	next      int
	log       []string
}

type content map[int]string // by place

const (
	places   = 12
	placeGap = 3 * 4096 // between two places, so that layers have gaps
)

// TestRandomTrees does random things to a growing graph and compares all of it with a model: depth, restarts, suspensions and deletions included.
func TestRandomTrees(t *testing.T) {
	seed := uint64(time.Now().UnixNano())
	rounds := 2
	if testing.Short() {
		rounds = 1
	}
	for round := range rounds {
		t.Run(fmt.Sprint(round), func(t *testing.T) {
			t.Parallel()
			m := &model{t: t, d: newWorld(t).start(t, options{}), rand: rand.New(rand.NewPCG(seed, uint64(round))),
				boxes: map[string]content{}, suspended: map[string]bool{}, snapshots: map[string]content{}}
			m.d.snapshot(t, "base", nil)
			m.snapshots["base"] = content{}
			for range 60 {
				m.step()
				if t.Failed() {
					t.Fatalf("seed %d, round %d, after:\n%s", seed, round, strings.Join(m.log, "\n"))
				}
			}
			m.checkAll()
		})
	}
}

func (m *model) pick(from map[string]content) string {
	keys := slices.Sorted(maps.Keys(from))
	if len(keys) == 0 {
		return ""
	}
	// The newest are likely: so trees grow deep.
	if m.rand.IntN(2) == 0 {
		return keys[len(keys)-1]
	}
	return keys[m.rand.IntN(len(keys))]
}

func (m *model) note(format string, args ...any) { m.log = append(m.log, fmt.Sprintf(format, args...)) }

func (m *model) tag() string {
	m.next++
	return fmt.Sprintf("t%03d", m.next)
}

func (m *model) step() {
	switch box, tag := m.pick(m.boxes), m.pick(m.snapshots); {
	case box == "" || len(m.boxes) < 2:
		m.fork(tag)
	case len(m.boxes) > 5:
		m.kill(box)
	default:
		steps := []func(){
			func() { m.fork(tag) }, func() { m.write(box) }, func() { m.write(box) }, func() { m.write(box) },
			func() { m.branch(box) }, func() { m.branch(box) }, func() { m.forkRunning(box) },
			func() { m.suspend(box) }, func() { m.check(box) }, func() { m.kill(box) },
			func() { m.snapshotDiff(tag) }, func() { m.compact(tag) }, func() { m.delete(tag) }, func() { m.restart() },
		}
		steps[m.rand.IntN(len(steps))]()
	}
}

func (m *model) fork(tag string) {
	m.note("fork %s", tag)
	b := m.d.fork(m.t, tag, 1, func(r *ForkRequest) { r.AutoResume = m.rand.IntN(2) == 0 })[0]
	m.boxes[b.ID] = maps.Clone(m.snapshots[tag])
	m.check(b.ID)
}

// awake resumes a sandbox that is suspended.
func (m *model) awake(box string) {
	if !m.suspended[box] {
		return
	}
	delete(m.suspended, box)
	if b, err := m.d.Sandbox(m.t.Context(), box); err == nil && b.AutoResume && m.rand.IntN(2) == 0 {
		return // its next request will
	}
	m.note("resume %s", box)
	m.d.resume(m.t, box)
}

func (m *model) write(box string) {
	m.awake(box)
	place := m.rand.IntN(places)
	m.next++
	text := fmt.Sprintf("%06d", m.next)
	m.note("write %s to %s at %d", text, box, place)
	m.d.sh(m.t, box, writing(place, text))
	m.boxes[box][place] = text
}

func writing(place int, text string) string {
	return fmt.Sprintf("poke %d %s; echo %s > /f%d", 1<<20+place*placeGap, text, text, place)
}

func (m *model) branch(box string) {
	m.awake(box)
	tag := m.tag()
	mode := []BranchMode{BranchLive, BranchLive, BranchDiff, BranchFull}[m.rand.IntN(4)]
	wait := m.rand.IntN(2) == 0
	m.note("branch %s as %s, %s, wait %v", box, tag, mode, wait)
	if _, err := m.d.Branch(m.t.Context(), box, BranchRequest{Tag: tag, Mode: mode, Wait: wait}); err != nil {
		m.t.Errorf("Branch: %v", err)
	}
	m.snapshots[tag] = maps.Clone(m.boxes[box])
}

func (m *model) forkRunning(box string) {
	m.awake(box)
	req := ForkRunningRequest{N: 1}
	if m.rand.IntN(3) == 0 {
		req.Tag = m.tag()
		m.snapshots[req.Tag] = maps.Clone(m.boxes[box])
	}
	m.note("fork running %s, tag %q", box, req.Tag)
	res, err := m.d.ForkRunning(m.t.Context(), box, req)
	if err != nil || res.Results[0].Err != nil {
		m.t.Fatalf("ForkRunning: %+v, %v\n%s", res, err, strings.Join(m.log, "\n"))
	}
	id := res.Results[0].Sandbox.ID
	m.boxes[id] = maps.Clone(m.boxes[box])
	m.check(id)
}

func (m *model) suspend(box string) {
	if m.suspended[box] {
		return
	}
	if b, err := m.d.Sandbox(m.t.Context(), box); err != nil || b.State == StateSuspended {
		return
	}
	m.note("suspend %s", box)
	m.d.suspend(m.t, box)
	m.suspended[box] = true
}

func (m *model) snapshotDiff(from string) {
	m.settle()
	tag, place := m.tag(), m.rand.IntN(places)
	m.note("diff of %s as %s", from, tag)
	m.d.diff(m.t, from, tag, writing(place, "d"+tag))
	m.snapshots[tag] = maps.Clone(m.snapshots[from])
	m.snapshots[tag][place] = "d" + tag
}

func (m *model) compact(from string) {
	m.settle()
	tag := m.tag()
	m.note("compact %s to %s", from, tag)
	if _, err := m.d.Compact(m.t.Context(), from, tag); err != nil {
		m.t.Errorf("Compact: %v", err)
	}
	m.snapshots[tag] = maps.Clone(m.snapshots[from])
}

func (m *model) delete(tag string) {
	if tag == "base" {
		return
	}
	m.settle()
	err := m.d.DeleteSnapshot(m.t.Context(), tag, DeleteSafe)
	m.note("delete %s: %v", tag, err)
	switch CodeOf(err) {
	case "":
		delete(m.snapshots, tag)
	case CodeSnapshotInUse:
	default:
		m.t.Errorf("DeleteSnapshot: %v", err)
	}
}

func (m *model) kill(box string) {
	m.note("kill %s", box)
	if err := m.d.Kill(m.t.Context(), box); err != nil {
		m.t.Errorf("Kill: %v", err)
	}
	delete(m.boxes, box)
	delete(m.suspended, box)
}

func (m *model) restart() {
	m.note("restart")
	m.d = m.d.restart(m.t)
}

// settle waits until every snapshot is on disk.
func (m *model) settle() {
	eventually(m.t, "snapshots", func() string {
		list, err := m.d.Snapshots(m.t.Context())
		for _, s := range list {
			if s.Status != StatusReady {
				return fmt.Sprintf("%s is %s: %s", s.Tag, s.Status, s.Warning)
			}
		}
		if err != nil || len(list) != len(m.snapshots) {
			return fmt.Sprintf("got %d snapshots, %v, want %d", len(list), err, len(m.snapshots))
		}
		return ""
	})
}

func (m *model) check(box string) {
	m.awake(box)
	m.compare(box, m.boxes[box])
}

func (m *model) compare(box string, want content) {
	for place, text := range want {
		got := m.d.sh(m.t, box, fmt.Sprintf("peek %d %d; echo; cat /f%d", 1<<20+place*placeGap, len(text), place))
		if got != text+"\n"+text {
			m.t.Errorf("sandbox %s at %d: got %q, want %q", box, place, got, text)
		}
	}
}

func (m *model) checkAll() {
	m.restart()
	m.settle()
	for box := range m.boxes {
		m.check(box)
	}
	for tag, want := range m.snapshots {
		if err := m.d.VerifySnapshot(m.t.Context(), tag); err != nil {
			m.t.Errorf("VerifySnapshot %s: %v", tag, err)
		}
		b := m.d.fork(m.t, tag, 1, nil)[0]
		m.compare(b.ID, want)
		if err := m.d.Kill(m.t.Context(), b.ID); err != nil {
			m.t.Error(err)
		}
	}
	if m.t.Failed() {
		m.t.Log(strings.Join(m.log, "\n"))
	}
}
