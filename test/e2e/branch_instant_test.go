package e2e

import (
	_ "embed"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"github.com/forkd/forkd/client"
)

var (
	//go:embed branch_writers.py
	writersCode []byte
	//go:embed branch_check.py
	checkCode string
)

// writersDir is where the programs work in a guest.
const writersDir = "/root/writers"

// branches is how many branches a test makes in each mode.
func branches(t *testing.T) int {
	t.Helper()
	text := os.Getenv("FORKD_BRANCHES")
	if text == "" {
		return few(4, 1)
	}
	n, err := strconv.Atoi(text)
	if err != nil || n < 1 {
		t.Fatalf("FORKD_BRANCHES=%s: want how many branches to make in each mode", text)
	}
	return n
}

// TestBranchesAreOfOneInstant branches a machine whose programs keep invariants at full speed, in memory, in files, in a database and over a
// connection. They hold in a child of every branch, and the programs go on in it, and in the source. That a capture without protection
// breaks them is shown by TestUnprotectedWindowTears of internal/memory: a daemon can't be told to leave it out.
func TestBranchesAreOfOneInstant(t *testing.T) {
	t.Parallel()
	d := ownDaemon(t, setup{})
	source := d.fork1()
	source.startWriters()
	for _, mode := range []client.BranchMode{client.BranchLive, client.BranchDiff, client.BranchFull} {
		t.Run(string(mode), func(t *testing.T) {
			d := d.in(t)
			source := &guest{source.Sandbox, d}
			for done, n := 0, branches(t); done < n; done += pair {
				d.checkInstants(source, mode, done, min(pair, n-done))
			}
			if err := source.checkWriters(); err != nil {
				t.Errorf("the source: %v", err)
			}
		})
	}
	source.kill()
	d.checkTidy()
}

// pair is how many children are checked beside each other.
const pair = 2

// checkInstants branches the source n times while its programs run at full speed, and checks a child of each branch. The source stands
// back meanwhile: that leaves the processors to the children.
func (d *daemon) checkInstants(source *guest, mode client.BranchMode, first, n int) {
	d.t.Helper()
	var children []*guest
	for i := range n {
		tag := fmt.Sprintf("%s-%d", mode, first+i)
		if snap := d.branch(source, client.BranchRequest{Tag: tag, Mode: mode}); snap.Warning != "" {
			d.t.Errorf("branch %s: %s", tag, snap.Warning)
		}
		children = append(children, d.fork1(of(tag)))
	}
	source.favour(19)
	d.each(children, func(_ int, g *guest) error { return g.checkWriters() })
	source.favour(0)
	for _, g := range children {
		g.kill()
		d.must("rmi", g.SnapshotTag)
	}
}

// startWriters starts the programs and returns when each has done something.
func (g *guest) startWriters() {
	g.d.t.Helper()
	const start = `mkdir -p %[1]s && cat >%[1]s/writers.py && { setsid python3 %[1]s/writers.py %[1]s >%[1]s/log 2>&1 </dev/null & pid=$!; } &&
while ! test -e %[1]s/ready; do kill -0 $pid || { cat %[1]s/log; exit 1; }; sleep 0.05; done`
	res, err := g.exec(client.ExecRequest{Args: []string{"sh", "-c", fmt.Sprintf(start, writersDir)}, Stdin: writersCode})
	if err == nil && res.ExitCode != 0 {
		err = fmt.Errorf("%s%s", res.Stdout, res.Stderr)
	}
	if err != nil {
		g.d.t.Fatalf("start the programs in %v: %v", g, err)
	}
}

// favour sets the priority of all threads of a guest's monitor, as nice(1) counts.
func (g *guest) favour(nice int) {
	g.d.t.Helper()
	tasks, err := os.ReadDir(fmt.Sprintf("/proc/%d/task", g.PID))
	if err != nil {
		g.d.t.Fatalf("threads of %v: %v", g, err)
	}
	for _, task := range tasks {
		if tid, err := strconv.Atoi(task.Name()); err == nil {
			_ = syscall.Setpriority(syscall.PRIO_PROCESS, tid, nice) // it may have ended
		}
	}
}

// checkWriters says which invariants do not hold.
func (g *guest) checkWriters() error {
	res, err := g.eval(client.EvalRequest{Code: fmt.Sprintf("where = %q\n%s", writersDir, checkCode)})
	if err == nil && res.Error != nil {
		err = errors.New(*res.Error)
	}
	if err != nil {
		return err
	}
	var found struct {
		Problems []string `json:"problems"`
		Numbers  []int64  `json:"numbers"`
	}
	if err := json.Unmarshal([]byte(res.Stdout), &found); err != nil {
		return fmt.Errorf("%w: %s", err, res.Stdout)
	}
	if len(found.Problems) > 0 {
		log, _ := g.trySh("cat " + writersDir + "/log") // only said when there is something to say
		return fmt.Errorf("%s; numbers %v; %s", strings.Join(found.Problems, "; "), found.Numbers, log)
	}
	return nil
}

// branch freezes a sandbox and returns when the snapshot is on disk.
func (d *daemon) branch(g *guest, req client.BranchRequest) client.Snapshot {
	d.t.Helper()
	snap, err := d.tryBranch(g, req)
	if err != nil {
		d.t.Fatalf("branch %s of %v: %v", req.Tag, g, err)
	}
	return snap
}

func (d *daemon) tryBranch(g *guest, req client.BranchRequest) (client.Snapshot, error) {
	ctx, cancel := d.limited()
	defer cancel()
	return d.client.Branch(ctx, g.ID, req)
}
