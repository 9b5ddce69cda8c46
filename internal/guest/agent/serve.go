package agent

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"sync"

	"golang.org/x/sys/unix"
)

// Serve runs an agent on l until ctx ends: New, Agent.Serve and Close. Connections are served one after the other, like those of a
// virtio-serial port: a second one waits until the first has ended.
func Serve(ctx context.Context, l net.Listener, opt Options) error {
	a, err := New(opt)
	if err != nil {
		return err
	}
	return errors.Join(a.Serve(ctx, l), a.Close())
}

// Serve serves the connections of l, which must be a Unix or TCP listener, until ctx ends; that is no error. It leaves l open.
func (a *Agent) Serve(ctx context.Context, l net.Listener) error {
	return a.serveListener(ctx, l, func(l listener) transport { return &l })
}

// ServeStreams serves the connections of l as those of a vsock listener: streams that outlive their connections. It is for stand-ins of a
// monitor.
func (a *Agent) ServeStreams(ctx context.Context, l net.Listener) error {
	return a.serveListener(ctx, l, func(l listener) transport { return &streams{listener: l} })
}

func (a *Agent) serveListener(ctx context.Context, l net.Listener, as func(listener) transport) error {
	f, err := fileOf(l)
	if err != nil {
		return fmt.Errorf("agent listener: %w", err)
	}
	defer f.Close()
	fd := int(f.Fd())
	if err := unix.SetNonblock(fd, true); err != nil {
		return fmt.Errorf("agent listener: %w", err)
	}
	return a.run(ctx, as(listener{fd: fd, conn: -1}))
}

// ServeConn serves one connection until it or ctx ends; neither is an error. It closes conn.
func (a *Agent) ServeConn(ctx context.Context, conn net.Conn) error {
	fd, wait, err := descriptor(conn)
	if err != nil {
		return fmt.Errorf("agent connection: %w", err)
	}
	defer wait()
	err = a.run(ctx, &single{fd: fd})
	if errors.Is(err, io.EOF) {
		return nil
	}
	return err
}

// run runs the loop until ctx ends.
func (a *Agent) run(ctx context.Context, t transport) error {
	var wg sync.WaitGroup
	wg.Add(1)
	end := context.AfterFunc(ctx, func() {
		defer wg.Done()
		_, _ = unix.Write(a.stop, []byte{1, 0, 0, 0, 0, 0, 0, 0})
	})
	err := a.loop(t)
	if !end() {
		wg.Wait()
	}
	var drain [8]byte
	_, _ = unix.Read(a.stop, drain[:])
	if errors.Is(err, errStopped) {
		return nil
	}
	return err
}

// fileOf duplicates the descriptor of a listener or connection.
func fileOf(x any) (*os.File, error) {
	filer, ok := x.(interface{ File() (*os.File, error) })
	if !ok {
		return nil, fmt.Errorf("%T has no descriptor; use a Unix or TCP socket", x)
	}
	return filer.File()
}

// descriptor turns conn into a blocking descriptor that belongs to the caller. A connection without one, such as net.Pipe's, is copied
// to and from a socket pair; wait returns when the copying has ended.
func descriptor(conn net.Conn) (fd int, wait func(), err error) {
	if f, err := fileOf(conn); err == nil {
		defer f.Close()
		fd, err := unix.FcntlInt(f.Fd(), unix.F_DUPFD_CLOEXEC, 0) // Fd makes it blocking
		conn.Close()
		return fd, func() {}, err
	}
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return -1, nil, os.NewSyscallError("socketpair", err)
	}
	f := os.NewFile(uintptr(pair[1]), "agent connection")
	inner, err := net.FileConn(f)
	f.Close()
	if err != nil {
		unix.Close(pair[0])
		return -1, nil, err
	}
	var wg sync.WaitGroup
	for _, c := range [][2]net.Conn{{conn, inner}, {inner, conn}} {
		wg.Go(func() {
			_, _ = io.Copy(c[0], c[1])
			conn.Close()
			inner.Close()
		})
	}
	return pair[0], wg.Wait, nil
}
