package lab

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/forkd/forkd/test/lab/wire"
)

const (
	ports     = 4                // commands that can run at a time
	bootLimit = 4 * time.Minute  // from the start of QEMU to the first command's end
	killLimit = 30 * time.Second // for a command to end that was killed
)

// owner is what a process has that keeps a lab: QEMU, and the server at which commands arrive.
type owner struct {
	log    io.Writer
	ln     *net.UnixListener
	vm     *machine
	ports  chan *port // those that are free
	cancel context.CancelCauseFunc
	ctx    context.Context // ends with the lab

	accepting sync.WaitGroup
	sessions  sync.WaitGroup
}

// port is a virtio port of the lab.
type port struct {
	conn net.Conn
	in   *bufio.Reader
	mail mailbox
}

// mailbox is a port's part of the mailbox disk.
type mailbox struct {
	disk  *os.File // nil: there is none
	start int64    // of the part
	next  int64    // to be written, from start
}

// send sends a client's frame to the guest. Only one goroutine sends at a time.
func (p *port) send(f wire.Frame) error {
	if f.Kind != wire.Stdin || len(f.Payload) < wire.MailFrom || p.mail.disk == nil {
		return wire.Write(p.conn, f.Kind, f.Payload)
	}
	n := int64(len(f.Payload))
	if p.mail.next+n > wire.MailRegion {
		p.mail.next = 0
	}
	place := wire.Place{Offset: p.mail.start + p.mail.next, Length: len(f.Payload)}
	if _, err := p.mail.disk.WriteAt(f.Payload, place.Offset); err != nil {
		return fmt.Errorf("mailbox: %w", err)
	}
	p.mail.next += (n + wire.MailAlign - 1) / wire.MailAlign * wire.MailAlign
	return wire.WriteJSON(p.conn, wire.Fetch, place)
}

// boot builds what is missing, starts QEMU and returns when the lab has run a first command. On an error nothing is left but ln.
func boot(ctx context.Context, o Options, ln *net.UnixListener) (_ *owner, err error) {
	if err := available(o); err != nil {
		return nil, err
	}
	files, err := build(ctx, o)
	if err != nil {
		return nil, err
	}
	w := &owner{log: o.Log, ln: ln, ports: make(chan *port, ports)}
	w.ctx, w.cancel = context.WithCancelCause(ctx)
	begin := time.Now()
	var conns []net.Conn
	mail, err := newMail()
	if err != nil {
		return nil, err
	}
	if o.Disk != "" {
		if files.disk, err = packDisk(ctx, o); err != nil {
			return nil, errors.Join(fmt.Errorf("disk for the lab: %w", err), mail.Close())
		}
		defer files.disk.Close()
	}
	if w.vm, conns, err = startMachine(w.ctx, o, files, mail); err != nil {
		w.cancel(err)
		return nil, errors.Join(fmt.Errorf("start the lab: %w", err), mail.Close())
	}
	for i, c := range conns {
		w.ports <- &port{conn: c, in: bufio.NewReaderSize(c, 2*wire.MaxPayload), mail: mailbox{disk: mail, start: int64(i) * wire.MailRegion}}
	}
	go func() {
		<-w.vm.done
		w.cancel(fmt.Errorf("the lab has ended: %w", w.vm.err))
	}()
	w.accepting.Go(w.accept)
	if err := w.first(); err != nil {
		return nil, errors.Join(err, w.end(), fmt.Errorf("its console:\n%s", w.vm.console.String()))
	}
	fmt.Fprintf(o.Log, "lab: up in %.1f s\n", time.Since(begin).Seconds())
	return w, nil
}

// first waits until the lab runs a command.
func (w *owner) first() error {
	ctx, cancel := context.WithTimeoutCause(w.ctx, bootLimit, fmt.Errorf("it did not boot within %v", bootLimit))
	defer cancel()
	l := &Lab{socket: w.ln.Addr().String()}
	code, err := l.Run(ctx, Command{Args: []string{"true"}})
	if err == nil && code != 0 {
		err = fmt.Errorf("its first command ended with %d", code)
	}
	if err != nil {
		return fmt.Errorf("boot the lab: %w", err)
	}
	return nil
}

