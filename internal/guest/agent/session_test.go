package agent

import (
	"context"
	"errors"
	"io"
	"net"
	"os"
	"os/exec"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/forkd/forkd/internal/guest/agentclient"
	"github.com/forkd/forkd/internal/guest/agentproto"
)

// raw is a host that speaks frames by hand.
type raw struct {
	net.Conn
	t   *testing.T
	dec *agentproto.Decoder
}

func (r *rig) raw() *raw {
	r.t.Helper()
	c, err := r.dial(testContext(r.t))
	if err != nil {
		r.t.Fatal(err)
	}
	if err := c.SetDeadline(time.Now().Add(30 * time.Second)); err != nil {
		r.t.Fatal(err)
	}
	return &raw{Conn: c, t: r.t, dec: agentproto.NewDecoder(agentproto.KindHelloAck, nil)}
}

func (c *raw) send(parts ...[]byte) {
	c.t.Helper()
	for _, p := range parts {
		if _, err := c.Write(p); err != nil {
			c.t.Fatalf("write: %v", err)
		}
	}
}

func (c *raw) next() agentproto.Frame {
	c.t.Helper()
	for {
		if f, ok := c.dec.Next(); ok {
			return f
		}
		n, err := c.Read(c.dec.Space())
		if err != nil {
			c.t.Fatalf("read: %v", err)
		}
		c.dec.Filled(n)
	}
}

func (c *raw) want(kind agentproto.Kind, session uint64, id uint32) {
	c.t.Helper()
	if f := c.next(); f.Kind != kind || f.Session != session || f.ID != id {
		c.t.Errorf("frame: got kind %d, session %d, id %d, want %d, %d, %d", f.Kind, f.Session, f.ID, kind, session, id)
	}
}

func hello(token byte) (agentproto.Token, []byte) {
	h := agentproto.Hello{Token: agentproto.Token{token, 1}, Version: agentproto.ProtocolVersion}
	return h.Token, agentproto.AppendMessage(nil, agentproto.KindHello, h.Token.Session(), 0, h.AppendTo(nil))
}

func ping(session uint64, id uint32) []byte {
	return agentproto.AppendMessage(nil, agentproto.KindPing, session, id, nil)
}

func TestSessionFirstRequestNeedsNoAck(t *testing.T) {
	r := newRig(t, Options{})
	c := r.raw()
	defer c.Close()
	tok, h := hello(1)
	c.send(append(h, ping(tok.Session(), 9)...))
	c.want(agentproto.KindHelloAck, tok.Session(), 0)
	c.want(agentproto.KindPong, tok.Session(), 9)
}

func TestSessionIgnoresWhatIsNotIts(t *testing.T) {
	r := newRig(t, Options{})
	c := r.raw()
	defer c.Close()
	tok, h := hello(1)
	other, _ := hello(2)
	c.send(ping(tok.Session(), 1), []byte("garbage"), h, ping(other.Session(), 2), ping(0, 3), ping(tok.Session(), 4))
	c.want(agentproto.KindHelloAck, tok.Session(), 0)
	c.want(agentproto.KindPong, tok.Session(), 4)
	// A spoiled frame: nothing until the next hello.
	bad := ping(tok.Session(), 5)
	bad[len(bad)-1] ^= 0xff
	tok2, h2 := hello(3)
	c.send(bad, ping(tok.Session(), 6), h2, ping(tok2.Session(), 7))
	c.want(agentproto.KindHelloAck, tok2.Session(), 0)
	c.want(agentproto.KindPong, tok2.Session(), 7)
}

func TestSessionUnknownKind(t *testing.T) {
	r := newRig(t, Options{})
	c := r.raw()
	defer c.Close()
	tok, h := hello(1)
	c.send(h, agentproto.AppendMessage(nil, agentproto.KindPong, tok.Session(), 3, nil))
	c.want(agentproto.KindHelloAck, tok.Session(), 0)
	c.want(agentproto.KindError, tok.Session(), 3)
}

func TestSessionMalformedRequests(t *testing.T) {
	r := newRig(t, Options{})
	c := r.raw()
	defer c.Close()
	tok, h := hello(1)
	c.send(h)
	c.want(agentproto.KindHelloAck, tok.Session(), 0)
	for i, kind := range []agentproto.Kind{agentproto.KindExec, agentproto.KindEval, agentproto.KindIdentity} {
		c.send(agentproto.AppendMessage(nil, kind, tok.Session(), uint32(i+1), []byte{0xff, 0xff, 0xff, 0xff}))
		c.want(agentproto.KindError, tok.Session(), uint32(i+1))
	}
	c.send(ping(tok.Session(), 77))
	c.want(agentproto.KindPong, tok.Session(), 77)
}

