package lab

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"

	"github.com/forkd/forkd/test/lab/guest"
)

// ErrUnavailable is part of errors that say why this host can't have a lab.
var ErrUnavailable = errors.New("no lab on this host")

// DefaultMemMiB is the memory of a lab.
const DefaultMemMiB = 5 << 10

// Options say what lab to open.
type Options struct {
	Cache  string    // directory for what is built once; may be deleted at any time
	MemMiB int       // of a lab that is booted; 0: DefaultMemMiB
	Disk   string    // a directory that a lab that is booted has as a read-only disk: the fast way in for what is large; see Lab.Disk
	Log    io.Writer // gets a line for each step that takes time; nil: none
}

// Lab is a lab that is up.
type Lab struct {
	socket string // its abstract address
	owner  *owner // nil: it is another process's
	Booted time.Duration
	Disk   string // where the directory of Options.Disk is over there; empty: nowhere, put it there
}

// withDefaults fills in what is not said.
func (o Options) withDefaults() (Options, error) {
	cache, err := filepath.Abs(o.Cache)
	if err != nil {
		return o, fmt.Errorf("cache of the lab: %w", err)
	}
	o.Cache = filepath.Join(cache, "lab")
	if o.MemMiB == 0 {
		o.MemMiB = DefaultMemMiB
	}
	if o.Log == nil {
		o.Log = io.Discard
	}
	return o, nil
}

// Available says why Open would find no lab and could boot none on this host: an error that is ErrUnavailable.
func Available(ctx context.Context, o Options) error {
	o, err := o.withDefaults()
	if err != nil {
		return err
	}
	if c, err := (&Lab{socket: address(o.Cache)}).dial(ctx); err == nil {
		return c.Close()
	}
	return available(o)
}

// Open returns the lab that is up, or boots one, building it first if the cache has none. Whoever boots one keeps it: it ends with Close,
// with ctx or with the process, whichever comes first.
func Open(ctx context.Context, o Options) (*Lab, error) {
	o, err := o.withDefaults()
	if err != nil {
		return nil, err
	}
	l := &Lab{socket: address(o.Cache)}
	for {
		if c, err := l.dial(ctx); err == nil {
			c.Close()
			fmt.Fprintln(o.Log, "lab: using the one that is up")
			return l, nil
		}
		ln, err := net.Listen("unix", l.socket)
		if errors.Is(err, unix.EADDRINUSE) {
			continue // another process was faster, or its lab ended just now
		}
		if err != nil {
			return nil, fmt.Errorf("address of the lab: %w", err)
		}
		begin := time.Now()
		if l.owner, err = boot(ctx, o, ln.(*net.UnixListener)); err != nil {
			ln.Close()
			return nil, err
		}
		l.Booted = time.Since(begin)
		if o.Disk != "" {
			l.Disk = guest.DiskDir
		}
		return l, nil
	}
}

// address names the lab of a cache and a user. It is abstract: there is no file that could be left, and to bind it is to own the lab.
func address(cache string) string {
	return fmt.Sprintf("@forkd-lab-%x", sha256.Sum256(fmt.Appendf(nil, "%d %s", os.Geteuid(), cache)))[:32]
}

// dial connects to the lab and makes sure that it is this user's.
func (l *Lab) dial(ctx context.Context) (*net.UnixConn, error) {
	c, err := (&net.Dialer{}).DialContext(ctx, "unix", l.socket)
	if err != nil {
		return nil, err
	}
	u := c.(*net.UnixConn)
	if err := samePeer(u); err != nil {
		u.Close()
		return nil, err
	}
	return u, nil
}

// samePeer refuses a peer of another user: abstract addresses have no permissions.
func samePeer(c *net.UnixConn) error {
	raw, err := c.SyscallConn()
	if err != nil {
		return err
	}
	var cred *unix.Ucred
	var credErr error
	if err := raw.Control(func(fd uintptr) { cred, credErr = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED) }); err != nil {
		return err
	}
	if credErr != nil {
		return credErr
	}
	if int(cred.Uid) != os.Geteuid() {
		return fmt.Errorf("the lab's peer is user %d, not %d", cred.Uid, os.Geteuid())
	}
	return nil
}

// Own says whether the lab ends with this process.
func (l *Lab) Own() bool { return l.owner != nil }

// Close ends the lab if it is our own. Commands of other processes end first, unless they take longer than ctx.
func (l *Lab) Close(ctx context.Context) error {
	if l.owner == nil {
		return nil
	}
	return l.owner.close(ctx)
}
