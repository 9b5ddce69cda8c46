package e2e

import (
	"errors"
	"fmt"
	"maps"
	"os"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/forkd/forkd/api"
	"github.com/forkd/forkd/client"
)

// suspend suspends a sandbox, and says to checkTidy that it was.
func (d *daemon) suspend(g *guest) {
	d.t.Helper()
	if err := d.trySuspend(g); err != nil {
		d.t.Fatalf("suspend %v: %v", g, err)
	}
}

func (d *daemon) trySuspend(g *guest) error {
	ctx, cancel := d.limited()
	defer cancel()
	s, err := d.client.Suspend(ctx, g.ID)
	if err != nil {
		return err
	}
	d.process.suspended.Store(g.ID, true)
	if s.State != api.SandboxInfoStateSuspended || s.PID != 0 || s.SuspendedAtUnix == 0 || s.DeadlineUnix != nil {
		return fmt.Errorf("it was suspended, and is %+v", s)
	}
	return nil
}

// resume resumes a sandbox, and what the test knows of it is brought up to date.
func (d *daemon) resume(g *guest) {
	d.t.Helper()
	if err := d.tryResume(g); err != nil {
		d.t.Fatalf("resume %v: %v", g, err)
	}
}

func (d *daemon) tryResume(g *guest) error {
	ctx, cancel := d.limited()
	defer cancel()
	s, err := d.client.Resume(ctx, g.ID)
	if err != nil {
		return err
	}
	if s.State != api.SandboxInfoStateRunning || s.ID != g.ID || s.PID == 0 || s.SuspendedAtUnix != 0 || !maps.Equal(s.Metadata, g.Metadata) || !maps.Equal(s.Env, g.Env) ||
		s.CreatedAtUnix != g.CreatedAtUnix || s.SnapshotID != g.SnapshotID {
		return fmt.Errorf("it was resumed as %+v, and was %+v", s, g.Sandbox)
	}
	g.Sandbox = s
	return nil
}

// randoms remembers what must never come again.
type randoms struct {
	mu   sync.Mutex
	seen map[string]string // who had it
}

