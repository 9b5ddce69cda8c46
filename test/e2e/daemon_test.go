package e2e

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/forkd/forkd/client"
)

// daemon is a daemon in the hands of a test.
type daemon struct {
	*process
	t       *testing.T
	logFrom int64 // where the log was when the test began

	mu     sync.Mutex
	guests []*guest // that the test made
}

// sharedDaemon returns the daemon that tests share which leave it as it was.
func sharedDaemon(t *testing.T) *daemon {
	t.Helper()
	l := openLab(t)
	seed := l.seedData(t)
	if l.shared == nil {
		p, err := l.newProcess("shared", seed)
		if err == nil {
			err = p.start(nil, nil)
		}
		if err != nil {
			t.Fatalf("start the shared daemon: %v", err)
		}
		l.shared = p
	}
	if !l.shared.runs() {
		t.Fatalf("the shared daemon has died:\n%s", l.shared.logSince(0))
	}
	d := &daemon{process: l.shared, t: t, logFrom: l.shared.logSize()}
	t.Cleanup(func() {
		d.report()
		d.killGuests()
		d.checkTidy()
	})
	return d
}

// setup says how a test's own daemon is started.
type setup struct {
	args, env []string
	empty     bool                    // no images and no snapshot
	prepare   func(data string) error // before the first start
	netns     string                  // file of the network namespace to run in; "": ours
}

// ownDaemon starts a daemon for this test alone.
func ownDaemon(t *testing.T, s setup) *daemon {
	t.Helper()
	l := openLab(t)
	from := ""
	if !s.empty {
		from = l.seedData(t)
	}
	p, err := l.newProcess(t.Name(), from)
	if err != nil {
		t.Fatal(err)
	}
	d := &daemon{process: p, t: t}
	t.Cleanup(func() {
		d.report()
		for _, problem := range p.end() {
			t.Errorf("left over: %s", problem)
		}
		unmountBelow(p.data)
		os.RemoveAll(p.data)
		os.RemoveAll(filepath.Dir(p.run))
	})
	if s.prepare != nil {
		if err := s.prepare(p.data); err != nil {
			t.Fatalf("prepare the daemon's data: %v", err)
		}
	}
	p.netns = s.netns
	d.start(s)
	return d
}

// in is the daemon in the hands of a part of the test.
func (d *daemon) in(t *testing.T) *daemon {
	part := &daemon{process: d.process, t: t, logFrom: d.logSize()}
	t.Cleanup(func() {
		part.report()
		if part.runs() {
			part.killGuests()
		}
	})
	return part
}

// start starts the daemon, for the first time or again.
func (d *daemon) start(s setup) {
	d.t.Helper()
	if err := d.process.start(s.args, s.env); err != nil {
		d.t.Fatal(err)
	}
}

// stop stops the daemon politely.
func (d *daemon) stop() {
	d.t.Helper()
	if err := d.process.stop(); err != nil {
		d.t.Fatal(err)
	}
}

// kill9 kills the daemon's process and nothing else.
func (d *daemon) kill9() {
	d.t.Helper()
	if err := d.process.kill(); err != nil {
		d.t.Fatal(err)
	}
}

// awaitDeath waits until the daemon was killed by a failpoint.
func (d *daemon) awaitDeath() {
	d.t.Helper()
	if err := d.awaitExit(callLimit); err != nil {
		d.t.Fatalf("no failpoint struck: %v", err)
	}
	if got := d.cmd.ProcessState.String(); got != "signal: killed" {
		d.t.Fatalf("the daemon ended with %s, want the SIGKILL of a failpoint\n%s", got, d.logSince(d.logFrom))
	}
}

