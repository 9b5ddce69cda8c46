package firecracker

import (
	"context"
	"encoding/binary"
	"errors"
	"os"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/forkd/forkd/internal/confine"
	"github.com/forkd/forkd/internal/memory"
	"github.com/forkd/forkd/internal/vmm"
	"github.com/forkd/forkd/internal/vmm/probeguest"
)

// bare is an engine with a frozen probe guest, on whatever KVM this host has.
type bare struct {
	*Engine
	shape vmm.Shape
	image *memory.Image
	state *os.File
	nic   *vmm.NIC // of the next child
	plain bool     // children can't make a userfaultfd
}

const bareMiB = 64

// testUsers are for the confinement of monitors, where we may confine them.
func testUsers() *confine.Users {
	if os.Geteuid() != 0 {
		return nil
	}
	return confine.NewUsers(confine.RangeFor("test"))
}

// newBare boots and freezes a probe guest that has obeyed commands.
func newBare(t *testing.T, opt Options, commands ...byte) *bare {
	t.Helper()
	return newBareOf(t, vmm.Shape{MemMiB: bareMiB, VCPUs: 1}, opt, commands...)
}

func newBareOf(t *testing.T, shape vmm.Shape, opt Options, commands ...byte) *bare {
	t.Helper()
	if err := probeguest.Accessible(); err != nil {
		t.Skipf("no KVM: %v", err)
	}
	opt.Binary, opt.Bare, opt.Serial = firecrackerBinary(t), true, true
	opt.Users = testUsers()
	b := &bare{Engine: New(opt), shape: shape}
	if _, err := b.Probe(t.Context()); err != nil {
		t.Skipf("this host runs no Firecracker: %v", err)
	}
	kernel, err := memory.SealedCopy("kernel", probeguest.Kernel())
	if err != nil {
		t.Fatal(err)
	}
	defer kernel.Close()
	ram, err := memory.New("bare", bareMiB<<20)
	if err != nil {
		t.Fatal(err)
	}
	parent, err := b.Boot(t.Context(), vmm.BootConfig{Dir: t.TempDir(), Shape: b.shape, Memory: ram, Kernel: kernel, NIC: newNIC(t, b.shape)})
	if err != nil {
		t.Fatal(err)
	}
	defer parent.Kill()
	ask(t, parent, append([]byte{probeguest.Echo}, commands...), probeguest.Echo)
	if b.state, err = newState(); err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(parent.Pause(t.Context()), parent.SaveState(t.Context(), b.state), parent.Kill()); err != nil {
		t.Fatal(err)
	}
	if err := memory.Seal(ram); err != nil {
		t.Fatal(err)
	}
	if b.image, err = memory.NewImage(ram); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { b.image.Close(); b.state.Close() })
	return b
}

// child restores an image, with a userfaultfd if there is one.
func (b *bare) child(t *testing.T, img *memory.Image, state *os.File) *machine {
	t.Helper()
	cfg := vmm.PrepareConfig{Dir: t.TempDir(), Shape: b.shape, Memory: img.Base(), NIC: b.nic}
	if uffd, err := memory.OpenUFFD(); err == nil && !b.plain {
		defer uffd.Close()
		cfg.UFFD = uffd
	}
	for _, l := range img.Layers() {
		cfg.Layers = append(cfg.Layers, l.File)
	}
	p, err := b.Prepare(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	m, err := p.Load(t.Context(), state)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := m.Kill(); err != nil {
			t.Errorf("Kill: %v", err)
		}
		if left, _ := os.ReadDir(cfg.Dir); len(left) > 0 {
			t.Errorf("left in the machine's directory: %v", left)
		}
	})
	if err := memory.Overlay(t.Context(), m.Process(), img, nil); err != nil {
		t.Fatal(err)
	}
	return m.(*machine)
}

// ask writes to a guest and waits for what ends its answer.
func ask(t *testing.T, m vmm.Machine, what []byte, until byte) []byte {
	t.Helper()
	serial := m.(Serial)
	heard := serial.Listen()
	if _, err := serial.Write(what); err != nil {
		t.Fatal(err)
	}
	var all []byte
	limit := time.After(30 * time.Second)
	for {
		select {
		case b := <-heard:
			if all = append(all, b...); len(all) > 0 && (all[len(all)-1] == until || all[0] == until) {
				return all
			}
		case <-limit:
			t.Fatalf("guest %d says %q, want it to end with %q", m.Process().PID, all, until)
		}
	}
}

// torn asks a guest that works for the pages that it found torn and for its round.
func torn(t *testing.T, m vmm.Machine) (pages, round uint32) {
	t.Helper()
	serial := m.(Serial)
	heard := serial.Listen()
	if _, err := serial.Write([]byte{probeguest.Status}); err != nil {
		t.Fatal(err)
	}
	var all []byte
	limit := time.After(30 * time.Second)
	for len(all) < 9 {
		select {
		case b := <-heard:
			all = append(all, b...)
		case <-limit:
			t.Fatalf("guest %d says %q, want its status", m.Process().PID, all)
		}
	}
	return binary.LittleEndian.Uint32(all[1:]), binary.LittleEndian.Uint32(all[5:])
}

func resume(t *testing.T, m vmm.Machine) {
	t.Helper()
	if err := m.Resume(t.Context()); err != nil {
		t.Fatal(err)
	}
}

func TestBareChildren(t *testing.T) {
	b := newBare(t, Options{})
	for range 3 {
		m := b.child(t, b.image, b.state)
		resume(t, m)
		ask(t, m, []byte{probeguest.Echo}, probeguest.Echo)
		console, err := m.Console(t.Context())
		if err != nil || len(console) == 0 {
			t.Errorf("Console: %q, %v", console, err)
		}
	}
}

