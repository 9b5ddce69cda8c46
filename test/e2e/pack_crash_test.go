package e2e

import (
	"bytes"
	"cmp"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/forkd/forkd/client"
	"github.com/forkd/forkd/internal/failpoint"
	"github.com/forkd/forkd/internal/transfer"
)

// moving is a chain of snapshots, each branched from a child of the one before, and packs of them.
type moving struct {
	*daemon
	source *guest // of the first branch
	pages  map[string]string
	packs  map[string]string // files
	sums   map[string][sha256.Size]byte
}

func newMoving(t *testing.T) *moving {
	t.Helper()
	d, source := countingDaemon(t)
	m := &moving{d, source, map[string]string{}, map[string]string{}, map[string][sha256.Size]byte{}}
	dir := t.TempDir()
	g := source
	for _, tag := range []string{"one", "two"} {
		g.sh(rewriting)
		pages, err := g.pages()
		if err != nil {
			t.Fatal(err)
		}
		d.branch(g, client.BranchRequest{Tag: tag})
		m.pages[tag], m.packs[tag] = pages, filepath.Join(dir, tag)
		m.sums[tag] = d.pack(tag, m.packs[tag])
		g = d.fork1(of(tag))
	}
	g.kill()
	return m
}

// killing is a reader that kills a daemon's process, or something else, when some bytes were read from it.
type killing struct {
	io.Reader
	after int64
	kill  func()
}

func (r *killing) Read(p []byte) (int, error) {
	if r.after <= 0 && r.kill != nil {
		r.kill()
		r.kill = nil
	}
	if r.after > 0 {
		p = p[:min(int64(len(p)), r.after)]
	}
	n, err := r.Reader.Read(p)
	r.after -= int64(n)
	return n, err
}

// TestKilledInPacks kills the daemon while it packs, and the monitor that the snapshot came from: what was to be packed is as before, and half a
// pack is never taken for a whole one.
func TestKilledInPacks(t *testing.T) {
	t.Parallel()
	m := newMoving(t)
	for _, part := range []float64{0, 0.1, 0.7} {
		t.Run(fmt.Sprintf("daemon after %.0f percent", part*100), func(t *testing.T) {
			d := m.in(t)
			size := fileSize(t, m.packs["two"])
			sum, err := d.readPack("two", int64(part*float64(size)), d.kill9)
			if !client.IsCode(err, client.CodeBrokenOff) && (err != nil || sum != m.sums["two"]) {
				t.Errorf("a pack whose daemon was killed: got %v, want that it broke off", err)
			}
			d.kill9()
			d.start(setup{})
			m.checkWhole(d)
		})
	}
	t.Run("command", func(t *testing.T) {
		d := m.in(t)
		dir := t.TempDir()
		cmd := exec.Command(d.lab.bin, "pack", "--tag", "two", "--out", filepath.Join(dir, "out"))
		cmd.Env = append(os.Environ(), "FORKD_URL="+d.socket())
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		eventually(t, callLimit, func() error {
			for _, name := range entries(dir) {
				if info, err := os.Stat(filepath.Join(dir, name)); err == nil && info.Size() > 0 {
					return nil
				}
			}
			return errors.New("nothing is written")
		})
		d.kill9()
		err := cmd.Wait()
		if left := entries(dir); err != nil && len(left) > 0 || err == nil && (len(left) != 1 || left[0] != "out") {
			t.Errorf("forkd pack, whose daemon was killed, ended with %v and left %v", err, left)
		}
		d.start(setup{})
		m.checkWhole(d)
	})
	t.Run("source's monitor", func(t *testing.T) {
		d := m.in(t)
		source := &guest{m.source.Sandbox, d}
		sum, err := d.readPack("one", fileSize(t, m.packs["one"])/2, func() { killProcess(t, source.PID) })
		if err != nil || sum != m.sums["one"] {
			t.Errorf("a pack of a branch whose source was killed: %v, the same bytes: %v", err, sum == m.sums["one"])
		}
		source.awaitEnd("failed", "monitor")
		m.checkWhole(d)
	})
	m.killGuests()
	m.checkTidy()
}

func fileSize(t *testing.T, path string) int64 {
	t.Helper()
	info, err := os.Stat(path)
	if err != nil {
		t.Fatal(err)
	}
	return info.Size()
}

// readPack packs a snapshot and kills something when some of it was read.
func (d *daemon) readPack(tag string, after int64, kill func()) (sum [sha256.Size]byte, err error) {
	d.t.Helper()
	ctx, cancel := d.limited()
	defer cancel()
	body, err := d.client.Pack(ctx, tag, client.PackOptions{})
	if err != nil {
		return sum, err
	}
	defer body.Close()
	h := sha256.New()
	_, err = io.Copy(h, &killing{Reader: body, after: after, kill: kill})
	return [sha256.Size]byte(h.Sum(nil)), err
}

