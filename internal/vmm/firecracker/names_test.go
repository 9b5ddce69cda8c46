package firecracker

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/forkd/forkd/internal/guest/agentproto"
	"github.com/forkd/forkd/internal/memory"
	"github.com/forkd/forkd/internal/vmm"
	"github.com/forkd/forkd/internal/vmm/probeguest"
)

// These are about a monitor that a guest has taken over, and what it may put into its directory, or in the place of its descriptors.

// TestConsoleTakesOnlyItsOwn: what stands in the place of a console's file is neither written to nor read, nor waited for.
func TestConsoleTakesOnlyItsOwn(t *testing.T) {
	for name, put := range map[string]func(path, secret string) error{
		"link": func(path, secret string) error { return os.Symlink(secret, path) },
		"pipe": func(path, _ string) error { return unix.Mkfifo(path, 0o666) },
		"file of the monitor's": func(path, _ string) error {
			return errors.Join(os.WriteFile(path, []byte("made up"), 0o666), os.Chown(path, 12345, 12345))
		},
		"directory": func(path, _ string) error { return os.Mkdir(path, 0o777) },
	} {
		for _, file := range []string{consoleFile, olderConsole} {
			t.Run(name+" "+file, func(t *testing.T) {
				dir := t.TempDir()
				secret := filepath.Join(dir, "secret")
				if err := os.WriteFile(secret, []byte("secret"), 0o600); err != nil {
					t.Fatal(err)
				}
				if err := put(filepath.Join(dir, file), secret); errors.Is(err, os.ErrPermission) {
					t.Skip("only root can give a file away")
				} else if err != nil {
					t.Fatal(err)
				}
				c := &console{dir: dir}
				c.keep([]byte("of the guest"))
				if text, err := c.newest(); err == nil {
					t.Errorf("the console is %q, want an error", text)
				}
				if b, err := os.ReadFile(secret); err != nil || string(b) != "secret" {
					t.Errorf("another file is %q now, %v", b, err)
				}
			})
		}
	}
}

// TestDialFollowsNoLink: behind a link there may be the socket of another machine.
func TestDialFollowsNoLink(t *testing.T) {
	dir := t.TempDir()
	l, err := net.Listen("unix", filepath.Join(dir, "other.sock"))
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	if err := os.Symlink("other.sock", filepath.Join(dir, vsockSocket)); err != nil {
		t.Fatal(err)
	}
	if conn, err := dialIn(t.Context(), dir, vsockSocket); err == nil {
		conn.Close()
		t.Error("it connected to what a link names")
	}
	conn, err := dialIn(t.Context(), dir, "other.sock")
	if err != nil {
		t.Fatal(err)
	}
	conn.Close()
	if _, err := dialIn(t.Context(), dir, "none.sock"); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("no socket: got %v, want ErrNotExist", err)
	}
}

// TestOpensOnlyItsMemfds: what is written to is a memfd of that name, and not what the monitor put in its place.
func TestOpensOnlyItsMemfds(t *testing.T) {
	image, err := os.Create(filepath.Join(t.TempDir(), "memfd:forkd-"+stateName))
	if err != nil {
		t.Fatal(err)
	}
	defer image.Close()
	if f, err := openMemfd(fdPath(int(image.Fd())), stateName); !errors.Is(err, vmm.ErrGone) {
		t.Errorf("a file: got %v, %v, want ErrGone", f, err)
	}
	state, err := newState()
	if err != nil {
		t.Fatal(err)
	}
	defer state.Close()
	f, err := openMemfd(fdPath(int(state.Fd())), stateName)
	if err != nil {
		t.Fatal(err)
	}
	f.Close()
}

// TestStreamReadsNoEndlessLine: a monitor that never ends its line is not listened to for longer than a line.
func TestStreamReadsNoEndlessLine(t *testing.T) {
	dir := t.TempDir()
	l, err := net.Listen("unix", filepath.Join(dir, vsockSocket))
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	const most = 8 << 20
	wrote := make(chan int, 1)
	go func() {
		n := 0
		defer func() { wrote <- n }()
		conn, err := l.Accept()
		if err != nil {
			return
		}
		defer conn.Close()
		for piece := bytes.Repeat([]byte("x"), 64<<10); n < most; n += len(piece) {
			if _, err := conn.Write(piece); err != nil {
				return
			}
		}
	}()
	s := &stream{m: &machine{session: &session{api: &api{dir: dir}}}, port: 1, id: agentproto.StreamID{}}
	s.life, s.cease = context.WithCancel(t.Context())
	defer s.cease()
	if _, _, err := s.try(); !errors.Is(err, bufio.ErrBufferFull) {
		t.Errorf("got %v, want that the line is too long", err)
	}
	if n := <-wrote; n >= most {
		t.Errorf("%d bytes were read", n)
	}
}

// TestKernelIsSealed: all parents inherit the same file.
func TestKernelIsSealed(t *testing.T) {
	path := filepath.Join(t.TempDir(), "vmlinux")
	if err := os.WriteFile(path, probeguest.Kernel(), 0o600); err != nil {
		t.Fatal(err)
	}
	kernel, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer kernel.Close()
	f, err := New(Options{}).elf(kernel)
	if err != nil {
		t.Fatal(err)
	}
	if !memory.Sealed(f) {
		t.Error("a parent can change the kernel of the others")
	}
	if !strings.Contains(f.Name(), "kernel") {
		t.Errorf("its name is %s", f.Name())
	}
}

// TestTrialIsRecorded: the machine that a binary is tried with is where a daemon that starts again looks for what is left.
func TestTrialIsRecorded(t *testing.T) {
	trials := filepath.Join(t.TempDir(), "probe")
	h := newFakeHost(t, fakeOrders{Fault: "PUT /boot-source", Kind: "stall"}, func(o *Options) { o.Save, o.Trials = "", trials })
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	ended := make(chan error, 1)
	go func() {
		_, err := h.Probe(ctx)
		ended <- err
	}()
	var found []string
	for len(found) == 0 && pause(t.Context(), time.Millisecond) {
		select {
		case err := <-ended:
			t.Fatalf("the trial ended with %v, and left no record", err)
		default:
		}
		found, _ = filepath.Glob(filepath.Join(trials, "*", vmm.ProcessFile))
	}
	cancel()
	if err := <-ended; !errors.Is(err, context.Canceled) {
		t.Errorf("got %v, want that it was cancelled", err)
	}
	if left, err := os.ReadDir(trials); err != nil || len(left) != 0 {
		t.Errorf("left: %v, %v", left, err)
	}
}
