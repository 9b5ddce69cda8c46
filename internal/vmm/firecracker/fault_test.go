package firecracker

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/forkd/forkd/internal/memory"
	"github.com/forkd/forkd/internal/vmm"
	"github.com/forkd/forkd/internal/vmm/probeguest"
)

// fakeHost is an engine over a fake Firecracker, with all that machines need.
type fakeHost struct {
	*Engine
	kernel, initramfs, rootfs *os.File
	ram, state                *os.File
	shape                     vmm.Shape
	nic                       *vmm.NIC // of the next machine
}

func newFakeHost(t *testing.T, orders fakeOrders, change ...func(*Options)) *fakeHost {
	t.Helper()
	opt := Options{Binary: newFake(t, orders), Save: SaveStateOnly, KVM: func() error { return nil }, TSCkHz: func() (uint64, error) { return 1e6, nil }}
	for _, f := range change {
		f(&opt)
	}
	if err := probeguest.Accessible(); err != nil {
		t.Skipf("the engine looks whether KVM can be opened: %v", err)
	}
	h := &fakeHost{Engine: New(opt), shape: vmm.Shape{MemMiB: 16, VCPUs: 1}}
	for i, f := range []**os.File{&h.kernel, &h.initramfs, &h.rootfs} {
		var err error
		if *f, err = memory.SealedCopy(fmt.Sprint("file", i), probeguest.Kernel()); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { (*f).Close() })
	}
	var err error
	if h.ram, err = memory.New("fake", 16<<20); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { h.ram.Close() })
	h.state = tempFile(t)
	return h
}

// boot boots a parent.
func (h *fakeHost) boot(ctx context.Context, dir string) (vmm.Machine, error) {
	return h.Boot(ctx, vmm.BootConfig{Dir: dir, Shape: h.shape, NIC: h.nic, Memory: h.ram, Kernel: h.kernel, Initramfs: h.initramfs, Rootfs: h.rootfs})
}

// child restores a child.
func (h *fakeHost) child(ctx context.Context, dir string) (vmm.Machine, error) {
	p, err := h.Prepare(ctx, vmm.PrepareConfig{Dir: dir, Shape: h.shape, NIC: h.nic, Memory: h.ram, Rootfs: h.rootfs})
	if err != nil {
		return nil, err
	}
	return p.Load(ctx, h.state)
}

