package memory

import (
	"context"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/forkd/forkd/internal/vmm"
)

// guest is the host's side of a guest process.
type guest struct {
	t       testing.TB
	cmd     *exec.Cmd
	conn    net.Conn
	in      *json.Decoder
	process vmm.Process
	image   *Image
	at      []writerState // in the pause
}

// needRoot skips where a live window can't be had.
func needRoot(t testing.TB) {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("needs root: it acts in another process")
	}
	f, err := OpenUFFD()
	if err != nil {
		t.Skip(err)
	}
	f.Close()
}

// base is an image of so many pages. Words of the first written pages are zero, so that writers start there at round 1; the
// rest is a pattern.
func base(t testing.TB, pages, written uint64) *Image {
	t.Helper()
	f, err := New("base", int64(pages)*PageSize)
	if err != nil {
		t.Fatal(err)
	}
	page := make([]byte, PageSize)
	for p := written; p < pages; p++ {
		if p%7 == 0 {
			continue // a hole
		}
		fillPattern(page, p)
		if _, err := f.WriteAt(page, int64(p)*PageSize); err != nil {
			t.Fatal(err)
		}
	}
	if err := Seal(f); err != nil {
		t.Fatal(err)
	}
	img, err := NewImage(f)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { img.Close() })
	return img
}

func fillPattern(page []byte, p uint64) {
	for i := 0; i < len(page); i += 8 {
		binary.LittleEndian.PutUint64(page[i:], p<<16|uint64(i))
	}
}

// areas divides the first pages of memory among writers that start at round 1.
func areas(writers, pages uint64) []writerState {
	var out []writerState
	for i := range writers {
		out = append(out, writerState{First: i * pages / writers, Pages: pages / writers, Round: 1})
	}
	return out
}

// startGuest runs a guest of img, with its layers mapped, its writers stopped.
func startGuest(t testing.TB, img *Image, cfg guestConfig) *guest {
	t.Helper()
	g := launchGuest(t, img, cfg)
	if err := Overlay(t.Context(), g.process, img, nil); err != nil {
		t.Fatal(err)
	}
	return g
}

// launchGuest runs a guest that has mapped the image's base only.
func launchGuest(t testing.TB, img *Image, cfg guestConfig) *guest {
	t.Helper()
	arg, err := json.Marshal(cfg)
	if err != nil {
		t.Fatal(err)
	}
	dev, err := OpenUFFD()
	if err != nil {
		t.Fatal(err)
	}
	defer dev.Close()
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	ours, theirs := os.NewFile(uintptr(pair[0]), "ours"), os.NewFile(uintptr(pair[1]), "theirs")
	defer ours.Close()
	defer theirs.Close()
	g := &guest{t: t, image: img, cmd: helperCommand("guest", string(arg))}
	if g.conn, err = net.FileConn(ours); err != nil {
		t.Fatal(err)
	}
	if !cfg.Preempt {
		g.cmd.Env = append(g.cmd.Env, "GODEBUG=asyncpreemptoff=1")
	}
	g.cmd.Stderr = os.Stderr
	g.cmd.ExtraFiles = []*os.File{img.Base(), theirs, dev}
	g.process = vmm.Process{IdleThread: idleName, UFFDDev: guestUFFDFD}
	for i, l := range img.Layers() {
		g.cmd.ExtraFiles = append(g.cmd.ExtraFiles, l.File)
		g.process.LayerFDs = append(g.process.LayerFDs, guestLayerFD+i)
	}
	if err := g.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(g.kill)
	g.process.PID = g.cmd.Process.Pid
	if g.process.StartTicks, err = startTicks(g.process.PID); err != nil {
		t.Fatal(err)
	}
	g.in = json.NewDecoder(g.conn)
	g.reply()
	return g
}

func (g *guest) kill() {
	g.cmd.Process.Kill()
	g.cmd.Wait()
	g.conn.Close()
}

func (g *guest) reply() guestReply {
	g.t.Helper()
	r, err := g.tryReply()
	if err != nil {
		g.t.Fatalf("guest %d: %v", g.process.PID, err)
	}
	return r
}

func (g *guest) tryReply() (r guestReply, err error) {
	g.conn.SetReadDeadline(time.Now().Add(20 * time.Second))
	err = g.in.Decode(&r)
	return r, err
}

func (g *guest) try(command string) (guestReply, error) {
	if err := json.NewEncoder(g.conn).Encode(command); err != nil {
		return guestReply{}, err
	}
	return g.tryReply()
}

func (g *guest) do(command string) guestReply {
	g.t.Helper()
	r, err := g.try(command)
	if err != nil {
		g.t.Fatalf("guest %d: %s: %v", g.process.PID, command, err)
	}
	return r
}

// hooks pause and resume the guest, and note where its writers were.
func (g *guest) hooks() Hooks {
	return Hooks{
		Pause: func(context.Context) error {
			r, err := g.try("pause")
			g.at = r.Writers
			return err
		},
		Resume: func(context.Context) error {
			_, err := g.try("resume")
			return err
		},
	}
}

func (g *guest) target() Target { return Target{Process: g.process, Image: g.image} }

