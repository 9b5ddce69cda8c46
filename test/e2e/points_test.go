package e2e

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/forkd/forkd/api"
	"github.com/forkd/forkd/client"
	"github.com/forkd/forkd/internal/failpoint"
	"github.com/forkd/forkd/internal/sandbox"
)

// crash is a point at which a daemon is killed, and what the next one shall find.
type crash struct {
	point string
	extra int    // sandboxes beside the survivors: recorded as running, but nobody was told
	tags  string // snapshots
}

// crashes go over every point of the domain. They build on one another: what a crash in the making of a snapshot leaves is deleted by
// the next one that is about deletion.
func crashes() []crash {
	return []crash{
		{"fork.recorded", 0, "old"},
		{"fork.prepared", 0, "old"},
		{"fork.loaded", 0, "old"},
		{"fork.identified", 0, "old"},
		{"fork.running", 1, "old"},
		{"pool.prepared", 0, "old"},
		{"pool.loaded", 0, "old"},
		{"pool.identified", 0, "old"},
		{"pool.ready", 0, "old"},
		{"claim.recorded", 0, "old"},
		{"claim.identified", 0, "old"},
		{"claim.running", 1, "old"},
		{"kill.recorded", 0, "old"},
		{"kill.ended", 0, "old"},
		{"kill.removed", 0, "old"},
		{"snapshot.recorded", 0, "old"},
		{"snapshot.booted", 0, "old"},
		{"snapshot.warm", 0, "old"},
		{"snapshot.saved", 0, "old"},
		{"snapshot.frozen", 0, "old"},
		{"snapshot.staged", 0, "old"},
		{"snapshot.published", 0, "new old"},
		{"delete.recorded", 0, "old"},
		{"snapshot.ready", 0, "new old"},
		{"delete.removed", 0, "old"},
	}
}

// TestDaemonKilledAtEveryPoint kills one daemon after the other, each at another step, over the same data. Two sandboxes live through
// all of it.
func TestDaemonKilledAtEveryPoint(t *testing.T) {
	t.Parallel()
	needVM(t)
	checkCrashes(t)
	d := ownDaemon(t, setup{})
	d.must("rmi", pyTag) // with its interpreter it would only take longer
	d.snapshot(client.SnapshotRequest{Tag: "old"})
	survivors := d.fork(2, of("old"))
	for i, g := range survivors {
		g.sh(fmt.Sprintf("echo %d >/root/mine", i))
	}
	for _, c := range crashes() {
		ok := t.Run(c.point, func(t *testing.T) {
			d := d.in(t)
			scenario, _, _ := strings.Cut(c.point, ".")
			var victim *guest
			switch scenario {
			case "kill":
				victim = d.fork1(of("old"))
			case "claim":
				d.fillPool("old", 1)
			}
			d.stop()
			d.logFrom = d.logSize()
			d.start(setup{env: []string{failpoint.Variable + "=sandbox." + c.point + "=kill"}})
			d.strike(scenario, victim)
			d.awaitDeath()
			d.start(setup{})
			d.checkAfter(c, survivors)
		})
		if !ok {
			break // the next one would only find the same mess
		}
	}
}

// checkCrashes holds that no point is left out of what is tried here at all.
func checkCrashes(t *testing.T) {
	t.Helper()
	var points, scenarios []string
	for _, c := range crashes() {
		scenario, _, _ := strings.Cut(c.point, ".")
		points, scenarios = append(points, "sandbox."+c.point), append(scenarios, scenario)
	}
	for _, p := range sandbox.Points() {
		switch {
		case slices.Contains(points, p):
		case slices.Contains(scenarios, strings.Split(p, ".")[1]):
			t.Errorf("no crash at the point %s is tried", p)
		default:
			t.Logf("crashes at %s and its like are not tried here", p)
		}
	}
}

// strike does what leads to the failpoint. No answer is right: the daemon dies over it.
func (d *daemon) strike(scenario string, victim *guest) {
	d.t.Helper()
	ctx, cancel := d.limited()
	defer cancel()
	var err error
	switch scenario {
	case "fork":
		_, err = d.client.Fork(ctx, client.ForkRequest{SnapshotTag: "old", Path: api.ForkRequestPathCold})
	case "claim":
		if err := d.poolReady(1); err != nil {
			d.t.Fatal(err)
		}
		_, err = d.client.Fork(ctx, client.ForkRequest{SnapshotTag: "old", Path: api.ForkRequestPathPool})
	case "pool":
		if _, err = d.client.SetPool(ctx, "old", 1); err == nil {
			return // it dies in the background
		}
	case "kill":
		err = d.client.Kill(ctx, victim.ID)
	case "snapshot":
		_, err = d.client.CreateSnapshot(ctx, client.SnapshotRequest{Tag: "new", Image: bareImage, MemMiB: 128}, nil)
	case "delete":
		err = d.client.DeleteSnapshot(ctx, "new", client.DeleteUnused)
	}
	if !client.IsCode(err, client.CodeNoDaemon) {
		d.t.Errorf("the request that was to kill the daemon: got %v, want no answer", err)
	}
}

func (d *daemon) poolReady(size int) (err error) {
	eventually(d.t, callLimit, func() error {
		var p client.Pool
		if p, err = d.client.Pool(d.t.Context(), "old"); err == nil && p.Ready != size {
			err = fmt.Errorf("%d children are in the pool", p.Ready)
		}
		return err
	})
	return err
}

// checkAfter compares what the next daemon says, and what is there, with what is wanted.
func (d *daemon) checkAfter(c crash, survivors []*guest) {
	d.t.Helper()
	if got := strings.Fields(d.must("images", "-q")); !slices.Equal(got, strings.Fields(c.tags)) {
		d.t.Errorf("snapshots: got %v, want %s", got, c.tags)
	}
	known := map[string]bool{}
	for i, g := range survivors {
		known[g.ID] = true
		if got := g.sh("cat /root/mine"); got != fmt.Sprint(i) {
			d.t.Errorf("%v remembers %q, want %d", g, got, i)
		}
	}
	extra := 0
	for _, id := range strings.Fields(d.must("ls", "-q")) {
		if known[id] {
			continue
		}
		extra++
		g := &guest{client.Sandbox{ID: id}, d}
		if err := g.ping(); err != nil {
			d.t.Errorf("%v is listed and does not answer: %v", g, err)
		}
		g.kill()
	}
	if extra != c.extra {
		d.t.Errorf("sandboxes beside the survivors: got %d, want %d", extra, c.extra)
	}
	ctx, cancel := d.limited()
	defer cancel()
	pool, err := d.client.Pool(ctx, "old")
	if err != nil {
		d.t.Error(err)
	}
	if strings.HasPrefix(c.point, "pool.") {
		d.fillPool("old", 1) // what the crash kept it from
	}
	if pool.Size > 0 {
		d.fillPool("old", 0)
	}
	if _, err := d.client.Snapshots(ctx); err != nil {
		d.t.Error(errors.Join(errors.New("list the snapshots"), err))
	}
	d.checkTidy()
	d.checkSandboxes(survivors...)
}
