package stage

import (
	"bytes"
	"debug/elf"
	"fmt"
	"io"
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// TestMain closes for others what this process was started with: the descriptors that are free are these tests' business.
func TestMain(m *testing.M) {
	if err := unix.CloseRange(firstFree, math.MaxUint32, unix.CLOSE_RANGE_CLOEXEC); err != nil {
		fmt.Fprintln(os.Stderr, "close what was inherited:", err)
	}
	os.Exit(m.Run())
}

func TestCodeIsItsSource(t *testing.T) {
	for _, tool := range []string{"as", "ld", "objcopy"} {
		if _, err := exec.LookPath(tool); err != nil {
			t.Skipf("%s is not installed (binutils): the assembled code can't be compared with its source", tool)
		}
	}
	dir := t.TempDir()
	obj, linked, bin := filepath.Join(dir, "t.o"), filepath.Join(dir, "t.elf"), filepath.Join(dir, "t.bin")
	for _, args := range [][]string{
		{"as", "--64", "stage.S", "-o", obj},
		{"ld", "-m", "elf_x86_64", "-Ttext", fmt.Sprint(codeAt), "-e", "0", obj, "-o", linked},
		{"objcopy", "-O", "binary", "-j", ".text", linked, bin},
	} {
		if out, err := exec.Command(args[0], args[1:]...).CombinedOutput(); err != nil {
			t.Fatalf("%v: %v: %s", args, err, out)
		}
	}
	got, err := os.ReadFile(bin)
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(got, code) {
		t.Errorf("stage.S assembles to %d bytes that are not the %d that are embedded: run go generate", len(got), len(code))
	}
}

func TestProgramIsAnELFFile(t *testing.T) {
	f, err := elf.NewFile(bytes.NewReader(Program()))
	if err != nil {
		t.Fatal(err)
	}
	if f.Entry != codeAt || len(f.Progs) != 2 || f.Progs[1].Vaddr != messageAt || f.Progs[1].Filesz != 0 || f.Progs[1].Memsz < room {
		t.Errorf("entry %#x, segments %v", f.Entry, f.Progs)
	}
}

// started is the program, which waits for its message.
type started struct {
	cmd    *exec.Cmd
	socket *os.File
	out    bytes.Buffer
}

func start(t *testing.T, args ...string) *started {
	t.Helper()
	path := filepath.Join(t.TempDir(), "stage")
	if err := os.WriteFile(path, Program(), 0o700); err != nil {
		t.Fatal(err)
	}
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	theirs := os.NewFile(uintptr(fds[1]), "theirs")
	defer theirs.Close()
	s := &started{cmd: exec.Command(path, args...), socket: os.NewFile(uintptr(fds[0]), "ours")}
	s.cmd.Stdin, s.cmd.Stdout, s.cmd.Stderr = theirs, &s.out, &s.out
	if err := s.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	return s
}

// end closes our end and returns what the program, or what it became, said, and how it ended.
func (s *started) end() (string, error) {
	s.socket.Close()
	err := s.cmd.Wait()
	return s.out.String(), err
}

// TestHandsOver starts a shell that says what it inherited, one file and so many that they take several lots.
func TestHandsOver(t *testing.T) {
	noNewPrivileges(t)
	for _, n := range []int{0, 1, 3, maxRights, 2*maxRights + 5} {
		t.Run(fmt.Sprint(n), func(t *testing.T) {
			dir := t.TempDir()
			m := Message{Program: "/bin/sh", Dir: dir, Env: []string{"ONE=1", "TWO=two words"}, Filter: allowAll}
			for i := range n {
				m.Files = append(m.Files, file(t, fmt.Sprintf("file %d", i)))
			}
			m.Stdin = file(t, "standard input")
			s := start(t, "-c", `pwd; echo "$ONE,$TWO"; cat; echo; ls /proc/self/fd | wc -l; [ $N = 0 ] || cat /proc/self/fd/$((2+N))`)
			s.cmd.Env = nil
			m.Env = append(m.Env, fmt.Sprintf("N=%d", n), "PATH=/usr/bin:/bin")
			if err := Send(s.socket, m); err != nil {
				t.Fatal(err)
			}
			got, err := s.end()
			want := fmt.Sprintf("%s\n1,two words\nstandard input\n%d\n", dir, 4+n) // ls has one of its own, for the directory
			if n > 0 {
				want += fmt.Sprintf("file %d", n-1)
			}
			if err != nil || got != want {
				t.Errorf("got %q, %v; want %q", got, err, want)
			}
		})
	}
}

// TestFails: each step that fails is named.
func TestFails(t *testing.T) {
	noNewPrivileges(t)
	good := Message{Program: "/bin/true", Dir: "/", Filter: allowAll}
	for _, tt := range []struct {
		name   string
		change func(m *Message)
		send   func(s *started, m Message) error
		want   string
		status int
	}{
		{name: "nothing sent", send: func(*started, Message) error { return nil }, want: "receive what the monitor inherits", status: int(unix.EPROTO)},
		{name: "cut off", send: func(s *started, m Message) error {
			b, err := m.encode()
			if err == nil {
				err = send(s.socket, b[:len(b)-1], []int{int(m.Stdin.Fd())})
			}
			return err
		}, want: "receive what the monitor inherits", status: int(unix.EPROTO)},
		{name: "a descriptor less", send: func(s *started, m Message) error {
			b, err := m.encode()
			if err == nil {
				_, err = s.socket.Write(b)
			}
			return err
		}, want: "receive what the monitor inherits", status: int(unix.EPROTO)},
		{name: "no directory", change: func(m *Message) { m.Dir = "/no/such" }, want: "enter the machine's directory", status: int(unix.ENOENT)},
		{name: "no filter", change: func(m *Message) { m.Filter = nil }, want: "install the seccomp filter", status: int(unix.EINVAL)},
		{name: "no monitor", change: func(m *Message) { m.Program = "/no/such" }, want: "execute the monitor", status: int(unix.ENOENT)},
	} {
		t.Run(tt.name, func(t *testing.T) {
			m := good
			m.Stdin = file(t, "")
			if tt.change != nil {
				tt.change(&m)
			}
			s := start(t)
			do := tt.send
			if do == nil {
				do = func(s *started, m Message) error { return Send(s.socket, m) }
			}
			if err := do(s, m); err != nil {
				t.Fatal(err)
			}
			got, err := s.end()
			if !strings.Contains(got, "failed to "+tt.want) || s.cmd.ProcessState.ExitCode() != tt.status {
				t.Errorf("it said %q and ended with %v, want %q and status %d", got, err, tt.want, tt.status)
			}
		})
	}
}

// TestOpenDescriptors: with a descriptor open that the jailer should have closed, the monitor's would have other numbers.
func TestOpenDescriptors(t *testing.T) {
	noNewPrivileges(t)
	path := filepath.Join(t.TempDir(), "stage")
	if err := os.WriteFile(path, Program(), 0o700); err != nil {
		t.Fatal(err)
	}
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	ours, theirs := os.NewFile(uintptr(fds[0]), "ours"), os.NewFile(uintptr(fds[1]), "theirs")
	defer theirs.Close()
	cmd := exec.Command(path)
	cmd.Stdin, cmd.ExtraFiles = theirs, []*os.File{file(t, "")}
	if err := Send(ours, Message{Program: "/bin/true", Dir: "/", Filter: allowAll, Stdin: file(t, "")}); err != nil {
		t.Fatal(err)
	}
	ours.Close()
	if out, err := cmd.CombinedOutput(); err == nil || !bytes.Contains(out, []byte("receive")) {
		t.Errorf("it said %q and ended with %v, want a refusal", out, err)
	}
}

func TestTooLong(t *testing.T) {
	if _, err := (Message{Dir: strings.Repeat("d", room)}).encode(); err == nil {
		t.Error("a message that has no room is sent")
	}
}

// allowAll is a filter of one instruction.
var allowAll = []unix.SockFilter{{Code: unix.BPF_RET | unix.BPF_K, K: 0x7fff0000}}

// noNewPrivileges is for this process, as for those that confine starts: without it only root may install filters.
func noNewPrivileges(t *testing.T) {
	t.Helper()
	if err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); err != nil {
		t.Fatal(err)
	}
}

func file(t *testing.T, text string) *os.File {
	t.Helper()
	fd, err := unix.MemfdCreate("file", unix.MFD_CLOEXEC)
	if err != nil {
		t.Fatal(err)
	}
	f := os.NewFile(uintptr(fd), "file")
	t.Cleanup(func() { f.Close() })
	if _, err := f.WriteString(text); err != nil {
		t.Fatal(err)
	}
	if _, err := f.Seek(0, io.SeekStart); err != nil {
		t.Fatal(err)
	}
	return f
}
