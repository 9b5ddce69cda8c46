package sandbox

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/forkd/forkd/internal/snapshot"
	"github.com/forkd/forkd/internal/store"
	"github.com/forkd/forkd/internal/vmm"
	"github.com/forkd/forkd/internal/vmm/vmmtest"
)

func TestRestartKeepsSandboxes(t *testing.T) {
	w := newWorld(t)
	d := w.start(t, options{})
	d.snapshot(t, "py", nil)
	boxes := d.fork(t, "py", 3, func(r *ForkRequest) {
		r.Metadata = map[string]string{"k": "v"}
		r.Env = map[string]string{"A": "1"}
		r.Timeout = time.Hour
	})
	for _, b := range boxes {
		d.sh(t, b.ID, "echo "+b.ID+" > /tmp/mine")
	}
	d.stop(t)

	d2, err := w.open(options{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { d2.stop(t) })
	_, err = d2.Fork(t.Context(), ForkRequest{Tag: "py", N: 1})
	checkCode(t, "Fork before Recover", err, CodeShuttingDown)
	r, err := d2.Recover(t.Context())
	if err != nil || r.Adopted != 3 || r.Lost+r.Aborted+r.Reaped+r.Dirs != 0 {
		t.Fatalf("Recover: got %+v, %v, want 3 adopted and nothing else", r, err)
	}
	if _, err := d2.Recover(t.Context()); err == nil {
		t.Error("second Recover: got no error")
	}
	for _, b := range boxes {
		got, err := d2.Sandbox(t.Context(), b.ID)
		if err != nil || got.PID != b.PID || got.State != StateRunning || got.Metadata["k"] != "v" || got.Env["A"] != "1" || !got.Deadline.Equal(b.Deadline) || !got.CreatedAt.Equal(b.CreatedAt) {
			t.Errorf("sandbox after a restart: got %+v, %v, want %+v", got, err, b)
		}
		if got := d2.sh(t, b.ID, "cat /tmp/mine"); got != b.ID {
			t.Errorf("memory of %s: got %q", b.ID, got)
		}
		if u, err := d2.Usage(t.Context(), b.ID); err != nil || u.PSSKiB <= 0 {
			t.Errorf("Usage: got %+v, %v", u, err)
		}
		if log, err := d2.Logs(t.Context(), b.ID); err != nil || len(log) == 0 {
			t.Errorf("Logs: got %q, %v", log, err)
		}
	}
	if err := d2.Kill(t.Context(), boxes[0].ID); err != nil {
		t.Errorf("Kill: %v", err)
	}
	d2.fork(t, "py", 1, nil)
	d2.checkTidy(t, 3, "py")
}

func TestRestartFindsTheDead(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	d := w.start(t, options{})
	d.snapshot(t, "py", nil)
	boxes := d.fork(t, "py", 4, nil)
	short := d.fork(t, "py", 1, func(r *ForkRequest) { r.Timeout = 500 * time.Millisecond })[0]
	d.stop(t)
	if err := syscall.Kill(boxes[0].PID, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	if err := syscall.Kill(boxes[1].PID, syscall.SIGSTOP); err != nil { // lives, and does not answer
		t.Fatal(err)
	}
	w.paused(t, boxes[2].ID)

	d = w.start(t, options{limits: Limits{RecoverTimeout: 5 * time.Second}})
	for i, want := range []State{StateFailed, StateFailed, StateRunning, StateRunning} {
		got, err := d.Sandbox(t.Context(), boxes[i].ID)
		if err != nil || got.State != want || want == StateFailed && !strings.Contains(got.Reason, "lost while the daemon was down") {
			t.Errorf("sandbox %d: got %s (%s), %v, want %s", i, got.State, got.Reason, err, want)
		}
	}
	d.sh(t, boxes[2].ID, "true") // runs again
	eventually(t, "the deadline that passed", func() string {
		if got, err := d.Sandbox(t.Context(), short.ID); err != nil || got.State != StateStopped || got.Reason != "its deadline passed" {
			return fmt.Sprintf("%+v, %v", got, err)
		}
		return ""
	})
	d.checkTidy(t, 2, "py")
}

// paused pauses a sandbox behind the daemon's back, as one that was killed inside a pause leaves it.
func (w *world) paused(t *testing.T, id string) {
	t.Helper()
	db, err := store.Open(filepath.Join(w.data(), "forkd.db"))
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = db.Close() }()
	rec, err := db.Sandbox(t.Context(), id)
	if err != nil {
		t.Fatal(err)
	}
	machine, err := w.fake(vmmtest.FakeOptions{}).Attach(t.Context(), rec.Process)
	if err != nil {
		t.Fatal(err)
	}
	if err := machine.Pause(t.Context()); err != nil {
		t.Fatal(err)
	}
}

func TestRecoverRemovesLeftovers(t *testing.T) {
	w := newWorld(t)
	d := w.start(t, options{})
	d.snapshot(t, "py", nil)
	d.fork(t, "py", 1, nil)
	boxes := d.fork(t, "py", 3, nil)
	ctx := t.Context()
	// A sandbox whose record is gone, one that was being ended, and one that was being started.
	for i, change := range []func(id string) error{
		func(id string) error { return d.db.RemoveSandbox(ctx, id) },
		func(id string) error { return d.db.EndSandbox(ctx, id, "stopped", reasonKilled, time.Now()) },
		func(id string) error {
			if err := d.db.RemoveSandbox(ctx, id); err != nil {
				return err
			}
			return d.db.AddSandbox(ctx, store.Sandbox{ID: id, SnapshotID: "x", SnapshotTag: "py", State: "starting", CreatedAt: time.Now()})
		},
	} {
		if err := change(boxes[i].ID); err != nil {
			t.Fatal(err)
		}
	}
	d.stop(t)
	for _, name := range []string{"vm/sbleft", "vm/sbleft/deep", "data"} {
		if err := os.MkdirAll(filepath.Join(w.run(), name), 0o700); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.WriteFile(filepath.Join(w.run(), "console", "sbgone"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	d2, err := w.open(options{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { d2.stop(t) })
	r, err := d2.Recover(ctx)
	if err != nil || r.Adopted != 1 || r.Reaped != 3 || r.Aborted != 1 || r.Dirs != 4 {
		t.Errorf("Recover: got %+v, %v, want 1 adopted, 3 reaped, 1 aborted, 4 directories", r, err)
	}
	d2.checkTidy(t, 1, "py")
	if recs, err := d2.db.Sandboxes(ctx); err != nil || len(recs) != 1 {
		t.Errorf("records: got %d, %v, want 1", len(recs), err)
	}
	if left, _ := os.ReadDir(filepath.Join(w.run(), "console")); len(left) != 0 {
		t.Errorf("consoles left: %v", left)
	}
}

// TestRecoverSparesWhatIsNotOurs has processes that look like machines in some way, and must live on.
func TestRecoverSparesWhatIsNotOurs(t *testing.T) {
	w := newWorld(t)
	dir := filepath.Join(w.run(), "vm", "sbstranger")
	if err := os.MkdirAll(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	start := func(change func(*exec.Cmd)) *exec.Cmd {
		cmd := exec.Command("sleep", "60")
		change(cmd)
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			_ = cmd.Process.Kill()
			_ = cmd.Wait()
		})
		return cmd
	}
	strangers := map[string]*exec.Cmd{
		"stands in the directory":       start(func(c *exec.Cmd) { c.Dir = dir; c.Env = []string{"PWD=" + dir} }),
		"has the directory as argument": start(func(c *exec.Cmd) { c.Args = []string{"sleep", "60"}; c.Env = []string{"OLDPWD=" + dir} }),
	}
	// A record whose number went to somebody else.
	reused := start(func(*exec.Cmd) {})
	strangers["has the number of a record"] = reused
	b, err := json.Marshal(vmm.Process{PID: reused.Process.Pid, StartTicks: 1, Dir: dir})
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, vmm.ProcessFile), b, 0o600); err != nil {
		t.Fatal(err)
	}
	d := w.start(t, options{})
	for what, cmd := range strangers {
		if err := cmd.Process.Signal(syscall.Signal(0)); err != nil {
			t.Errorf("a process that %s: %v, want it alive", what, err)
		}
		if _, err := startTicks(cmd.Process.Pid); err != nil {
			t.Errorf("a process that %s: %v, want it alive", what, err)
		}
	}
	d.checkTidy(t, 0)
}

// TestSearcherFindsMachines starts processes that are machines by each of the proofs.
func TestSearcherFindsMachines(t *testing.T) {
	w := newWorld(t)
	root := filepath.Join(w.run(), "vm")
	dirs := map[string]string{}
	for _, name := range []string{"env", "record", "socket"} {
		dirs[name] = filepath.Join(root, "sb"+name)
		if err := os.MkdirAll(dirs[name], 0o700); err != nil {
			t.Fatal(err)
		}
	}
	var cmds []*exec.Cmd
	start := func(change func(*exec.Cmd)) int {
		cmd := exec.Command("sleep", "60")
		change(cmd)
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		cmds = append(cmds, cmd)
		return cmd.Process.Pid
	}
	want := map[int]string{}
	want[start(func(c *exec.Cmd) { c.Env = []string{"FORKD_MACHINE=" + dirs["env"]} })] = dirs["env"]
	pid := start(func(c *exec.Cmd) { c.Dir = dirs["record"] })
	want[pid] = dirs["record"]
	ticks, err := startTicks(pid)
	if err != nil {
		t.Fatal(err)
	}
	b, err := json.Marshal(vmm.Process{PID: pid, StartTicks: ticks, Dir: dirs["record"]})
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dirs["record"], vmm.ProcessFile), b, 0o600); err != nil {
		t.Fatal(err)
	}
	socket := listenIn(t, dirs["socket"])
	want[start(func(c *exec.Cmd) { c.ExtraFiles = []*os.File{socket} })] = dirs["socket"]
	_ = socket.Close()

	s, err := newSearcher(root)
	if err != nil {
		t.Fatal(err)
	}
	found, err := s.find()
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range found {
		if want[p.pid] != p.dir {
			t.Errorf("found process %d in %s, want %q", p.pid, p.dir, want[p.pid])
		}
		delete(want, p.pid)
		if err := p.kill(); err != nil {
			t.Errorf("kill: %v", err)
		}
		if err := p.kill(); err != nil {
			t.Errorf("kill of one that is gone: %v", err)
		}
	}
	for pid, dir := range want {
		t.Errorf("process %d of %s was not found", pid, dir)
	}
	for _, cmd := range cmds {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	}
}