// capture captures the guest and returns the image of that instant.
func (g *guest) capture(opt CaptureOptions) (*Captured, *Image) {
	g.t.Helper()
	c, err := Capture(g.t.Context(), g.target(), g.hooks(), opt)
	if err != nil {
		g.t.Fatal(err)
	}
	return c, g.derive(c.Layer)
}

func (g *guest) derive(l Layer) *Image {
	g.t.Helper()
	img, err := g.image.Derive(l)
	if err != nil {
		g.t.Fatal(err)
	}
	g.t.Cleanup(func() { img.Close() })
	return img
}

// advances waits until each writer has written so many more pages.
func (g *guest) advances(pages uint64) {
	g.t.Helper()
	from := g.do("stats").Written
	for deadline := time.Now().Add(30 * time.Second); g.do("stats").Written < from+pages; {
		if time.Now().After(deadline) {
			g.t.Fatalf("guest %d has written %d pages in 30 s, want %d", g.process.PID, g.do("stats").Written-from, pages)
		}
	}
}

// torn counts the pages of img that are not what they were at the instant when the writers were there.
func torn(t testing.TB, img *Image, at []writerState, written uint64) int {
	t.Helper()
	n := 0
	got, want := make([]byte, PageSize), make([]byte, PageSize)
	check := func(page uint64) {
		if _, err := img.ReadAt(got, int64(page)*PageSize); err != nil && err != io.EOF {
			t.Fatal(err)
		}
		if string(got) != string(want) {
			n++
		}
	}
	for _, w := range at {
		for p := range w.Pages {
			for i := range uint64(wordsPerPage) {
				v := w.Round
				if p*wordsPerPage+i >= w.Pos {
					v--
				}
				binary.LittleEndian.PutUint64(want[i*8:], v)
			}
			check(w.First + p)
		}
	}
	for p := written; p < uint64(img.Bytes())/PageSize; p++ {
		clear(want)
		if p%7 != 0 {
			fillPattern(want, p)
		}
		check(p)
	}
	return n
}

// until waits for a condition on what the guest says of itself.
func (g *guest) until(what string, ok func(guestReply) bool) {
	g.t.Helper()
	for deadline := time.Now().Add(20 * time.Second); !ok(g.do("stats")); {
		if time.Now().After(deadline) {
			g.t.Fatalf("guest %d: not in 20 s: %s", g.process.PID, what)
		}
		time.Sleep(time.Millisecond)
	}
}

func (g *guest) signal(s unix.Signal) {
	g.t.Helper()
	if err := unix.Kill(g.process.PID, s); err != nil {
		g.t.Fatal(err)
	}
}

// waitState waits until the process's main thread is in a state of /proc/PID/stat.
func (g *guest) waitState(want string) {
	g.t.Helper()
	for deadline := time.Now().Add(10 * time.Second); ; time.Sleep(time.Millisecond) {
		b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", g.process.PID))
		if err != nil {
			g.t.Fatal(err)
		}
		if _, rest, _ := strings.Cut(string(b), ") "); strings.HasPrefix(rest, want) {
			return
		}
		if time.Now().After(deadline) {
			g.t.Fatalf("guest %d is not in state %s: %s", g.process.PID, want, b)
		}
	}
}

func (g *guest) spinsOn() {
	g.t.Helper()
	before := g.do("stats").Spins
	g.until("the spinning thread spins", func(r guestReply) bool { return r.Spins > before })
}

// sane checks what must hold of a guest that is left alone again.
func (g *guest) sane() {
	g.t.Helper()
	if s := g.do("stats").Strange; s != "[]" {
		g.t.Errorf("the idle thread saw %s", s)
	}
	if n, err := tracersOf(g.process.PID); n != 0 || err != nil {
		g.t.Errorf("%d threads are traced (%v)", n, err)
	}
	if n, err := protectedPages(g); n != 0 || err != nil {
		g.t.Errorf("%d pages are still write-protected (%v)", n, err)
	}
}

// tracersOf counts the threads of a process that are traced.
func tracersOf(pid int) (int, error) {
	tasks, err := os.ReadDir(fmt.Sprintf("/proc/%d/task", pid))
	n := 0
	for _, t := range tasks {
		b, err := os.ReadFile(fmt.Sprintf("/proc/%d/task/%s/status", pid, t.Name()))
		if err == nil && !strings.Contains(string(b), "\nTracerPid:\t0\n") {
			n++
		}
	}
	return n, err
}

// protectedPages counts the guest's pages that have a write-protect bit or marker.
func protectedPages(g *guest) (n uint64, err error) {
	p, err := openProcess(g.process)
	if err != nil {
		return 0, err
	}
	defer p.close()
	guest, err := readGuestMap(p, g.image)
	if err != nil {
		return 0, err
	}
	m, err := openPagemap(p)
	if err != nil {
		return 0, err
	}
	defer m.close()
	err = m.each(guest, Extent{0, guest.pages()}, func(run Mapping, e Extent) error {
		protected := func(entry uint64) bool { return entry&pmUFFDWP != 0 }
		return m.read(run, e, protected, func(e Extent) { n += e.N })
	})
	return n, err
}
