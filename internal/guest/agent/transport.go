package agent

import (
	"io"
	"os"

	"golang.org/x/sys/unix"
)

// transport gives the loop its connections, one at a time.
type transport interface {
	// connect returns the connection's descriptor, -1 when the host is not there, or an error when it can't come any more. goesOn says that
	// the connection goes on where the one before broke, of which so many bytes were received; o then writes to it already.
	connect(o *outlet, received uint64) (fd int, goesOn bool, err error)
	// waitFD becomes readable when connect should be tried again.
	waitFD() int
	// hangup says that the connection ended and must not be written to any more.
	hangup(o *outlet)
	// broke says that the connection broke. When it returns true, what was said on it goes on over the next one.
	broke(o *outlet) bool
}

// port is a virtio-serial port. While no host is connected its read and its poll return at once, so the change is awaited with an
// edge-triggered epoll.
type port struct {
	fd, ep int
}

func openPort(path string) (*port, error) {
	fd, err := unix.Open(path, unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, &os.PathError{Op: "open", Path: path, Err: err}
	}
	ep, err := unix.EpollCreate1(unix.EPOLL_CLOEXEC)
	if err != nil {
		unix.Close(fd)
		return nil, os.NewSyscallError("epoll_create1", err)
	}
	return &port{fd: fd, ep: ep}, nil
}

func (p *port) connect(*outlet, uint64) (int, bool, error) {
	// Events are taken before the state is looked at: a host that comes in between makes a new event.
	var evs [1]unix.EpollEvent
	_, _ = unix.EpollWait(p.ep, evs[:], 0)
	fds := []unix.PollFd{{Fd: int32(p.fd), Events: unix.POLLIN}}
	if n, err := unix.Poll(fds, 0); err == nil && n > 0 && fds[0].Revents&unix.POLLHUP != 0 {
		p.watch()
		return -1, false, nil
	}
	// Another edge-triggered event for each buffer that arrives would cost a wake-up: watch only while the host is away.
	_ = unix.EpollCtl(p.ep, unix.EPOLL_CTL_DEL, p.fd, nil)
	return p.fd, false, nil
}

func (p *port) watch() {
	ev := unix.EpollEvent{Events: unix.EPOLLIN | unix.EPOLLOUT | unix.EPOLLET, Fd: int32(p.fd)}
	_ = unix.EpollCtl(p.ep, unix.EPOLL_CTL_ADD, p.fd, &ev)
}

func (p *port) waitFD() int { return p.ep }

// hangup leaves the descriptor open: a write that is under way sleeps in the kernel until a host is back, and the loop must not wait for it.
func (p *port) hangup(*outlet) {}

func (p *port) broke(*outlet) bool { return false }

// listener accepts connections of a stream socket.
type listener struct {
	fd, conn int
}

func (l *listener) connect(*outlet, uint64) (int, bool, error) {
	fd, err := l.accept()
	return fd, false, err
}

// accept returns -1 when nobody is there.
func (l *listener) accept() (int, error) {
	fd, _, err := unix.Accept4(l.fd, unix.SOCK_CLOEXEC)
	switch err {
	case nil:
		l.conn = fd
		return fd, nil
	case unix.EAGAIN, unix.EINTR, unix.ECONNABORTED:
		return -1, nil
	}
	return -1, os.NewSyscallError("accept", err)
}

func (l *listener) waitFD() int { return l.fd }

func (l *listener) hangup(o *outlet) {
	closeSocket(o, l.conn)
	l.conn = -1
}

func (l *listener) broke(*outlet) bool { return false }

// closeSocket ends writers before the descriptor's number can be given to something else.
func closeSocket(o *outlet, fd int) {
	_ = unix.Shutdown(fd, unix.SHUT_RDWR)
	o.connect(-1)
	unix.Close(fd)
}

// single is one connection that does not come again.
type single struct {
	fd   int
	used bool
}

func (s *single) connect(*outlet, uint64) (int, bool, error) {
	if s.used {
		return -1, false, io.EOF
	}
	s.used = true
	return s.fd, false, nil
}

func (s *single) waitFD() int        { return -1 }
func (s *single) hangup(o *outlet)   { closeSocket(o, s.fd) }
func (s *single) broke(*outlet) bool { return false }
