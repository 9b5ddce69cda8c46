package server

import (
	"context"
	"net"
	"unsafe"

	"golang.org/x/sys/unix"
)

type peerKey struct{}

// peer is a process at the other end of a Unix socket, as it was when it connected.
type peer struct {
	uid    uint32
	groups []uint32 // its own and the supplementary ones
}

// withPeer notes who is at the other end of a Unix socket. Who can't be found out is nobody.
func withPeer(ctx context.Context, c net.Conn) context.Context {
	conn, ok := c.(*net.UnixConn)
	if !ok {
		return ctx
	}
	raw, err := conn.SyscallConn()
	if err != nil {
		return ctx
	}
	var p peer
	var failed error
	err = raw.Control(func(fd uintptr) {
		var cred *unix.Ucred
		if cred, failed = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED); failed != nil {
			return
		}
		p = peer{uid: cred.Uid, groups: append(peerGroups(fd), cred.Gid)}
	})
	if err != nil || failed != nil {
		return ctx
	}
	return context.WithValue(ctx, peerKey{}, p)
}

// peerGroups are the supplementary groups; none when the kernel does not tell: then only the process' own group counts.
func peerGroups(fd uintptr) []uint32 {
	groups := make([]uint32, 64)
	for {
		size := uint32(len(groups) * 4)
		_, _, errno := unix.Syscall6(unix.SYS_GETSOCKOPT, fd, unix.SOL_SOCKET, unix.SO_PEERGROUPS,
			uintptr(unsafe.Pointer(&groups[0])), uintptr(unsafe.Pointer(&size)), 0)
		switch {
		case errno == unix.ERANGE && int(size) > len(groups)*4: // it says how many there are
			groups = make([]uint32, size/4)
		case errno != 0:
			return nil
		default:
			return groups[:size/4]
		}
	}
}