// A host dies in the middle of a frame; the next one takes the same connection over, as with a virtio-serial port.
func TestSessionTakeover(t *testing.T) {
	r := newRig(t, Options{})
	c := r.raw()
	defer c.Close()
	tok, h := hello(1)
	req := (&agentproto.ExecRequest{Args: []string{"sh", "-c", "sleep 0.1; head -c 200000 /dev/zero"}}).AppendTo(nil)
	half := agentproto.AppendMessage(nil, agentproto.KindExec, tok.Session(), 2, make([]byte, 100000))
	c.send(h, agentproto.AppendMessage(nil, agentproto.KindExec, tok.Session(), 1, req), half[:70000])
	client := agentclient.New(func(context.Context) (net.Conn, error) { return c.Conn, nil }, agentclient.Options{Resync: true})
	defer client.Close()
	// The answer to the dead host's command comes in between and must reach nobody.
	for range 50 {
		if _, err := client.Ping(testContext(t)); err != nil {
			t.Fatalf("Ping after the takeover: %v", err)
		}
	}
	res, err := client.Exec(testContext(t), agentproto.ExecRequest{Args: []string{"echo", "mine"}})
	if err != nil || string(res.Stdout) != "mine\n" {
		t.Errorf("Exec after the takeover: got %+v, %v, want mine", res, err)
	}
}

// A whole and a cut answer to an earlier host, and then the new session's.
func TestSessionStaleAnswersAreNotTaken(t *testing.T) {
	ours, theirs := net.Pipe()
	stale := agentproto.AppendMessage(nil, agentproto.KindPong, 42, 1, (&agentproto.Pong{PID: 666}).AppendTo(nil))
	var wg sync.WaitGroup
	wg.Go(func() {
		dec := agentproto.NewDecoder(agentproto.KindHello, nil)
		for {
			n, err := theirs.Read(dec.Space())
			if err != nil {
				return
			}
			dec.Filled(n)
			for f, ok := dec.Next(); ok; f, ok = dec.Next() {
				switch f.Kind {
				case agentproto.KindHello:
					ack := agentproto.AppendMessage(nil, agentproto.KindHelloAck, f.Session, 0, f.Payload)
					_, _ = theirs.Write(append(append(append(stale[:0:0], stale...), stale[:len(stale)-9]...), ack...))
				case agentproto.KindPing:
					_, _ = theirs.Write(append(append(stale[:0:0], stale...), agentproto.AppendMessage(nil, agentproto.KindPong, f.Session, f.ID, (&agentproto.Pong{PID: 7}).AppendTo(nil))...))
				}
			}
		}
	})
	client := agentclient.New(func(context.Context) (net.Conn, error) { return ours, nil }, agentclient.Options{Resync: true})
	for range 3 {
		p, err := client.Ping(testContext(t))
		if err != nil || p.PID != 7 {
			t.Errorf("Ping: got pid %d, %v, want 7", p.PID, err)
		}
	}
	client.Close()
	theirs.Close()
	wg.Wait()
}

func TestSessionHostThatLeavesWhileACommandRuns(t *testing.T) {
	r := newRig(t, Options{})
	ctx, cancel := context.WithCancel(testContext(t))
	defer cancel()
	up, down := r.root+"/up", r.root+"/down"
	for _, fifo := range []string{up, down} {
		if err := unix.Mkfifo(fifo, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	done := make(chan error, 1)
	first := r.newClient(false)
	go func() {
		_, err := first.Exec(ctx, agentproto.ExecRequest{Args: []string{"sh", "-c", "echo up > " + up + "; echo down > " + down}})
		done <- err
	}()
	if b, err := os.ReadFile(up); err != nil || string(b) != "up\n" {
		t.Fatalf("command: %q, %v", b, err)
	}
	first.Close()
	if err := <-done; !errors.Is(err, agentclient.ErrConnection) {
		t.Errorf("Exec: got %v, want %v", err, agentclient.ErrConnection)
	}
	if _, err := r.Ping(ctx); err != nil {
		t.Errorf("Ping of the next host: %v", err)
	}
	// The command goes on: a fork of a busy machine has a host of its own, but its commands are the machine's.
	if b, err := os.ReadFile(down); err != nil || string(b) != "down\n" {
		t.Errorf("command after its host left: got %q, %v, want it to go on", b, err)
	}
}

func TestServeConn(t *testing.T) {
	for _, tc := range []struct {
		name string
		pair func() (net.Conn, net.Conn)
	}{
		{"pipe", net.Pipe},
		{"socket pair", func() (net.Conn, net.Conn) {
			fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
			if err != nil {
				t.Fatal(err)
			}
			var conns [2]net.Conn
			for i, fd := range fds {
				f := os.NewFile(uintptr(fd), "pair")
				if conns[i], err = net.FileConn(f); err != nil {
					t.Fatal(err)
				}
				f.Close()
			}
			return conns[0], conns[1]
		}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			a, err := New(Options{Sandboxed: true})
			if err != nil {
				t.Fatal(err)
			}
			defer a.Close()
			for _, how := range []string{"host leaves", "context ends"} {
				ours, theirs := tc.pair()
				ctx, cancel := context.WithCancel(t.Context())
				done := make(chan error, 1)
				go func() { done <- a.ServeConn(ctx, theirs) }()
				client := agentclient.New(func(context.Context) (net.Conn, error) { return ours, nil }, agentclient.Options{})
				if _, err := client.Ping(testContext(t)); err != nil {
					t.Errorf("%s: Ping: %v", how, err)
				}
				if how == "host leaves" {
					client.Close()
				} else {
					cancel()
				}
				if err := <-done; err != nil {
					t.Errorf("%s: ServeConn: %v", how, err)
				}
				client.Close()
				cancel()
			}
		})
	}
}

func TestServeNeedsADescriptor(t *testing.T) {
	a, err := New(Options{Sandboxed: true})
	if err != nil {
		t.Fatal(err)
	}
	defer a.Close()
	if err := a.Serve(t.Context(), fakeListener{}); err == nil {
		t.Error("Serve of a listener without descriptor: got no error")
	}
}

type fakeListener struct{}

func (fakeListener) Accept() (net.Conn, error) { return nil, io.EOF }
func (fakeListener) Close() error              { return nil }
func (fakeListener) Addr() net.Addr            { return nil }

// The reaper of process 1, in a process of its own that adopts orphans.
func TestReaperTellsChildrenFromOrphans(t *testing.T) {
	if os.Getenv("AGENT_TEST_REAPER") != "" {
		reapInChild(t)
		return
	}
	cmd := exec.Command(os.Args[0], "-test.run=^TestReaperTellsChildrenFromOrphans$", "-test.v")
	cmd.Env = append(os.Environ(), "AGENT_TEST_REAPER=1")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Errorf("reaper: %v\n%s", err, out)
	}
}