func TestBareEnds(t *testing.T) {
	b := newBare(t, Options{})
	m := b.child(t, b.image, b.state)
	resume(t, m)
	if err := unix.Kill(m.Process().PID, unix.SIGKILL); err != nil {
		t.Fatal(err)
	}
	<-m.Done()
	if got := m.Exit(); got.Reason != vmm.ExitCrashed {
		t.Errorf("killed from outside: %+v", got)
	}
	if err := m.Pause(t.Context()); !errors.Is(err, vmm.ErrGone) {
		t.Errorf("Pause: %v, want ErrGone", err)
	}
	if _, err := m.Dial(t.Context(), vmm.PortControl); !errors.Is(err, vmm.ErrGone) {
		t.Errorf("Dial: %v, want ErrGone", err)
	}
}

// TestBareAttach takes a machine over as a daemon does that was started again, in each way to save its state, and through the jailer if there is one.
func TestBareAttach(t *testing.T) {
	options := map[string]Options{}
	for _, mode := range []SaveMode{SaveStateOnly, SaveDiff, SaveFull} {
		options[string(mode)] = Options{Save: mode}
	}
	if jailer := os.Getenv("FORKD_JAILER"); jailer != "" {
		options["jailed"] = Options{Jailer: jailer}
	}
	for name, opt := range options {
		t.Run(name, func(t *testing.T) { attachBare(t, opt) })
	}
}

func attachBare(t *testing.T, opt Options) {
	b := newBare(t, opt)
	m := b.child(t, b.image, b.state)
	resume(t, m)
	ask(t, m, []byte{probeguest.Echo}, probeguest.Echo)
	m.session.letGo()
	again, err := b.Attach(t.Context(), m.Process())
	if err != nil {
		t.Fatal(err)
	}
	other := again.(*machine)
	defer other.session.letGo()
	if err := life(t.Context(), other, tempFile(t)); err != nil {
		t.Error(err)
	}
}

func tempFile(t *testing.T) *os.File {
	t.Helper()
	f, err := os.Create(filepath.Join(t.TempDir(), "state"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.Close() })
	return f
}

// TestBareBranch branches a guest that rewrites its pages and checks them, in each way to save its state, several branches deep.
func TestBareBranch(t *testing.T) {
	for _, mode := range []SaveMode{SaveStateOnly, SaveDiff, SaveFull} {
		t.Run(string(mode), func(t *testing.T) {
			b := newBare(t, Options{Save: mode})
			source := b.child(t, b.image, b.state)
			resume(t, source)
			ask(t, source, probeguest.Command(probeguest.Work, 16<<20/4096), probeguest.Work)
			img := b.image
			for depth := range 3 {
				next, state := branch(t, source, img)
				source = b.child(t, next, state)
				resume(t, source)
				_, before := torn(t, source)
				for round := before; round < before+2; {
					_, round = torn(t, source)
				}
				if pages, _ := torn(t, source); pages > 0 {
					t.Errorf("branch %d: %d torn pages", depth, pages)
				}
				img = next
			}
		})
	}
}

// TestBareFallback: where a monitor's memory can't be protected from outside, a branch copies what changed in its pause, and is of one instant as well.
func TestBareFallback(t *testing.T) {
	for _, mode := range []SaveMode{SaveStateOnly, SaveDiff} {
		t.Run(string(mode), func(t *testing.T) {
			b := newBare(t, Options{Save: mode})
			b.plain = true
			source := b.child(t, b.image, b.state)
			resume(t, source)
			ask(t, source, probeguest.Command(probeguest.Work, 4<<20/memory.PageSize), probeguest.Work)
			state := tempFile(t)
			got, err := memory.Capture(t.Context(), memory.Target{Process: source.Process(), Image: b.image}, saving(source, state), memory.CaptureOptions{})
			if err != nil {
				t.Fatal(err)
			}
			if got.Mode != memory.ModeDiff || got.Warning == "" {
				t.Errorf("mode %s, warning %q; want %s, and why", got.Mode, got.Warning, memory.ModeDiff)
			}
			next, err := b.image.Derive(got.Layer)
			if err != nil {
				t.Fatal(err)
			}
			defer next.Close()
			for _, m := range []*machine{source, b.child(t, next, state)} {
				resume(t, m)
				_, before := torn(t, m)
				for round := before; round < before+2; {
					_, round = torn(t, m)
				}
				if pages, _ := torn(t, m); pages > 0 {
					t.Errorf("%d torn pages", pages)
				}
			}
		})
	}
}

// saving are the hooks of a branch.
func saving(source *machine, state *os.File) memory.Hooks {
	return memory.Hooks{Pause: func(ctx context.Context) error {
		return errors.Join(source.Pause(ctx), source.SaveState(ctx, state))
	}, Resume: source.Resume}
}

// branch freezes a running child.
func branch(t *testing.T, source *machine, img *memory.Image) (*memory.Image, *os.File) {
	t.Helper()
	state := tempFile(t)
	got, err := memory.Capture(t.Context(), memory.Target{Process: source.Process(), Image: img}, saving(source, state), memory.CaptureOptions{Mode: memory.ModeLive})
	if errors.Is(err, memory.ErrNotPermitted) || errors.Is(err, memory.ErrNotTracked) {
		t.Skipf("no live branches here: %v", err)
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("%d pages, pause %v (stop and save %v, hold %v, resume %v)", got.Pages, got.Times.Pause, got.Times.Stop, got.Times.Hold, got.Times.Resume)
	next, err := img.Derive(got.Layer)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { next.Close() })
	return next, state
}
