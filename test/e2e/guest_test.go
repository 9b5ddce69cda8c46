package e2e

import (
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/forkd/forkd/api"
	"github.com/forkd/forkd/client"
)

// guestLimit is the timeout of commands and code in guests that are to succeed.
var guestLimit = patient(3 * time.Minute)

// guest is a sandbox in the hands of a test. Methods that begin with try return their error, for use beside the test's goroutine; the
// others end the test.
type guest struct {
	client.Sandbox
	d *daemon
}

func (g *guest) String() string { return "sandbox " + g.ID }

// fork starts sandboxes of the shared snapshot, cold, which are killed at the end of the test.
func (d *daemon) fork(n int, change ...func(*client.ForkRequest)) []*guest {
	d.t.Helper()
	guests, err := d.tryFork(n, change...)
	if err != nil {
		d.t.Fatalf("fork %d: %v", n, err)
	}
	return guests
}

func (d *daemon) fork1(change ...func(*client.ForkRequest)) *guest {
	d.t.Helper()
	return d.fork(1, change...)[0]
}

func (d *daemon) tryFork(n int, change ...func(*client.ForkRequest)) ([]*guest, error) {
	req := client.ForkRequest{SnapshotTag: pyTag, N: client.Int(n), Path: api.ForkRequestPathCold}
	for _, c := range change {
		c(&req)
	}
	ctx, cancel := d.limited()
	defer cancel()
	list, err := d.client.Fork(ctx, req)
	var guests []*guest
	for _, s := range list {
		guests = append(guests, &guest{s, d})
	}
	d.mu.Lock()
	d.guests = append(d.guests, guests...)
	d.mu.Unlock()
	return guests, err
}

// Changes of fork requests.
func of(tag string) func(*client.ForkRequest) {
	return func(r *client.ForkRequest) { r.SnapshotTag = tag }
}

func fromPool(r *client.ForkRequest) { r.Path = api.ForkRequestPathPool }

func withEnv(env map[string]string) func(*client.ForkRequest) {
	return func(r *client.ForkRequest) { r.Env = env }
}

// fillPool sets a pool's size and waits until it is full.
func (d *daemon) fillPool(tag string, size int) {
	d.t.Helper()
	ctx, cancel := d.limited()
	defer cancel()
	if _, err := d.client.SetPool(ctx, tag, size); err != nil {
		d.t.Fatalf("set the pool of %s to %d: %v", tag, size, err)
	}
	d.awaitPool(tag, size)
}

func (d *daemon) awaitPool(tag string, size int) {
	d.t.Helper()
	ctx, cancel := d.limited()
	defer cancel()
	eventually(d.t, callLimit, func() error {
		p, err := d.client.Pool(ctx, tag)
		if err == nil && p.Ready != size {
			err = fmt.Errorf("%d of %d children are ready in the pool of %s %s", p.Ready, size, tag, p.Problem)
		}
		return err
	})
}

// snapshot makes a snapshot of the bare image, unless the request says otherwise.
func (d *daemon) snapshot(req client.SnapshotRequest) client.Snapshot {
	d.t.Helper()
	snap, err := d.trySnapshot(req)
	if err != nil {
		d.t.Fatalf("snapshot %s: %v", req.Tag, err)
	}
	return snap
}

func (d *daemon) trySnapshot(req client.SnapshotRequest) (client.Snapshot, error) {
	if req.Image == "" {
		req.Image = bareImage
	}
	if req.MemMiB == 0 {
		req.MemMiB = 128
	}
	ctx, cancel := d.limited()
	defer cancel()
	return d.client.CreateSnapshot(ctx, req, nil)
}

// sh runs a shell command that must succeed and returns what it printed, without the last newline.
func (g *guest) sh(command string) string {
	g.d.t.Helper()
	out, err := g.trySh(command)
	if err != nil {
		g.d.t.Fatalf("%v: %v", g, err)
	}
	return out
}

func (g *guest) trySh(command string) (string, error) {
	res, err := g.exec(client.ExecRequest{Args: []string{"sh", "-c", command}})
	if err == nil && res.ExitCode != 0 {
		err = fmt.Errorf("%q exited with %d: %s%s", command, res.ExitCode, res.Stdout, res.Stderr)
	}
	return strings.TrimSuffix(string(res.Stdout), "\n"), err
}

// exec runs a command, however it ends.
func (g *guest) exec(req client.ExecRequest) (client.ExecResult, error) {
	if req.Timeout == 0 {
		req.Timeout = guestLimit
	}
	ctx, cancel := g.d.limited()
	defer cancel()
	return g.d.client.Exec(ctx, g.ID, req)
}

// py runs code that must succeed in the resident interpreter and returns the last expression's repr.
func (g *guest) py(code string) string {
	g.d.t.Helper()
	out, err := g.tryPy(code)
	if err != nil {
		g.d.t.Fatalf("%v: %v", g, err)
	}
	return out
}

func (g *guest) tryPy(code string) (string, error) {
	res, err := g.eval(client.EvalRequest{Code: code})
	switch {
	case err != nil:
		return "", err
	case res.Error != nil:
		return "", fmt.Errorf("%q failed: %s", code, *res.Error)
	case res.Result == nil:
		return "", nil
	}
	return *res.Result, nil
}

// tryPyJSON evaluates an expression and decodes it as JSON has it.
func (g *guest) tryPyJSON(expression string, into any) error {
	res, err := g.eval(client.EvalRequest{Code: "print(json.dumps(" + expression + "))"})
	if err == nil && res.Error != nil {
		err = errors.New(*res.Error)
	}
	if err != nil {
		return err
	}
	return json.Unmarshal([]byte(res.Stdout), into)
}

// eval runs code, however it ends.
func (g *guest) eval(req client.EvalRequest) (client.EvalResult, error) {
	if req.Timeout == 0 {
		req.Timeout = guestLimit
	}
	ctx, cancel := g.d.limited()
	defer cancel()
	return g.d.client.Eval(ctx, g.ID, req)
}

func (g *guest) ping() error {
	ctx, cancel := g.d.limited()
	defer cancel()
	_, err := g.d.client.Ping(ctx, g.ID)
	return err
}

func (g *guest) kill() {
	g.d.t.Helper()
	ctx, cancel := g.d.limited()
	defer cancel()
	if err := g.d.client.Kill(ctx, g.ID); err != nil {
		g.d.t.Fatalf("kill %v: %v", g, err)
	}
}

// now asks the daemon what it knows of the sandbox.
func (g *guest) now() (client.Sandbox, error) {
	ctx, cancel := g.d.limited()
	defer cancel()
	return g.d.client.Sandbox(ctx, g.ID)
}

// atOnce is how many guests are spoken to at a time: with more of them each answer only takes longer.
const atOnce = 4

// each does something with every guest, side by side, and fails the test with the errors.
func (d *daemon) each(guests []*guest, do func(i int, g *guest) error) {
	d.t.Helper()
	var group errgroup.Group
	group.SetLimit(atOnce)
	errs := make([]error, len(guests))
	for i, g := range guests {
		group.Go(func() error {
			if err := do(i, g); err != nil {
				errs[i] = fmt.Errorf("%v: %w", g, err)
			}
			return nil
		})
	}
	_ = group.Wait() // the functions return no errors
	errs = slices.DeleteFunc(errs, func(err error) bool { return err == nil })
	if n := len(errs); n > 0 {
		d.t.Fatalf("%d of %d: %v", n, len(guests), errors.Join(errs[:min(n, 5)]...))
	}
}
