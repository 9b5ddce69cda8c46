package confine

import (
	"encoding/binary"
	"os"
	"os/exec"
	"runtime"
	"syscall"
	"testing"
	"unsafe"

	"golang.org/x/net/bpf"
	"golang.org/x/sys/unix"
)

// TestFilter asks the filter about calls.
func TestFilter(t *testing.T) {
	list, err := instructions()
	if err != nil {
		t.Fatal(err)
	}
	vm, err := bpf.NewVM(list)
	if err != nil {
		t.Fatal(err)
	}
	const (
		allow     = unix.SECCOMP_RET_ALLOW
		kill      = unix.SECCOMP_RET_KILL_PROCESS
		eperm     = unix.SECCOMP_RET_ERRNO | uint32(unix.EPERM)
		enosys    = unix.SECCOMP_RET_ERRNO | uint32(unix.ENOSYS)
		x32       = 0x40000000
		newThread = 0x3d0f00 // what C libraries give clone for a thread
	)
	for _, tt := range []struct {
		name   string
		arch   uint32
		number uint32
		first  uint64
		want   uint32
	}{
		{"read", unix.AUDIT_ARCH_X86_64, unix.SYS_READ, 0, allow},
		{"unshare", unix.AUDIT_ARCH_X86_64, unix.SYS_UNSHARE, 0, eperm},
		{"unshare of i386", unix.AUDIT_ARCH_I386, 310, 0, kill},
		{"read of i386", unix.AUDIT_ARCH_I386, 3, 0, kill},
		{"arm64", unix.AUDIT_ARCH_AARCH64, unix.SYS_READ, 0, kill},
		{"unshare of x32", unix.AUDIT_ARCH_X86_64, x32 | unix.SYS_UNSHARE, 0, enosys},
		{"read of x32", unix.AUDIT_ARCH_X86_64, x32 | unix.SYS_READ, 0, enosys},
		{"thread", unix.AUDIT_ARCH_X86_64, unix.SYS_CLONE, newThread, allow},
		{"process", unix.AUDIT_ARCH_X86_64, unix.SYS_CLONE, uint64(unix.SIGCHLD), allow},
		{"user namespace", unix.AUDIT_ARCH_X86_64, unix.SYS_CLONE, unix.CLONE_NEWUSER | uint64(unix.SIGCHLD), eperm},
		{"mount namespace", unix.AUDIT_ARCH_X86_64, unix.SYS_CLONE, unix.CLONE_NEWNS, eperm},
		{"network and pid namespace", unix.AUDIT_ARCH_X86_64, unix.SYS_CLONE, unix.CLONE_NEWNET | unix.CLONE_NEWPID | newThread, eperm},
		{"control group namespace", unix.AUDIT_ARCH_X86_64, unix.SYS_CLONE, unix.CLONE_NEWCGROUP, eperm},
		{"name and ipc namespace", unix.AUDIT_ARCH_X86_64, unix.SYS_CLONE, unix.CLONE_NEWUTS | unix.CLONE_NEWIPC, eperm},
		{"clone that looks like a socket", unix.AUDIT_ARCH_X86_64, unix.SYS_CLONE, unix.SYS_SOCKET, allow},
		{"clone3", unix.AUDIT_ARCH_X86_64, unix.SYS_CLONE3, 0, enosys},
		{"Unix socket", unix.AUDIT_ARCH_X86_64, unix.SYS_SOCKET, unix.AF_UNIX, allow},
		{"netlink socket", unix.AUDIT_ARCH_X86_64, unix.SYS_SOCKET, unix.AF_NETLINK, eperm},
		{"Unix socket with more bits", unix.AUDIT_ARCH_X86_64, unix.SYS_SOCKET, 1<<32 | unix.AF_UNIX, eperm},
	} {
		t.Run(tt.name, func(t *testing.T) {
			got, err := vm.Run(call(tt.arch, tt.number, tt.first))
			if err != nil || uint32(got) != tt.want {
				t.Errorf("got %#x, %v, want %#x", uint32(got), err, tt.want)
			}
		})
	}
}

// call is a struct seccomp_data as the library's machine reads it: its words are big-endian, their order is the kernel's.
func call(arch, number uint32, first uint64) []byte {
	b := make([]byte, 64)
	for at, word := range map[int]uint32{0: number, 4: arch, 16: uint32(first), 20: uint32(first >> 32)} {
		binary.BigEndian.PutUint32(b[at:], word)
	}
	return b
}

// oldCallVariable makes this test's binary call the kernel as programs of 32 bits do.
const oldCallVariable = "FORKD_CONFINE_OLD_CALL"

// oldCall is getpid by int 0x80.
func oldCall() error {
	code, err := unix.Mmap(-1, 0, 4096, unix.PROT_READ|unix.PROT_WRITE|unix.PROT_EXEC, unix.MAP_ANON|unix.MAP_PRIVATE)
	if err != nil {
		return err
	}
	copy(code, []byte{0xb8, 20, 0, 0, 0, 0xcd, 0x80, 0xc3}) // mov eax, 20; int 0x80; ret
	entry := unsafe.Pointer(unsafe.SliceData(code))
	function := unsafe.Pointer(&entry) // a function's value is a pointer to its entry
	(*(*func())(unsafe.Pointer(&function)))()
	runtime.KeepAlive(entry)
	return nil
}

// TestOldCallsEnd: a call of another architecture ends the program.
func TestOldCallsEnd(t *testing.T) {
	c := newTestCell(t)
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	outside := exec.Command(self)
	outside.Env = []string{oldCallVariable + "=1"}
	if out, err := outside.CombinedOutput(); err != nil {
		t.Skipf("this kernel has no such calls: %v: %.200s", err, out)
	}
	null, err := os.OpenFile(os.DevNull, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer null.Close()
	p, uid, err := c.Start(Command{Env: outside.Env, Files: []*os.File{null, null, null}})
	if err != nil {
		t.Fatal(err)
	}
	defer c.users.Release(uid)
	state, err := p.Wait()
	if err != nil {
		t.Fatal(err)
	}
	if status, ok := state.Sys().(syscall.WaitStatus); !ok || status.Signal() != syscall.SIGSYS {
		t.Errorf("it ended with %s, want SIGSYS", state)
	}
}