// report prints what helps to understand a failure.
func (d *daemon) report() {
	if !d.t.Failed() {
		return
	}
	d.t.Log(d.logSince(d.logFrom))
	if !d.runs() {
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	const most = 4
	list, _ := d.client.Sandboxes(ctx, true)
	for _, s := range list[max(0, len(list)-most):] {
		if console, err := d.client.Logs(ctx, s.ID); err == nil && len(console) > 0 {
			d.t.Logf("console of sandbox %s (%s %s):\n%s", s.ID, s.State, s.Reason, console[max(0, len(console)-4096):])
		}
	}
}

// killGuests ends what the test made.
func (d *daemon) killGuests() {
	d.mu.Lock()
	guests := d.guests
	d.guests = nil
	d.mu.Unlock()
	ctx, cancel := context.WithTimeout(context.Background(), callLimit)
	defer cancel()
	var wg sync.WaitGroup
	slots := make(chan struct{}, 8)
	for _, g := range guests {
		slots <- struct{}{}
		wg.Go(func() {
			defer func() { <-slots }()
			if err := d.client.Kill(ctx, g.ID); err != nil && !client.IsCode(err, "sandbox_not_found") {
				d.t.Errorf("kill sandbox %s: %v", g.ID, err)
			}
		})
	}
	wg.Wait()
}

// limited is a context for one request.
func (d *daemon) limited() (context.Context, context.CancelFunc) {
	return context.WithTimeout(context.WithoutCancel(d.t.Context()), callLimit)
}

// tidyLimit is how long what ends in the background may take.
var tidyLimit = patient(time.Minute)

// checkTidy compares what the daemon says with what is there: processes, directories, half-made things.
func (d *daemon) checkTidy() {
	d.t.Helper()
	eventually(d.t, tidyLimit, func() error { return d.untidy() })
}

// untidy says what is there and shouldn't be, or the other way round.
func (d *daemon) untidy() error {
	ctx, cancel := d.limited()
	defer cancel()
	boxes, err := d.client.Sandboxes(ctx, true)
	if err != nil {
		return fmt.Errorf("list the sandboxes: %w", err)
	}
	snaps, err := d.client.Snapshots(ctx)
	if err != nil {
		return fmt.Errorf("list the snapshots: %w", err)
	}
	var problems []string
	problem := func(format string, args ...any) { problems = append(problems, fmt.Sprintf(format, args...)) }
	machines := machinesIn(d.run)
	known := map[string]bool{} // consoles that may be kept
	for _, b := range boxes {
		known[b.ID] = true
		if b.State != "running" {
			if b.EndedAtUnix == nil && b.State != "suspended" {
				problem("sandbox %s is %s and has no end", b.ID, b.State)
			}
			continue
		}
		if machines[b.ID] != b.PID {
			problem("sandbox %s is listed with pid %d, its directory's monitor has pid %d", b.ID, b.PID, machines[b.ID])
		}
		delete(machines, b.ID)
	}
	pooled := 0
	for _, s := range snaps {
		pooled += s.Pool.Ready
		if s.Status != "ready" || s.Pool.Filling > 0 {
			problem("snapshot %s is %s, %d children of its pool are being made", s.Tag, s.Status, s.Pool.Filling)
		}
	}
	if len(machines) != pooled {
		problem("%d monitors run without a sandbox, %d of pools are known: %v", len(machines), pooled, machines)
	}
	if dirs := entries(filepath.Join(d.run, "vm")); len(dirs) != len(machinesIn(d.run)) {
		problem("%d machine directories for %d monitors: %v", len(dirs), len(machinesIn(d.run)), dirs)
	}
	for id := range groupsOf(d.run) {
		if machinesIn(d.run)[id] == 0 {
			problem("control group of %s is left", id)
		}
	}
	for _, name := range entries(filepath.Join(d.run, "console")) {
		if !known[name] {
			problem("the console of %s is kept and nobody knows it", name)
		}
	}
	if err := d.untidyStore(ctx, boxes); err != nil {
		problem("%v", err)
	}
	for _, name := range d.halfMade() {
		problem("%s is left", name)
	}
	if z := zombies(d.cmd.Process.Pid); len(z) > 0 {
		problem("ended processes that the daemon did not wait for: %v", z)
	}
	if len(problems) > 0 {
		return errors.New(strings.Join(problems, "\n"))
	}
	return nil
}

// untidyStore compares the snapshots on disk with those that are known: the graph, and what sandboxes are suspended to or were before.
func (d *daemon) untidyStore(ctx context.Context, boxes []client.Sandbox) error {
	roots, err := d.client.Tree(ctx)
	if err != nil {
		return fmt.Errorf("the tree: %w", err)
	}
	var ids, stored []string
	walk(roots, func(n client.TreeNode, _ int) { ids = append(ids, n.Snapshot.ID) })
	states := map[string]int{}
	for _, name := range entries(filepath.Join(d.data, "snapshots")) {
		owner := ""
		if !slices.Contains(ids, name) {
			owner = d.ownerOf(name)
		}
		if owner == "" {
			stored = append(stored, name)
		} else {
			states[owner]++
		}
	}
	slices.Sort(ids)
	slices.Sort(stored)
	if !slices.Equal(stored, ids) {
		return fmt.Errorf("snapshots on disk: %v, known: %v", stored, ids)
	}
	for _, b := range boxes {
		n := states[b.ID]
		delete(states, b.ID)
		_, was := d.suspended.Load(b.ID)
		if n > 1 || n == 1 && (b.EndedAtUnix != nil || !was) || n == 0 && b.State == "suspended" {
			return fmt.Errorf("sandbox %s is %s, %d states of it are on disk", b.ID, b.State, n)
		}
	}
	if len(states) > 0 {
		return fmt.Errorf("states of sandboxes that nobody knows are on disk: %v", states)
	}
	return nil
}

// ownerOf is the sandbox that a snapshot was branched from, or is the state of.
func (d *daemon) ownerOf(snapshot string) string {
	data, err := os.ReadFile(filepath.Join(d.data, "snapshots", snapshot, "manifest.json"))
	if err != nil {
		return ""
	}
	var sealed struct {
		Manifest struct {
			BranchedFrom string `json:"branched_from"`
		} `json:"manifest"`
	}
	_ = json.Unmarshal(data, &sealed) // a damaged one has no owner
	return sealed.Manifest.BranchedFrom
}

// walk visits a forest, what is rested on first.
func walk(nodes []client.TreeNode, visit func(n client.TreeNode, depth int)) {
	var from func(nodes []client.TreeNode, depth int)
	from = func(nodes []client.TreeNode, depth int) {
		for _, n := range nodes {
			visit(n, depth)
			from(n.Children, depth+1)
		}
	}
	from(nodes, 0)
}

// eventually retries what can't be awaited until it is well.
func eventually(t *testing.T, limit time.Duration, check func() error) {
	t.Helper()
	deadline := time.Now().Add(limit)
	for pause := 5 * time.Millisecond; ; pause = min(2*pause, 250*time.Millisecond) {
		err := check()
		if err == nil {
			return
		}
		if time.Now().After(deadline) {
			t.Errorf("after %v still: %v", limit, err)
			return
		}
		time.Sleep(pause)
	}
}