func listenIn(t *testing.T, dir string) *os.File {
	t.Helper()
	fd, err := syscall.Socket(syscall.AF_UNIX, syscall.SOCK_STREAM|syscall.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(syscall.Bind(fd, &syscall.SockaddrUnix{Name: filepath.Join(dir, "s")}), syscall.Listen(fd, 1)); err != nil {
		t.Fatal(err)
	}
	return os.NewFile(uintptr(fd), "socket")
}

func TestRecoverRefusesAnotherEngine(t *testing.T) {
	w := newWorld(t)
	d := w.start(t, options{})
	d.snapshot(t, "py", nil)
	b := d.fork(t, "py", 1, nil)[0]
	d.stop(t)
	d2, err := w.open(options{fake: vmmtest.FakeOptions{Unavailable: errors.New("not installed")}})
	if err != nil {
		t.Fatal(err)
	}
	_, err = d2.Recover(t.Context())
	checkCode(t, "Recover without the engine", err, CodeEngineUnavailable)
	if err := d2.close(); err != nil {
		t.Errorf("close: %v", err)
	}
	d = w.start(t, options{})
	d.sh(t, b.ID, "true") // it was not touched
}

func TestRecoverLeavesUnknownSnapshotsAlone(t *testing.T) {
	w := newWorld(t)
	d := w.start(t, options{})
	s := d.snapshot(t, "py", nil)
	if err := d.db.RemoveSnapshot(t.Context(), s.ID); err != nil {
		t.Fatal(err)
	}
	d.stop(t)
	d2, err := w.open(options{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { d2.stop(t) })
	r, err := d2.Recover(t.Context())
	if err != nil || len(r.Unknown) != 1 || r.Unknown[0] != s.ID {
		t.Errorf("Recover: got %+v, %v, want %s unknown", r, err, s.ID)
	}
	if _, err := d2.snapshots.Get(s.ID); err != nil {
		t.Errorf("it is gone: %v", err)
	}
}

func TestRecoverReportsMissingSnapshots(t *testing.T) {
	w := newWorld(t)
	d := w.start(t, options{})
	s := d.snapshot(t, "py", nil)
	b := d.fork(t, "py", 1, nil)[0]
	d.stop(t)
	if err := os.RemoveAll(s.Dir); err != nil {
		t.Fatal(err)
	}
	d = w.start(t, options{})
	got, err := d.Snapshot(t.Context(), "py")
	if err != nil || got.Status != StatusFailed || !strings.Contains(got.Warning, snapshot.ErrNotFound.Error()) {
		t.Errorf("got %+v, %v, want it failed for not being there", got, err)
	}
	_, err = d.Fork(t.Context(), ForkRequest{Tag: "py", N: 1})
	checkCode(t, "Fork", err, CodeSnapshotCorrupt)
	d.sh(t, b.ID, "true") // its sandbox can do without
}

func TestRunDirectoryHasOneDaemon(t *testing.T) {
	w := newWorld(t)
	d := w.start(t, options{})
	if second, err := w.open(options{}); err == nil {
		_ = second.close()
		t.Error("a second daemon of the same run directory: got no error")
	} else if !strings.Contains(err.Error(), "another forkd daemon") {
		t.Errorf("got %v", err)
	}
	d.stop(t)
	w.start(t, options{})
}

func TestShutdown(t *testing.T) {
	w := newWorld(t)
	d := w.start(t, options{limits: Limits{DrainTimeout: 200 * time.Millisecond}})
	d.snapshot(t, "py", func(r *SnapshotRequest) { r.PoolSize = 1 })
	waitPool(t, d, "py", 1)
	b := d.fork(t, "py", 1, func(r *ForkRequest) { r.Path = PathCold })[0]
	calls := make(chan error, 2)
	go func() {
		_, err := d.Manager.Exec(t.Context(), b.ID, ExecRequest{Args: []string{"hang"}, Timeout: time.Minute})
		calls <- err
	}()
	go func() {
		_, err := d.Manager.CreateSnapshot(t.Context(), SnapshotRequest{Tag: "x", Image: testImage, MemMiB: testMemMiB, WarmUp: []WarmUp{{WarmUpExec, "hang"}}}, nil)
		calls <- err
	}()
	eventually(t, "the parent to run", func() string {
		if live, err := d.fake.Live(); err != nil || len(live) != 3 {
			return fmt.Sprintf("%v, %v", live, err)
		}
		return ""
	})
	m := d.Manager
	if err := m.Shutdown(t.Context()); err != nil {
		t.Errorf("Shutdown: %v", err)
	}
	if err := m.Shutdown(t.Context()); err != nil {
		t.Errorf("second Shutdown: %v", err)
	}
	for range 2 {
		checkCode(t, "a call in flight", <-calls, CodeShuttingDown)
	}
	_, err := m.Fork(t.Context(), ForkRequest{Tag: "py", N: 1})
	checkCode(t, "Fork afterwards", err, CodeShuttingDown)
	checkCode(t, "Kill afterwards", m.Kill(t.Context(), b.ID), CodeShuttingDown)
	if problem := d.untidy(1, []string{"py"}); problem != "" {
		t.Errorf("afterwards: %s", problem)
	}
}

func TestShutdownKillsWhenAsked(t *testing.T) {
	w := newWorld(t)
	d := w.start(t, options{killAll: true})
	d.snapshot(t, "py", func(r *SnapshotRequest) { r.PoolSize = 2 })
	d.fork(t, "py", 2, nil)
	d.stop(t)
	eventually(t, "all to be gone", func() string { return d.untidy(0, []string{"py"}) })
}

func TestNewRefusesBadConfig(t *testing.T) {
	w := newWorld(t)
	for name, change := range map[string]func(*Config){
		"no engine":    func(c *Config) { c.Engine = nil },
		"relative run": func(c *Config) { c.RunDir = "run" },
		"long run":     func(c *Config) { c.RunDir = "/" + strings.Repeat("x", 80) },
	} {
		t.Run(name, func(t *testing.T) {
			d, err := w.open(options{})
			if err != nil {
				t.Fatal(err)
			}
			defer func() { _ = d.close() }()
			cfg := d.cfg
			change(&cfg)
			if _, err := New(cfg); err == nil {
				t.Error("got no error")
			}
		})
	}
}

// TestRecordsThatAreNone: a monitor may put anything in the place of its record. The daemon's start neither waits for it nor follows it.
func TestRecordsThatAreNone(t *testing.T) {
	dir := t.TempDir()
	real, link, pipe := filepath.Join(dir, "real"), filepath.Join(dir, "link"), filepath.Join(dir, "pipe")
	if err := errors.Join(os.WriteFile(real, []byte("{}"), 0o600), os.Symlink(real, link), syscall.Mkfifo(pipe, 0o600)); err != nil {
		t.Fatal(err)
	}
	if b, err := readRecord(real); err != nil || string(b) != "{}" {
		t.Errorf("a record is %q, %v", b, err)
	}
	for _, path := range []string{link, pipe, dir} {
		if b, err := readRecord(path); err == nil {
			t.Errorf("%s is read: %q", path, b)
		}
	}
}

// TestTrialsEnd: what a daemon that was killed left of a monitor's trial is ended before anything else.
func TestTrialsEnd(t *testing.T) {
	w := newWorld(t)
	dir := filepath.Join(TrialsDir(w.run()), "probe123")
	if err := os.MkdirAll(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	left := exec.Command("sleep", "60")
	left.Env = []string{"FORKD_MACHINE=" + dir}
	if err := left.Start(); err != nil {
		t.Fatal(err)
	}
	ended := make(chan error, 1)
	go func() { ended <- left.Wait() }()
	d := w.start(t, options{})
	select {
	case err := <-ended:
		if err == nil {
			t.Error("it was not killed")
		}
	case <-time.After(10 * time.Second):
		t.Error("it lives on")
		_ = left.Process.Kill()
	}
	if _, err := os.Stat(dir); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("its directory: %v, want it gone", err)
	}
	d.checkTidy(t, 0)
}
