package e2e

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/forkd/forkd/api"
	"github.com/forkd/forkd/client"
	"github.com/forkd/forkd/internal/failpoint"
)

// struck is a sandbox whose monitor is killed while something is done with it.
type struck struct {
	strike
	*guest
	tag   string // of the snapshot that would come of it
	pages string
	ended chan error
}

// TestMonitorKilledInBranches kills the monitors of sandboxes that are being branched, in each mode, or suspended, at every step. What was
// promised is there and right, of the rest there is nothing, and others go on.
func TestMonitorKilledInBranches(t *testing.T) {
	t.Parallel()
	needVM(t)
	d, bystander := countingDaemon(t)
	d.branch(bystander, client.BranchRequest{Tag: "counts"})
	pages, err := bystander.pages()
	if err != nil {
		t.Fatal(err)
	}
	const stall = 1500 * time.Millisecond
	at := map[string][]strike{}
	var points []string
	for _, s := range strikes() {
		if s.what == "resume" || s.point == "sandbox.suspend.ended" {
			continue // there is no monitor yet, or any more
		}
		if at[s.point] == nil {
			points = append(points, s.point)
		}
		at[s.point] = append(at[s.point], s)
	}
	for _, point := range points {
		ok := t.Run(point, func(t *testing.T) {
			d := d.in(t)
			d.stop()
			d.start(setup{env: []string{fmt.Sprintf("%s=%s=stall:%v", failpoint.Variable, point, stall)}})
			victims := d.victims(at[point], pages)
			begin := time.Now()
			for _, v := range victims {
				go func() { v.ended <- v.do(d, v.guest, v.tag) }()
			}
			d.awaitRecorded(victims)
			time.Sleep(max(0, stall/2-time.Since(begin))) // they are at the point then, unless the host is very busy
			for _, v := range victims {
				select {
				case err := <-v.ended:
					t.Errorf("%s of %v was over before its monitor was killed: %v", v.what, v.guest, err)
					v.ended <- err
				default:
				}
				killProcess(t, v.PID)
			}
			tags := []string{"counts", "old"}
			for _, v := range victims {
				if err := <-v.ended; d.checkVictim(v, err) && v.isBranch() {
					tags = append(tags, v.tag)
				}
			}
			slices.Sort(tags)
			if got := strings.Fields(d.must("images", "-q")); !slices.Equal(got, tags) {
				t.Fatalf("snapshots: got %v, want %v", got, tags)
			}
			if err := (&guest{bystander.Sandbox, d}).checkCounting(); err != nil {
				t.Errorf("the bystander %v: %v", bystander, err)
			}
			for _, tag := range tags {
				if tag != "counts" && tag != "old" {
					d.checkSnapshot(tag, pages)
				}
			}
			d.killGuests()
			d.checkSandboxes(&guest{bystander.Sandbox, d})
			d.checkTidy()
		})
		if !ok {
			return
		}
	}
}

// victims are sandboxes in which the program runs, one for each strike.
func (d *daemon) victims(strikes []strike, pages string) (victims []*struck) {
	d.t.Helper()
	for i, g := range d.fork(len(strikes), of("counts")) {
		v := &struck{strike: strikes[i], guest: g, pages: pages, ended: make(chan error, 1)}
		v.tag = "of-" + v.what
		victims = append(victims, v)
	}
	return victims
}

// awaitRecorded waits until everything has begun that shows that it has.
func (d *daemon) awaitRecorded(victims []*struck) {
	d.t.Helper()
	eventually(d.t, callLimit, func() error {
		listed := " " + strings.ReplaceAll(d.must("images", "-q"), "\n", " ") + " "
		for _, v := range victims {
			if v.isBranch() && !strings.Contains(listed, " "+v.tag+" ") {
				return fmt.Errorf("the branch of %v has not begun", v.guest)
			}
		}
		return nil
	})
}

// checkVictim holds that a sandbox whose monitor was killed has ended, with a reason, or is suspended; and that the request knows what became
// of it. It says whether the request was a success.
func (d *daemon) checkVictim(v *struck, err error) (done bool) {
	d.t.Helper()
	if err != nil && !client.IsCode(err, "sandbox_gone") {
		d.t.Errorf("%s of %v, whose monitor was killed: got %v, want the code sandbox_gone", v.what, v.guest, err)
	}
	if err == nil && v.what == "suspend" {
		d.process.suspended.Store(v.ID, true)
		if err := errors.Join(d.tryResume(v.guest), v.check(v.pages)); err != nil {
			d.t.Errorf("%v, which was suspended when its monitor was killed: %v", v.guest, err)
		}
		return true
	}
	eventually(d.t, tidyLimit, func() error {
		s, nowErr := v.now()
		if nowErr == nil && (s.State != api.SandboxInfoStateFailed || s.Reason == "") {
			nowErr = fmt.Errorf("%v is %s: %s", v.guest, s.State, s.Reason)
		}
		return nowErr
	})
	return err == nil
}
