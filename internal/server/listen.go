package server

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"
)

// maxSocketPath is what the kernel takes for the path of a Unix socket, without the final NUL byte.
const maxSocketPath = 107

// ListenUnix listens on a socket that only this user may connect to, and with a group its members. A socket that a dead daemon left is replaced;
// one on which somebody answers is not.
func ListenUnix(path string, group ...int) (net.Listener, error) {
	if len(path) > maxSocketPath {
		return nil, fmt.Errorf("socket %s: the path has %d bytes, at most %d are possible: use a shorter --run or --socket", path, len(path), maxSocketPath)
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		return nil, fmt.Errorf("directory of the socket: %w", err)
	}
	if conn, err := net.DialTimeout("unix", path, time.Second); err == nil {
		conn.Close()
		return nil, fmt.Errorf("socket %s: another daemon answers there: stop it, or use another --socket", path)
	}
	if info, err := os.Lstat(path); err == nil {
		if info.Mode().Type() != fs.ModeSocket {
			return nil, fmt.Errorf("socket %s: there is something else at this path: remove it, or use another --socket", path)
		}
		if err := os.Remove(path); err != nil {
			return nil, fmt.Errorf("remove a dead daemon's socket: %w", err)
		}
	}
	// The mode must be right from the first moment on: a chmod of the path afterwards leaves a gap. Linux gives the path the
	// mode that the socket has when it is bound.
	private := net.ListenConfig{Control: func(_, _ string, conn syscall.RawConn) error {
		var chmodErr error
		err := conn.Control(func(fd uintptr) { chmodErr = unix.Fchmod(int(fd), 0o600) })
		return errors.Join(err, chmodErr)
	}}
	l, err := private.Listen(context.Background(), "unix", path)
	if err != nil {
		return nil, fmt.Errorf("socket %s: %w", path, err)
	}
	for _, gid := range group {
		if err := errors.Join(os.Chown(path, -1, gid), os.Chmod(path, 0o660)); err != nil { // in this order: nobody else gets in between
			return nil, errors.Join(fmt.Errorf("socket %s: open it to group %d: %w", path, gid, err), l.Close())
		}
	}
	return l, nil
}

// Protection is what keeps others from a listener that they can reach.
type Protection struct {
	Keys bool // a key or the token is needed
	TLS  bool // nobody on the way reads along
}

// ListenTCP listens on host:port. Unless it is fully protected only addresses of this host itself are possible.
func ListenTCP(address string, has Protection) (net.Listener, error) {
	host, _, err := net.SplitHostPort(address)
	if err != nil {
		return nil, fmt.Errorf("listen address %q: use host:port, as in 127.0.0.1:8889", address)
	}
	if !isLoopback(host) && !has.Keys {
		return nil, fmt.Errorf("listen address %s: others can reach it, and there is no key: make one with `forkd key create` on the socket, or give --token-file FILE, or listen on 127.0.0.1", address)
	}
	if !isLoopback(host) && !has.TLS {
		return nil, fmt.Errorf("listen address %s: others can reach it and read along: give --tls-cert and --tls-key, or listen on 127.0.0.1 behind something that speaks TLS", address)
	}
	l, err := net.Listen("tcp", address)
	if err != nil {
		return nil, fmt.Errorf("listen address %s: %w", address, err)
	}
	return l, nil
}

func isLoopback(host string) bool {
	if host == "localhost" {
		return true
	}
	ip := net.ParseIP(strings.Trim(host, "[]"))
	return ip != nil && ip.IsLoopback()
}

// Serve answers requests on both listeners (either may be nil) until ctx ends. Then nothing new is accepted, what is being
// answered gets the grace period to finish, and what is left is cancelled.
func (s *Server) Serve(ctx context.Context, unixListener, tcpListener net.Listener, grace time.Duration) error {
	var group errgroup.Group
	var servers []*http.Server
	start := func(l net.Listener, trusted bool) {
		if l == nil {
			return
		}
		srv := &http.Server{
			Handler:           s.Handler(trusted),
			ReadHeaderTimeout: 10 * time.Second,
			IdleTimeout:       2 * time.Minute,
			MaxHeaderBytes:    64 << 10,
			BaseContext:       func(net.Listener) context.Context { return s.life },
			ConnContext:       withPeer,
			ErrorLog:          slog.NewLogLogger(s.Log.Handler(), slog.LevelWarn),
		}
		servers = append(servers, srv)
		group.Go(func() error {
			if err := srv.Serve(l); !errors.Is(err, http.ErrServerClosed) {
				return fmt.Errorf("serve %s: %w", l.Addr(), err)
			}
			return nil
		})
	}
	start(unixListener, true)
	start(tcpListener, false)

	failed := make(chan error, 1)
	go func() { failed <- group.Wait() }()
	select {
	case err := <-failed:
		s.shutdown(servers, 0)
		return err
	case <-ctx.Done():
	}
	s.drain()
	s.Events.Close() // who listens would listen through all of the grace period
	s.shutdown(servers, grace)
	return <-failed
}

// shutdown ends the servers: politely for the grace period, then by cancelling what still runs.
func (s *Server) shutdown(servers []*http.Server, grace time.Duration) {
	ctx, cancel := context.WithTimeout(context.Background(), grace)
	defer cancel()
	stopCancelling := context.AfterFunc(ctx, func() { s.stop(errStopping) })
	var group errgroup.Group
	for _, srv := range servers {
		group.Go(func() error {
			if srv.Shutdown(ctx) == nil {
				return nil
			}
			// Cancelled handlers still write an answer that says so.
			last, cancel := context.WithTimeout(context.Background(), 5*time.Second)
			defer cancel()
			if srv.Shutdown(last) != nil {
				return srv.Close()
			}
			return nil
		})
	}
	_ = group.Wait()
	stopCancelling()
	s.stop(errStopping)
}
