package hostnet

import (
	"context"
	"fmt"
	"net"
	"os"

	"github.com/mdlayher/socket"
	"golang.org/x/sys/unix"

	"github.com/forkd/forkd/internal/netns"
)

// Dial connects to a port of the guest. Only the socket is made in the namespace, where it stays: to wait there would take a thread for each
// connection that a guest leaves waiting.
func (s *Slot) Dial(ctx context.Context, port int) (net.Conn, error) {
	c, err := s.newSocket()
	if err != nil {
		return nil, err
	}
	defer func() { _ = c.Close() }() // what is returned is another one
	if _, err := c.Connect(ctx, &unix.SockaddrInet4{Addr: guestAddr.As4(), Port: port}); err != nil {
		return nil, err
	}
	return asNetConn(c)
}

// asNetConn is a connection of its own to what c is connected to.
func asNetConn(c *socket.Conn) (net.Conn, error) {
	raw, err := c.SyscallConn()
	if err != nil {
		return nil, err
	}
	own, failed := -1, error(nil)
	if err := raw.Control(func(fd uintptr) { own, failed = unix.FcntlInt(fd, unix.F_DUPFD_CLOEXEC, 0) }); err != nil {
		return nil, err
	}
	if failed != nil {
		return nil, fmt.Errorf("connection to a guest: %w", failed)
	}
	f := os.NewFile(uintptr(own), "guest")
	defer func() { _ = f.Close() }() // FileConn has another one
	conn, err := net.FileConn(f)
	if err != nil {
		return nil, fmt.Errorf("connection to a guest: %w", err)
	}
	return conn, nil
}

// newSocket makes a socket of TCP in the slot's namespace.
func (s *Slot) newSocket() (c *socket.Conn, err error) {
	err = netns.Do(s.ns, func() error {
		fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
		if err != nil {
			return fmt.Errorf("socket in a namespace: %w", err)
		}
		if c, err = socket.New(fd, "guest"); err != nil {
			_ = unix.Close(fd)
		}
		return err
	})
	return c, err
}
