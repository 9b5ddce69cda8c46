package e2e

import (
	"crypto/sha256"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/forkd/forkd/api"
	"github.com/forkd/forkd/client"
	"github.com/forkd/forkd/internal/failpoint"
	"github.com/forkd/forkd/internal/memory"
	"github.com/forkd/forkd/internal/sandbox"
)

// A program that counts in two files, in place, so that the first is never behind the second and never ahead by more than one. Beside it
// there are pages that are only written by the test.
const (
	counting = `cd /root && dd if=/dev/urandom of=pages bs=65536 count=8 2>/dev/null && echo 1000000 >a && echo 1000000 >b && cat >count && { setsid sh count >/dev/null 2>&1 </dev/null & }
while ! test -e pid; do sleep 0.02; done`
	countProgram = `echo $$ >pid; n=1000000
while :; do n=$((n+1)); echo $n 1<>a; echo $n 1<>b; [ $((n % 200)) != 0 ] || sleep 0.1; done
`
	// Stops it, looks, lets it go on, and sees it do so.
	looking = `cd /root; read p <pid; kill -STOP $p; read a <a; read b <b; kill -CONT $p; i=0; c=$a
while [ $c = $a ]; do i=$((i+1)); [ $i -lt 500 ] || { echo "it stands still at $a"; exit 1; }; sleep 0.02; read c <a; done; echo $a $b`
	// Writes every page: one that is still protected from writes, with nobody to let it go, would stop it for good.
	rewriting = `dd if=/dev/zero of=/root/pages bs=65536 count=8 conv=notrunc 2>/dev/null && dd if=/dev/urandom of=/root/pages bs=4096 count=64 conv=notrunc 2>/dev/null`
)

// startCounting starts the program.
func (g *guest) startCounting() {
	g.d.t.Helper()
	res, err := g.exec(client.ExecRequest{Args: []string{"sh", "-c", counting}, Stdin: []byte(countProgram)})
	if err != nil || res.ExitCode != 0 {
		g.d.t.Fatalf("start the program in %v: %+v, %v", g, res, err)
	}
}

// checkCounting says whether the program's invariant is broken, or it does not go on.
func (g *guest) checkCounting() error {
	out, err := g.trySh(looking)
	if err != nil {
		return err
	}
	var a, b int
	if _, err := fmt.Sscan(out, &a, &b); err != nil || a < b || a > b+1 {
		return fmt.Errorf("it counted %q, want twice the same, or the first ahead by one", out)
	}
	return nil
}

// pages is the digest of the pages that only the test writes.
func (g *guest) pages() (string, error) {
	res, err := g.exec(client.ExecRequest{Args: []string{"cat", "/root/pages"}, MaxOutputBytes: 4 << 20})
	if err == nil && len(res.Stdout) != 8*65536 {
		err = fmt.Errorf("%d bytes: %s", len(res.Stdout), res.Stderr)
	}
	return fmt.Sprintf("%x", sha256.Sum256(res.Stdout)), err
}

// check is checkCounting and a comparison of the pages.
func (g *guest) check(pages string) error {
	err := g.checkCounting()
	got, pagesErr := g.pages()
	if pagesErr == nil && got != pages {
		pagesErr = errors.New("its pages are not those of its source")
	}
	return errors.Join(err, pagesErr)
}

// countingDaemon is a daemon with a sandbox in which the program runs.
func countingDaemon(t *testing.T) (*daemon, *guest) {
	d := ownDaemon(t, setup{})
	d.must("rmi", pyTag) // with its interpreter it would only take longer
	d.snapshot(client.SnapshotRequest{Tag: "old"})
	source := d.fork1(of("old"))
	source.startCounting()
	return d, source
}

// strike is a request that doesn't end well, because of what happens at a point on its way.
type strike struct {
	what  string // a mode of branches, suspend, resume
	point string
}

func (s strike) isBranch() bool { return s.what != "suspend" && s.what != "resume" }

// strikes go over all points of branches, suspensions and resumptions: with FORKD_EVERY_POINT in everything that passes them, else in one after
// the other of those.
func strikes() (list []strike) {
	every := os.Getenv("FORKD_EVERY_POINT") != ""
	for i, p := range sandbox.Points() {
		at := strikesAt(p)
		if !every && len(at) > 1 {
			at = at[i%len(at):][:1]
		}
		list = append(list, at...)
	}
	return list
}

// strikesAt are the requests that pass a point. A full branch is a live one until it is written.
func strikesAt(p string) (list []strike) {
	written := []string{"sandbox.branch.captured", "sandbox.branch.staged", "sandbox.branch.published", "sandbox.branch.ready"}
	onlyLive := []string{memory.PointAdopted, memory.PointArming, memory.PointSweep}
	inPause := []string{"sandbox.branch.paused", "sandbox.branch.saved"} // of whatever is captured
	capture := strings.HasPrefix(p, "memory.capture.")
	live := slices.Contains(onlyLive, p)
	if capture || strings.HasPrefix(p, "sandbox.branch.") {
		list = append(list, strike{"live", p})
		if slices.Contains(written, p) {
			list = append(list, strike{"full", p})
		}
		if !live {
			list = append(list, strike{"diff", p})
		}
	}
	if capture && !live || slices.Contains(inPause, p) || strings.HasPrefix(p, "sandbox.suspend.") {
		list = append(list, strike{"suspend", p})
	}
	if strings.HasPrefix(p, "sandbox.resume.") {
		list = append(list, strike{"resume", p})
	}
	return list
}

