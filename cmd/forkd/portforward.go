package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"strconv"
	"strings"
	"sync"

	"github.com/forkd/forkd/client"
	"github.com/forkd/forkd/internal/relay"
)

type portForwardCmd struct {
	ID      string   `arg:"" help:"Id of the sandbox."`
	Ports   []string `arg:"" placeholder:"PORT" help:"Port of the sandbox, or LOCAL:PORT for another one on this side; local port 0: any that is free."`
	Address string   `default:"127.0.0.1" help:"Address on this side."`
}

// Help says what it is for.
func (c *portForwardCmd) Help() string {
	return "Listens on this side and passes each connection on to the sandbox, through the daemon, until it is told to stop. " +
		"No port of a sandbox can be reached in another way."
}

// Run forwards until the program is told to stop.
func (c *portForwardCmd) Run(p *program) error {
	cl, err := p.client()
	if err != nil {
		return err
	}
	if _, err := cl.Sandbox(p.ctx, c.ID); err != nil {
		return err
	}
	var work sync.WaitGroup
	defer work.Wait()
	ctx, stop := context.WithCancel(p.ctx)
	defer stop()
	for _, text := range c.Ports {
		local, port, err := parseForward(text)
		if err != nil {
			return err
		}
		l, err := net.Listen("tcp", net.JoinHostPort(c.Address, strconv.Itoa(local)))
		if err != nil {
			return fmt.Errorf("listen on this side: %w", err)
		}
		context.AfterFunc(ctx, func() { _ = l.Close() })
		if err := p.lines([]string{fmt.Sprintf("%s -> %s:%d", l.Addr(), c.ID, port)}); err != nil {
			return err
		}
		work.Go(func() { p.forward(ctx, cl, l, c.ID, port, &work) })
	}
	<-ctx.Done()
	return nil
}

// parseForward reads PORT or LOCAL:PORT.
func parseForward(s string) (local, port int, err error) {
	left, right, both := strings.Cut(s, ":")
	if !both {
		right = left
	}
	from, err := strconv.ParseUint(left, 10, 16)
	to, err2 := strconv.ParseUint(right, 10, 16)
	if err != nil || err2 != nil || to == 0 {
		return 0, 0, badUsage("give PORT or LOCAL:PORT, such as 8080 or 9000:8080", "port %q", s)
	}
	return int(from), int(to), nil
}

// forward takes connections until its listener is closed.
func (p *program) forward(ctx context.Context, cl *client.Client, l net.Listener, id string, port int, work *sync.WaitGroup) {
	for {
		near, err := l.Accept()
		if err != nil {
			if !errors.Is(err, net.ErrClosed) {
				p.say("%v", err)
			}
			return
		}
		work.Go(func() {
			defer near.Close()
			far, err := cl.DialPort(ctx, id, port)
			if err != nil {
				p.say("port %d of sandbox %s: %v", port, id, err)
				return
			}
			relay.Join(ctx, near, far)
		})
	}
}