// freeze makes the state that children load, with a Firecracker that is not told to fail.
func (h *fakeHost) freeze(t *testing.T) {
	t.Helper()
	good := newFakeHost(t, fakeOrders{})
	good.shape = h.shape
	m, err := good.boot(t.Context(), t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(m.Pause(t.Context()), m.SaveState(t.Context(), h.state), m.Kill()); err != nil {
		t.Fatal(err)
	}
}

// life is all that is done to a machine until it runs on after a branch.
func life(ctx context.Context, m vmm.Machine, state *os.File) error {
	for _, step := range []func() error{
		func() error { return m.Pause(ctx) },
		func() error { return m.SaveState(ctx, state) },
		func() error { return m.Resume(ctx) },
	} {
		if err := step(); err != nil {
			return err
		}
	}
	return nil
}

// TestFaults fails every call in every way. Nothing may be left, and the error names the step and the cause.
func TestFaults(t *testing.T) {
	steps := []struct {
		call, step string
		child      bool
	}{
		{"start", "wait for Firecracker's API", false},
		{"PUT /machine-config", "set the machine's shape", false},
		{"PUT /boot-source", "set the kernel", false},
		{"PUT /drives/root", "attach the root file system", false},
		{"PUT /vsock", "attach the vsock device", false},
		{"PUT /entropy", "attach the entropy device", false},
		{callNetwork, "attach the network device", false},
		{"PUT /actions", "start the guest", false},
		{"start", "wait for Firecracker's API", true},
		{"PUT /snapshot/load", "load the device state", true},
		{"PATCH /vm", "pause", true},
		{"PUT /snapshot/create", "save the device state", true},
	}
	for _, s := range steps {
		for _, kind := range faultKinds {
			if s.call == "start" && kind != "kill" && kind != "stall" || s.call == callNetwork && !canHaveTaps() {
				continue
			}
			who := map[bool]string{true: "child", false: "parent"}[s.child]
			t.Run(who+" "+strings.ReplaceAll(s.call, "/", ":")+" "+kind, func(t *testing.T) {
				h := newFakeHost(t, fakeOrders{Fault: s.call, Kind: kind})
				h.shape.Net = canHaveTaps()
				start := h.boot
				if s.child {
					h.freeze(t)
					start = h.child
				}
				dir := t.TempDir()
				before := processes(t)
				h.nic = newNIC(t, h.shape)
				ctx, cancel := context.WithTimeout(t.Context(), limitOf(kind))
				defer cancel()
				m, err := start(ctx, dir)
				if err == nil {
					err = life(ctx, m, tempFile(t))
					if killed := m.Kill(); killed != nil {
						t.Errorf("Kill: %v", killed)
					}
				}
				if err == nil || !strings.Contains(err.Error(), s.step) || !strings.Contains(err.Error(), faultCauses[kind]) {
					t.Errorf("got %v, want an error about %q and %q", err, s.step, faultCauses[kind])
				}
				checkNothingLeft(t, dir, before)
				checkNetworkLeft(t, h.nic)
			})
		}
	}
}

// TestRefusalLeavesTheMachine: a machine whose pause, save or resume was refused goes on when it is told to, however its state is saved.
func TestRefusalLeavesTheMachine(t *testing.T) {
	for _, mode := range []SaveMode{SaveStateOnly, SaveDiff, SaveFull} {
		for _, call := range []string{"PATCH /vm", "PUT /snapshot/create"} {
			t.Run(string(mode)+" "+strings.ReplaceAll(call, "/", ":"), func(t *testing.T) {
				h := newFakeHost(t, fakeOrders{Fault: call, Kind: "refuse"}, func(o *Options) { o.Save = mode })
				h.freeze(t)
				m, err := h.child(t.Context(), t.TempDir())
				if err != nil {
					t.Fatal(err)
				}
				defer m.Kill()
				if err := life(t.Context(), m, tempFile(t)); err == nil {
					t.Error("the first time: no error")
				}
				if err := life(t.Context(), m, tempFile(t)); err != nil {
					t.Errorf("the second time: %v", err)
				}
			})
		}
	}
}

func TestBadInput(t *testing.T) {
	text := filepath.Join(t.TempDir(), "firecracker")
	if err := os.WriteFile(text, []byte("not a program\n"), 0o700); err != nil {
		t.Fatal(err)
	}
	noKVM := func(err error) func(*Options) { return func(o *Options) { o.KVM = func() error { return err } } }
	other := func(path string) func(*Options) { return func(o *Options) { o.Binary = path } }
	for _, tt := range []struct {
		name   string
		orders fakeOrders
		change func(*Options)
		want   string
	}{
		{"no binary", fakeOrders{}, other("/no/such/firecracker"), "FORKD_FIRECRACKER"},
		{"a text file", fakeOrders{}, other(text), "is it Firecracker?"},
		{"another program", fakeOrders{}, other("/bin/true"), "is it Firecracker?"},
		{"too old", fakeOrders{Version: "1.11.0"}, func(*Options) {}, "is Firecracker 1.11.0, at least 1.12 is needed"},
		{"much too old", fakeOrders{Version: "0.25.2"}, func(*Options) {}, "at least 1.12 is needed"},
		{"no KVM", fakeOrders{}, noKVM(probeguest.ErrNoKVM), "KVM runs no guest"},
		{"no stock kernel", fakeOrders{}, noKVM(probeguest.ErrNoStockKernel), "can't run a stock kernel"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			_, err := newFakeHost(t, tt.orders, tt.change).Probe(t.Context())
			if !errors.Is(err, vmm.ErrUnavailable) || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("got %v, want ErrUnavailable about %q", err, tt.want)
			}
		})
	}
}