// do makes the request.
func (s strike) do(d *daemon, g *guest, tag string) error {
	ctx, cancel := d.limited()
	defer cancel()
	var err error
	switch s.what {
	case "suspend":
		_, err = d.client.Suspend(ctx, g.ID)
	case "resume":
		_, err = d.client.Resume(ctx, g.ID)
	default:
		_, err = d.tryBranch(g, client.BranchRequest{Tag: tag, Mode: client.BranchMode(s.what)})
	}
	return err
}

// afterKill is what the next daemon shall find: whether the snapshot is there, and whether the sandbox is suspended.
func (s strike) afterKill() (published, suspended bool) {
	switch s.point {
	case "sandbox.branch.published", "sandbox.branch.ready":
		published = true // it was complete
	case "sandbox.suspend.marked", "sandbox.suspend.ended", "sandbox.resume.prepared", "sandbox.resume.loaded", "sandbox.resume.identified":
		suspended = true
	}
	return published, suspended
}

// TestDaemonKilledInBranches kills one daemon after the other, each at another step of a branch, a suspension or a resumption of the same
// sandbox. It goes on, or comes back, as it was.
func TestDaemonKilledInBranches(t *testing.T) {
	t.Parallel()
	needVM(t)
	d, source := countingDaemon(t)
	all := strikes()
	kill := func(i int) setup {
		return setup{env: []string{failpoint.Variable + "=" + all[i].point + "=kill"}}
	}
	armed := false
	for i, s := range all {
		ok := t.Run(s.what+" "+s.point, func(t *testing.T) {
			d := d.in(t)
			source := &guest{source.Sandbox, d}
			if !armed {
				d.stop()
				d.start(kill(i))
			}
			if s.what == "resume" {
				d.suspend(source)
			}
			pages := ""
			if published, _ := s.afterKill(); published {
				var err error
				if pages, err = source.pages(); err != nil {
					t.Fatal(err)
				}
			}
			if err := s.do(d, source, "new"); !client.IsCode(err, client.CodeNoDaemon) {
				t.Errorf("the request that was to kill the daemon: got %v, want no answer", err)
			}
			d.awaitDeath()
			next := setup{}
			if armed = i+1 < len(all) && all[i+1].what != "resume"; armed {
				next = kill(i + 1) // nothing below comes to that point
			}
			d.start(next)
			d.checkStruck(s, source, pages)
		})
		if !ok {
			return // the next one would only find the same mess
		}
		if s, err := source.now(); err == nil {
			source.Sandbox = s // a resumed one has another monitor
		}
	}
	for _, mode := range []client.BranchMode{client.BranchLive, client.BranchDiff, client.BranchFull} {
		pages, err := source.pages()
		if err != nil {
			t.Fatal(err)
		}
		d.branch(source, client.BranchRequest{Tag: string(mode), Mode: mode})
		if err := d.fork1(of(string(mode))).check(pages); err != nil {
			t.Errorf("a branch after all that, %s: %v", mode, err)
		}
	}
	d.killGuests()
	d.checkTidy()
}

// checkStruck compares what is there after a daemon was killed with what is wanted.
func (d *daemon) checkStruck(s strike, source *guest, pages string) {
	d.t.Helper()
	published, suspended := s.afterKill()
	now, err := source.now()
	if err != nil {
		d.t.Fatal(err)
	}
	want := api.SandboxInfoStateRunning
	if suspended {
		want = api.SandboxInfoStateSuspended
		d.process.suspended.Store(source.ID, true)
	}
	if now.State != want || s.isBranch() && now.PID != source.PID {
		d.t.Errorf("%v is %s with the monitor %d, want %s with %d", source, now.State, now.PID, want, source.PID)
	}
	d.checkTidy()
	if suspended {
		d.resume(source)
	}
	if err := source.checkCounting(); err != nil {
		d.t.Errorf("%v: %v", source, err)
	}
	source.sh(rewriting)
	tags := []string{"old"}
	if published {
		tags = []string{"new", "old"}
	}
	if got := strings.Fields(d.must("images", "-q")); !slices.Equal(got, tags) {
		d.t.Fatalf("snapshots: got %v, want %v", got, tags)
	}
	if published {
		d.checkSnapshot("new", pages)
	}
	d.checkSandboxes(source)
	d.checkTidy()
}

// checkSnapshot holds that a snapshot is whole and what it should be, and removes it.
func (d *daemon) checkSnapshot(tag, pages string) {
	d.t.Helper()
	d.must("snapshot-verify", tag)
	child := d.fork1(of(tag))
	if err := child.check(pages); err != nil {
		d.t.Errorf("%v of %s: %v", child, tag, err)
	}
	child.kill()
	d.must("rmi", tag)
}