// accept takes commands until the lab ends.
func (w *owner) accept() {
	stop := context.AfterFunc(w.ctx, func() { w.ln.Close() })
	defer stop()
	for {
		c, err := w.ln.AcceptUnix()
		if err != nil {
			return
		}
		w.sessions.Go(func() {
			defer c.Close()
			stop := context.AfterFunc(w.ctx, func() { c.Close() })
			defer stop()
			if samePeer(c) == nil {
				w.session(c)
			}
		})
	}
}

// session runs one command for a client.
func (w *owner) session(c net.Conn) {
	start, err := wire.Read(c)
	if err != nil || start.Kind != wire.Start {
		return // it only wanted to know whether there is a lab
	}
	var p *port
	select {
	case p = <-w.ports:
	case <-w.ctx.Done():
		return
	}
	if err := w.relay(p, c, start); err != nil {
		w.cancel(fmt.Errorf("the lab can't be used any more: %w", err))
		return
	}
	w.ports <- p
}

// relay hands frames to and fro until the command has ended. If the client leaves the command is killed. An error means that the port
// can't be used again.
func (w *owner) relay(p *port, c net.Conn, start wire.Frame) error {
	if err := wire.Write(p.conn, start.Kind, start.Payload); err != nil {
		return err
	}
	left := make(chan error, 1)
	go func() { // ends when c is closed, below at the latest
		for {
			f, err := wire.Read(c)
			if err != nil {
				left <- wire.Write(p.conn, wire.Kill, nil)
				return
			}
			if err := p.send(f); err != nil {
				left <- err
				return
			}
		}
	}()
	err := w.output(p, c)
	c.Close()
	return errors.Join(err, <-left)
}

// output hands on what comes from the guest up to the command's end.
func (w *owner) output(p *port, c net.Conn) error {
	var listens = true
	for {
		f, err := wire.Read(p.in)
		if err != nil {
			return fmt.Errorf("port of the lab: %w", err)
		}
		if listens && wire.Write(c, f.Kind, f.Payload) != nil {
			listens = false
			c.Close() // so that the other direction notices, and kills the command
			if err := p.conn.SetReadDeadline(time.Now().Add(killLimit)); err != nil {
				return err
			}
		}
		if f.Kind == wire.Exit {
			return p.conn.SetReadDeadline(time.Time{})
		}
	}
}

// close waits for the commands of others and ends the lab.
func (w *owner) close(ctx context.Context) error {
	w.ln.Close()
	w.accepting.Wait()
	idle := make(chan struct{})
	go func() {
		w.sessions.Wait()
		close(idle)
	}()
	select {
	case <-idle:
	case <-time.After(100 * time.Millisecond):
		fmt.Fprintln(w.log, "lab: waiting for the commands of others to end")
		select {
		case <-idle:
		case <-ctx.Done():
		case <-w.ctx.Done():
		}
	}
	return w.end()
}

// end ends QEMU and waits for everything that belongs to the lab.
func (w *owner) end() error {
	w.cancel(errors.New("the lab was ended"))
	w.ln.Close()
	err := w.vm.end()
	w.accepting.Wait()
	w.sessions.Wait()
	return err
}

// newMail makes the mailbox disk: memory that the lab sees as a disk.
func newMail() (*os.File, error) {
	fd, err := unix.MemfdCreate("lab-mail", unix.MFD_CLOEXEC)
	if err != nil {
		return nil, fmt.Errorf("mailbox: %w", err)
	}
	f := os.NewFile(uintptr(fd), "mail")
	if err := f.Truncate(ports * wire.MailRegion); err != nil {
		return nil, errors.Join(fmt.Errorf("mailbox: %w", err), f.Close())
	}
	return f, nil
}

// socketPair makes a connection: ours, and the end for QEMU to inherit.
func socketPair() (net.Conn, *os.File, error) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, nil, fmt.Errorf("socket pair: %w", err)
	}
	ours := os.NewFile(uintptr(fds[0]), "port")
	defer ours.Close()
	conn, err := net.FileConn(ours)
	if err != nil {
		unix.Close(fds[1])
		return nil, nil, fmt.Errorf("socket pair: %w", err)
	}
	return conn, os.NewFile(uintptr(fds[1]), "port"), nil
}