func TestKVMThatCannotBeOpened(t *testing.T) {
	for _, tt := range []struct {
		err  error
		want string
	}{{os.ErrNotExist, "this host has no KVM"}, {os.ErrPermission, "join the group of /dev/kvm"}, {unix.ENODEV, "KVM can't be used"}} {
		if got := explainKVM(&os.PathError{Op: "open", Path: probeguest.Device, Err: tt.err}); got == nil || !strings.Contains(got.Error(), tt.want) || !errors.Is(got, tt.err) {
			t.Errorf("%v: got %v, want it to say %q", tt.err, got, tt.want)
		}
	}
	if err := explainKVM(nil); err != nil {
		t.Error(err)
	}
}

// TestProbedSaveMode: a binary that opens the memory's file first saves no state without memory, and that is found out.
func TestProbedSaveMode(t *testing.T) {
	for _, tt := range []struct {
		lacks []string
		want  SaveMode
	}{{nil, SaveStateOnly}, {[]string{"state-only"}, SaveDiff}} {
		h := newFakeHost(t, fakeOrders{Lacks: tt.lacks}, func(o *Options) { o.Save = "" })
		if _, err := h.Probe(t.Context()); err != nil {
			t.Errorf("lacks %v: %v", tt.lacks, err)
		} else if got := h.probed.save; got != tt.want {
			t.Errorf("lacks %v: save mode %s, want %s", tt.lacks, got, tt.want)
		}
	}
}

func TestBadState(t *testing.T) {
	h := newFakeHost(t, fakeOrders{})
	h.freeze(t)
	b, err := os.ReadFile(h.state.Name())
	if err != nil {
		t.Fatal(err)
	}
	b[len(b)/2] ^= 1
	other := fmt.Appendf(nil, "a device state of Firecracker 1.9 %08x", 1)
	for name, state := range map[string][]byte{"empty": nil, "a bit flipped": b, "cut off": b[:len(b)-3], "of another version": other} {
		t.Run(name, func(t *testing.T) {
			if err := os.WriteFile(h.state.Name(), state, 0o600); err != nil {
				t.Fatal(err)
			}
			dir, before := t.TempDir(), processes(t)
			if _, err := h.child(t.Context(), dir); !errors.Is(err, vmm.ErrIncompatible) {
				t.Errorf("got %v, want ErrIncompatible", err)
			}
			checkNothingLeft(t, dir, before)
		})
	}
}

// TestLongPaths: sockets are found by short names, however deep a machine's directory is.
func TestLongPaths(t *testing.T) {
	h := newFakeHost(t, fakeOrders{})
	dir := filepath.Join(t.TempDir(), strings.Repeat("deep", 40))
	if err := os.Mkdir(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	m, err := h.boot(t.Context(), dir)
	if err != nil {
		t.Fatal(err)
	}
	if err := m.Kill(); err != nil {
		t.Error(err)
	}
}

// processes lists our child processes.
func processes(t *testing.T) map[string]bool {
	t.Helper()
	list := map[string]bool{}
	stats, err := filepath.Glob("/proc/[0-9]*/stat")
	if err != nil {
		t.Fatal(err)
	}
	for _, stat := range stats {
		b, err := os.ReadFile(stat)
		if err != nil {
			continue
		}
		fields := strings.Fields(string(b[strings.LastIndexByte(string(b), ')')+1:]))
		if len(fields) > 1 && fields[1] == fmt.Sprint(os.Getpid()) {
			list[filepath.Base(filepath.Dir(stat))] = true
		}
	}
	return list
}

func checkNothingLeft(t *testing.T, dir string, before map[string]bool) {
	t.Helper()
	left, err := os.ReadDir(dir)
	if err != nil || len(left) > 0 {
		t.Errorf("left in the machine's directory: %v (%v)", left, err)
	}
	for pid := range processes(t) {
		if !before[pid] {
			t.Errorf("process %s is left", pid)
		}
	}
}