// add asks a guest for random values, and checks with them that it is who it is. Beside that it looks at its clock.
func (r *randoms) add(g *guest, when string) error {
	var s self
	if err := ask(g, &s); err != nil {
		return err
	}
	if err := checkClock(g); err != nil {
		return err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	for what, value := range map[string]string{"urandom": s.URandom, "uuid4": s.UUID4, "OpenSSL": s.OpenSSL, "random": s.Random, "numpy": s.Numpy,
		"generator": s.Generator, "OpenSSL of a command": s.ExecOpenSSL, "uuid of a command": s.ExecUUID} {
		who := fmt.Sprintf("%s of %v, %s", what, g, when)
		if before, twice := r.seen[value]; twice || value == "" {
			return fmt.Errorf("%s is %q, as was %s", who, value, before)
		}
		r.seen[value] = who
	}
	return nil
}

// footprint is the memory, in bytes, that a daemon and its machines hold.
type footprint struct {
	private int64            // of the monitors' own
	files   map[uint64]int64 // memfds by inode, each counted once, whoever holds it
}

// held is a part of the memory that is held now: without the memfds of another time, or those alone.
func (f footprint) held(before footprint, those bool) (sum int64) {
	if !those {
		sum = f.private
	}
	for inode, size := range f.files {
		if was, ok := before.files[inode]; ok == those {
			sum += size - was
		}
	}
	return sum
}

func (d *daemon) footprint() footprint {
	d.t.Helper()
	f := footprint{files: map[uint64]int64{}}
	holders := []int{d.cmd.Process.Pid}
	for _, pid := range machinesIn(d.run) {
		holders = append(holders, pid)
		f.private += privateMemory(pid)
	}
	for _, pid := range holders {
		for _, name := range entries(fmt.Sprintf("/proc/%d/fd", pid)) {
			path := fmt.Sprintf("/proc/%d/fd/%s", pid, name)
			if target, _ := os.Readlink(path); !strings.HasPrefix(target, "/memfd:") {
				continue
			}
			if info, err := os.Stat(path); err == nil {
				st := info.Sys().(*syscall.Stat_t)
				f.files[st.Ino] = st.Blocks * 512
			}
		}
	}
	return f
}

// privateMemory is what a process shares with no other (proc(5), smaps_rollup).
func privateMemory(pid int) (sum int64) {
	data, _ := os.ReadFile(fmt.Sprintf("/proc/%d/smaps_rollup", pid)) // it may be gone
	for line := range strings.Lines(string(data)) {
		var kib int64
		if _, err := fmt.Sscanf(line, "Private_Clean: %d kB", &kib); err == nil {
			sum += kib << 10
		}
		if _, err := fmt.Sscanf(line, "Private_Dirty: %d kB", &kib); err == nil {
			sum += kib << 10
		}
	}
	return sum
}

// keep has a guest remember something, in memory and in a file.
const keepMiB = 8

func (g *guest) keep(i int) error {
	_, err := g.tryPy(fmt.Sprintf(`kept = b"".join(((%d << 20) + n).to_bytes(8, "little") * 512 for n in range(%d * 256))
open("/root/kept", "w").write("%d\n" * 1000); began = time.monotonic(); pid = os.getpid()`, i, keepMiB, i))
	return err
}

func (g *guest) checkKept(i int) error {
	got, err := g.tryPy(fmt.Sprintf(`([n for n in range(%d * 256) if kept[n * 4096:(n + 1) * 4096] != ((%d << 20) + n).to_bytes(8, "little") * 512][:5], len(kept),
open("/root/kept").read() == "%d\n" * 1000, pid == os.getpid(), time.monotonic() > began, os.environ.get("MINE"))`, keepMiB, i, i))
	if want := fmt.Sprintf("([], %d, True, True, True, '%d')", keepMiB<<20, i); err == nil && got != want {
		err = fmt.Errorf("remembers %s, want %s", got, want)
	}
	return err
}

// suspendable is what a sandbox of these tests is forked with.
func suspendable(i int) func(*client.ForkRequest) {
	return func(r *client.ForkRequest) {
		r.Env, r.Metadata, r.TimeoutSecs = map[string]string{"MINE": fmt.Sprint(i)}, map[string]string{"number": fmt.Sprint(i)}, time.Hour.Seconds()
	}
}

// ownMemory is what the guests hold that they share with nobody, as the API has it.
func (d *daemon) ownMemory(guests []*guest) (sum int64) {
	d.t.Helper()
	ctx, cancel := d.limited()
	defer cancel()
	for _, g := range guests {
		s, err := d.client.Stats(ctx, g.ID)
		if err != nil {
			d.t.Fatalf("memory of %v: %v", g, err)
		}
		sum += s.GuestAnonKiB << 10
	}
	return sum
}

// checkSuspended holds that sandboxes are listed as suspended, with all that is known of them, and that nothing runs.
func (d *daemon) checkSuspended(guests []*guest) {
	d.t.Helper()
	for _, g := range guests {
		s, err := g.now()
		if err != nil || s.State != api.SandboxInfoStateSuspended || !maps.Equal(s.Metadata, g.Metadata) || s.SuspendedAtUnix == 0 || s.PID != 0 {
			d.t.Errorf("%v is %+v, %v, want it suspended", g, s, err)
		}
		_, err = g.exec(client.ExecRequest{Args: []string{"true"}})
		wantError(d.t, "exec in a suspended sandbox", err, 409, "invalid_state", g.ID)
	}
}

// TestSuspended suspends sandboxes, which give their memory back and outlive daemons that stop or are killed, and come back as who they were.
func TestSuspended(t *testing.T) {
	t.Parallel()
	d := ownDaemon(t, setup{})
	n := number(t, "FORKD_SUSPENDED", few(6, 2))
	guests := []*guest{d.fork1(suspendable(0))}
	shared := d.footprint() // the snapshot itself stays in memory, for others
	for i := 1; i < n; i++ {
		guests = append(guests, d.fork1(suspendable(i)))
	}
	random := &randoms{seen: map[string]string{}}
	d.each(guests, func(i int, g *guest) error { return errors.Join(g.keep(i), random.add(g, "at first")) })

	before, own := d.footprint().held(shared, false), d.ownMemory(guests)
	if before < own || own < int64(n)*keepMiB<<20 {
		t.Errorf("%d sandboxes hold %d MiB of their own by the API, %d MiB by the host", n, own>>20, before>>20)
	}
	begin := time.Now()
	d.each(guests, func(_ int, g *guest) error { return d.trySuspend(g) })
	took := time.Since(begin)
	if left := machinesIn(d.run); len(left) != 0 {
		t.Errorf("monitors run when all is suspended: %v", left)
	}
	now := d.footprint()
	after := now.held(shared, false)
	mib := func(n int64) float64 { return float64(n) / (1 << 20) }
	t.Logf("%d sandboxes suspended in %v: %.1f MiB of guests' memory of their own and %.1f MiB with their monitors; %.1f MiB afterwards, and %.1f MiB more in what they shared",
		n, took.Round(time.Millisecond), mib(own), mib(before), mib(after), mib(now.held(shared, true)))
	if after > own/20 {
		t.Errorf("%d MiB are still held of %d MiB, want at most 5 %%", after>>20, own>>20)
	}
	d.checkSuspended(guests)
	d.checkTidy()

	back := func(i int, g *guest) error {
		return errors.Join(d.tryResume(g), g.checkKept(i), random.add(g, "resumed"))
	}
	half := n / 2
	d.stop()
	d.start(setup{})
	d.checkSuspended(guests)
	d.each(guests[:half], back)
	d.kill9()
	d.start(setup{})
	d.checkSuspended(guests[half:])
	d.each(guests[:half], func(i int, g *guest) error { return g.checkKept(i) })
	d.each(guests[half:], func(i int, g *guest) error { return back(half+i, g) })
	for _, g := range guests {
		if g.DeadlineUnix == nil || time.Until(time.Unix(*g.DeadlineUnix, 0)) > time.Hour {
			t.Errorf("deadline of %v: %v", g, g.DeadlineUnix)
		}
	}
	d.checkSandboxes(guests...)
	d.checkTidy()
	d.checkTwin(guests[0], random)
	d.each(guests, func(i int, g *guest) error { // what a sandbox was suspended to before goes when it is suspended anew
		return errors.Join(d.trySuspend(g), d.tryResume(g), g.checkKept(i))
	})
	d.checkTidy()
	d.killGuests()
	d.checkTidy()
}

// checkTwin freezes a sandbox where it is suspended: of what comes of the two, nothing that is random may be the same.
func (d *daemon) checkTwin(g *guest, random *randoms) {
	d.t.Helper()
	d.branch(g, client.BranchRequest{Tag: "twin"})
	d.suspend(g)
	d.resume(g)
	child := d.fork1(of("twin"))
	d.each([]*guest{g, child}, func(i int, g *guest) error {
		return errors.Join(random.add(g, []string{"resumed", "branched where it was suspended"}[i]), g.checkKept(0))
	})
	child.kill()
	d.must("rmi", "twin")
}

// awaitSuspended waits until a sandbox was suspended by itself.
func (g *guest) awaitSuspended() {
	g.d.t.Helper()
	g.d.process.suspended.Store(g.ID, true)
	eventually(g.d.t, tidyLimit, func() error {
		s, err := g.now()
		if err == nil && s.State != api.SandboxInfoStateSuspended {
			err = fmt.Errorf("%v is %s", g, s.State)
		}
		return err
	})
}

// TestAutoSuspend has sandboxes be suspended when nobody uses them and resumed when somebody does.
func TestAutoSuspend(t *testing.T) {
	t.Parallel()
	d := ownDaemon(t, setup{})
	const idle = 1.0
	g := d.fork1(suspendable(0), func(r *client.ForkRequest) { r.AutoSuspendSecs, r.AutoResume = idle, true })
	stays := d.fork1(suspendable(1), func(r *client.ForkRequest) { r.AutoSuspendSecs = idle })
	busy := make(chan error, 1)
	go func() { // a request keeps it awake for as long as it lasts
		_, err := stays.trySh("sleep 3")
		busy <- err
	}()
	if err := g.keep(0); err != nil {
		t.Fatal(err)
	}
	access := []struct {
		how string
		do  func() error
	}{
		{"eval", func() error { return g.checkKept(0) }},
		{"exec", func() error { _, err := g.trySh("head -n 1 /root/kept"); return err }},
		{"ping", g.ping},
		{"branch", func() error { _, err := d.tryBranch(g, client.BranchRequest{Tag: "woken"}); return err }},
	}
	for _, a := range access {
		g.awaitSuspended()
		if pid := machinesIn(d.run)[g.ID]; pid != 0 {
			t.Errorf("%v is suspended, its monitor has pid %d", g, pid)
		}
		if err := a.do(); err != nil {
			t.Errorf("%s of a suspended sandbox: %v", a.how, err)
		}
	}
	if err := <-busy; err != nil {
		t.Errorf("a command that outlasted the time: %v", err)
	}
	stays.awaitSuspended()
	d.checkSuspended([]*guest{stays})
	for _, end := range []func(){d.stop, d.kill9} {
		g.awaitSuspended()
		end()
		d.start(setup{})
		if err := errors.Join(g.checkKept(0), checkClock(g)); err != nil {
			t.Errorf("eval in a sandbox that was suspended by an earlier daemon: %v", err)
		}
	}
	g.awaitSuspended() // the time counts with the new daemon, too
	child := d.fork1(of("woken"))
	if err := child.checkKept(0); err != nil {
		t.Errorf("a branch of a sandbox that was woken for it: %v", err)
	}
	d.resume(stays)
	stays.awaitSuspended()
	d.killGuests()
	d.checkTidy()
}