func reapInChild(t *testing.T) {
	if err := unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0); err != nil {
		t.Skipf("can't adopt orphans: %v", err)
	}
	a, err := New(Options{Sandboxed: true, init: true})
	if err != nil {
		t.Fatal(err)
	}
	ours, theirs := net.Pipe()
	fd, _, err := descriptor(theirs)
	if err != nil {
		t.Fatal(err)
	}
	go a.loop(&single{fd: fd}) // ends with the process
	client := agentclient.New(func(context.Context) (net.Conn, error) { return ours, nil }, agentclient.Options{})
	ctx := testContext(t)
	for i := range int32(20) {
		res, err := client.Exec(ctx, agentproto.ExecRequest{Args: []string{"sh", "-c", "for i in 1 2 3; do (sleep 0.0$i; exit 9) & done; exit " + string(rune('0'+i%10))}})
		if err != nil || res.ExitCode != i%10 {
			t.Errorf("command %d: got status %d, %v, want %d", i, res.ExitCode, err, i%10)
		}
	}
	for { // until every orphan has ended, without a wait of ours that would take one away
		if err := unix.Waitid(unix.P_ALL, 0, nil, unix.WEXITED|unix.WNOWAIT|unix.WNOHANG, nil); err == unix.ECHILD {
			break
		}
		if _, err := client.Ping(ctx); err != nil {
			t.Fatalf("orphans are not reaped: %v", err)
		}
	}
	a.procs.mu.Lock()
	defer a.procs.mu.Unlock()
	if n := len(a.procs.children); n != 0 {
		t.Errorf("children that were not delivered: got %d, want 0", n)
	}
}

func BenchmarkPing(b *testing.B) {
	a, err := New(Options{Sandboxed: true})
	if err != nil {
		b.Fatal(err)
	}
	defer a.Close()
	null, err := unix.Open("/dev/null", unix.O_WRONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		b.Fatal(err)
	}
	defer unix.Close(null)
	a.out.fd = null
	a.out.session.Store(5)
	a.session = 5
	b.ReportAllocs()
	for b.Loop() {
		a.dispatch(agentproto.KindPing, 1, nil)
	}
}

func TestPingDoesNotAllocate(t *testing.T) {
	a, err := New(Options{Sandboxed: true})
	if err != nil {
		t.Fatal(err)
	}
	defer a.Close()
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fds[1])
	tr := &single{fd: fds[0]}
	r := &reader{dec: *agentproto.NewDecoder(agentproto.KindHello, nil)}
	if err := a.connect(tr, r); err != nil {
		t.Fatal(err)
	}
	defer a.disconnect(tr)
	tok, h := hello(1)
	writeAll(fds[1], h)
	a.receive(tr, r)
	frame := ping(tok.Session(), 1)
	buf := make([]byte, 4096)
	allocs := testing.AllocsPerRun(100, func() {
		writeAll(fds[1], frame)
		a.receive(tr, r)
		if _, err := unix.Read(fds[1], buf); err != nil {
			t.Fatal(err)
		}
	})
	if allocs != 0 {
		t.Errorf("a ping allocated %v times, want 0", allocs)
	}
}