// checkWhole holds that everything is there, and that the end of the chain, which has all of it, is right.
func (m *moving) checkWhole(d *daemon) {
	d.t.Helper()
	if got := strings.Fields(d.must("images", "-q")); !slices.Equal(got, []string{"old", "one", "two"}) {
		d.t.Fatalf("snapshots: got %v", got)
	}
	d.must("snapshot-verify", "two")
	if got := d.pack("two", filepath.Join(d.t.TempDir(), "two")); got != m.sums["two"] {
		d.t.Error("the pack of two is another one now")
	}
	child := d.fork1(of("two"))
	if err := child.check(m.pages["two"]); err != nil {
		d.t.Errorf("%v of two: %v", child, err)
	}
	child.kill()
	if s, err := m.source.now(); err == nil && s.EndedAtUnix == nil {
		if err := (&guest{m.source.Sandbox, d}).checkCounting(); err != nil {
			d.t.Errorf("the source: %v", err)
		}
	}
	d.checkTidy()
}

// unpackCrash is a moment of an unpacking at which the daemon is killed.
type unpackCrash struct {
	present string // what is there before
	point   string // "": in the middle of the pack
	there   bool   // the pack's snapshot is, afterwards
}

// TestKilledInUnpacks kills daemons while they take in a pack, at every step and in the middle of it: all of it is there then, or nothing.
func TestKilledInUnpacks(t *testing.T) {
	t.Parallel()
	m := newMoving(t)
	tests := []unpackCrash{
		{"", "", false},
		{"", "unpack.journal", false},
		{"", "unpack.image", false},
		{"", "unpack.publish@1", false},
		{"", "unpack.publish@3", false},
		{"", "unpack.admit", false},
		{"", "unpack.done", true},
		{"one", "", false},
		{"one", "unpack.journal", false},
		{"one", "unpack.publish@1", false},
		{"one", "unpack.admit", false},
		{"one", "unpack.done", true},
	}
	for _, p := range transfer.Points() {
		if !slices.ContainsFunc(tests, func(tt unpackCrash) bool { return strings.HasPrefix(tt.point, p) }) {
			t.Errorf("no crash at the point %s is tried", p)
		}
	}
	there := ownDaemon(t, setup{empty: true})
	for _, tt := range tests {
		ok := t.Run(cmp.Or(tt.present, "nothing")+" is there, "+cmp.Or(tt.point, "in the middle"), func(t *testing.T) {
			d := there.in(t)
			if tt.present != "" {
				d.unpack(m.packs[tt.present], tt.present)
			}
			if tt.point != "" {
				d.stop()
				d.start(setup{env: []string{failpoint.Variable + "=" + tt.point + "=kill"}})
			}
			pack, err := os.ReadFile(m.packs["two"])
			if err != nil {
				t.Fatal(err)
			}
			body := &killing{Reader: bytes.NewReader(pack), after: int64(len(pack) / 2)}
			if tt.point == "" {
				body.kill = func() {
					if tt.present == "" { // else the half that was read is here already
						d.awaitHalf()
					}
					_ = d.process.kill()
				}
			}
			ctx, cancel := d.limited()
			defer cancel()
			if res, err := d.client.Unpack(ctx, body, client.UnpackOptions{Tag: "two"}); !client.IsCode(err, client.CodeNoDaemon) {
				t.Errorf("unpack whose daemon is killed: got %+v, %v, want no answer", res, err)
			}
			d.awaitDeath()
			d.start(setup{})
			d.checkTidy()
			m.checkMoved(d, tt.present, tt.there)
		})
		if !ok {
			return
		}
	}
	d := there
	if got := d.unpack(m.packs["two"], "two"); len(got.NewSnapshots) != 3 || !got.NewImage {
		t.Errorf("unpacked after all that: %+v", got)
	}
	m.checkMoved(d, "", true)
	m.killGuests()
}

// awaitHalf waits until the daemon writes what is being unpacked.
func (d *daemon) awaitHalf() {
	for range 200 {
		if len(d.halfMade()) > 0 {
			return
		}
		time.Sleep(10 * time.Millisecond)
	}
	d.t.Error("nothing is being written while a pack is taken in")
}

// checkMoved holds that a daemon has what was there before, and the pack's snapshot or nothing of it, and removes it all.
func (m *moving) checkMoved(d *daemon, present string, there bool) {
	d.t.Helper()
	var tags []string
	if present != "" {
		tags = append(tags, present)
	}
	if there {
		tags = append(tags, "two")
	}
	if got := strings.Fields(d.must("images", "-q")); !slices.Equal(got, tags) {
		d.t.Fatalf("snapshots: got %v, want %v", got, tags)
	}
	slices.Reverse(tags)
	for _, tag := range tags {
		d.checkSnapshot(tag, m.pages[tag])
	}
	if len(tags) > 0 {
		d.must("image", "rm", bareImage)
	}
	if left := slices.Concat(entries(filepath.Join(d.data, "snapshots")), entries(filepath.Join(d.data, "images")), entries(filepath.Join(d.data, "images", "names"))); len(left) != 1 || left[0] != "names" {
		d.t.Errorf("left of what was removed, or never there: %v", left)
	}
	d.checkTidy()
}
