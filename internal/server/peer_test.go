package server

import (
	"context"
	"errors"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"runtime"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/forkd/forkd/internal/keys"
)

// dialAs connects to a Unix socket as somebody else: from a thread of its own, which is not used again.
func dialAs(path string, uid int, groups ...uint32) (net.Conn, error) {
	type result struct {
		fd  int
		err error
	}
	results := make(chan result)
	go func() {
		runtime.LockOSThread() // and never unlocked: the thread ends with this goroutine
		fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			results <- result{0, err}
			return
		}
		var list unsafe.Pointer
		if len(groups) > 0 {
			list = unsafe.Pointer(&groups[0])
		}
		for _, call := range [][4]uintptr{{unix.SYS_SETGROUPS, uintptr(len(groups)), uintptr(list)}, {unix.SYS_SETRESGID, uintptr(uid), uintptr(uid), uintptr(uid)},
			{unix.SYS_SETRESUID, uintptr(uid), uintptr(uid), uintptr(uid)}} {
			if _, _, errno := unix.RawSyscall(call[0], call[1], call[2], call[3]); errno != 0 {
				results <- result{fd, errno}
				return
			}
		}
		runtime.KeepAlive(groups)
		results <- result{fd, unix.Connect(fd, &unix.SockaddrUnix{Name: path})}
	}()
	r := <-results
	if r.err != nil {
		_ = unix.Close(r.fd)
		return nil, r.err
	}
	f := os.NewFile(uintptr(r.fd), path)
	defer f.Close()
	return net.FileConn(f)
}

// The socket is open to root, and to the group that it was given to: the kernel keeps others away, and who gets in all the same is refused.
func TestSocketGroup(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root: it becomes other users")
	}
	t.Parallel()
	dir, err := os.MkdirTemp("", "fks") // others must get to the socket
	if err != nil {
		t.Fatal(err)
	}
	defer os.RemoveAll(dir)
	if err := os.Chmod(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	const group, user = 42420, 42421
	path := filepath.Join(dir, "s")
	l, err := ListenUnix(path, group)
	if err != nil {
		t.Fatal(err)
	}
	f := newFixture(t, func(c *Config) { c.Socket = SocketAccess{Group: group, Scope: keys.Read} })
	ctx, stop := context.WithCancel(t.Context())
	served := make(chan error, 1)
	go func() { served <- f.server.Serve(ctx, l, nil, 0) }()
	defer func() {
		stop()
		if err := <-served; err != nil {
			t.Error(err)
		}
	}()
	ask := func(method string, uid int, groups ...uint32) int {
		t.Helper()
		conn, err := dialAs(path, uid, groups...)
		if errors.Is(err, unix.EACCES) {
			return 0
		}
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		req, _ := http.NewRequest(method, "http://forkd/v1/sandboxes/sb1", nil)
		if err := req.Write(conn); err != nil {
			t.Fatal(err)
		}
		return readAnswer(t, conn, req).status
	}
	check := func(what string, got, want int) {
		t.Helper()
		if got != want {
			t.Errorf("%s: %d, want %d (0: the kernel refuses)", what, got, want)
		}
	}
	check("root", ask("DELETE", 0), 204)
	check("a member looks", ask("GET", user, 7, group), 200)
	check("a member by its own group", ask("GET", group), 200)
	check("a member wants more", ask("DELETE", user, group), 403)
	check("somebody else", ask("GET", user, 7), 0)
	if err := os.Chmod(path, 0o666); err != nil {
		t.Fatal(err)
	}
	check("somebody else, who gets in", ask("GET", user, 7), 401)
}
