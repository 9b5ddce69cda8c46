package agentclient

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/forkd/forkd/internal/guest/agentproto"
)

// guest is the other end of a connection, in the hands of a test.
type guest struct {
	net.Conn
	t       *testing.T
	dec     *agentproto.Decoder
	padding int // zero bytes before the first frame
	begun   bool
	session uint64
}

// guests is a dialer whose guests a test plays.
type guests struct {
	t     *testing.T
	conns chan *guest
}

func newGuests(t *testing.T) *guests { return &guests{t: t, conns: make(chan *guest, 10)} }

func (g *guests) dial(context.Context) (net.Conn, error) {
	ours, theirs := net.Pipe()
	g.t.Cleanup(func() { theirs.Close() })
	g.conns <- &guest{Conn: theirs, t: g.t, dec: agentproto.NewDecoder(agentproto.KindHello, nil)}
	return ours, nil
}

// read returns the next frame of the host, or an error when it is gone.
func (g *guest) read() (agentproto.Frame, error) {
	for {
		if f, ok := g.dec.Next(); ok {
			return f, nil
		}
		buf := make([]byte, 1000)
		n, err := g.Read(buf)
		if err != nil {
			return agentproto.Frame{}, err
		}
		for b := buf[:n]; len(b) > 0; {
			g.begun = g.begun || b[0] != 0
			if !g.begun {
				g.padding++
			}
			k := copy(g.dec.Space(), b[:1])
			g.dec.Filled(k)
			b = b[k:]
			if f, ok := g.dec.Next(); ok {
				f.Payload = bytes.Clone(f.Payload) // Space ends its life
				if len(b) > 0 {                    // keep the rest
					g.dec.Filled(copy(g.dec.Space(), b))
				}
				return f, nil
			}
		}
	}
}

func (g *guest) send(kind agentproto.Kind, id uint32, msg []byte) {
	if _, err := g.Write(agentproto.AppendMessage(nil, kind, g.session, id, msg)); err != nil && !errors.Is(err, io.ErrClosedPipe) {
		g.t.Errorf("guest's write: %v", err)
	}
}

// hello reads HELLO and, when version is not 0, acknowledges it.
func (g *guest) hello(version uint16) error {
	f, err := g.read()
	if err != nil {
		return err
	}
	var h agentproto.Hello
	if err := h.Decode(f.Payload); err != nil || f.Kind != agentproto.KindHello {
		g.t.Errorf("first frame: kind %d, %v, want hello", f.Kind, err)
	}
	g.session = f.Session
	if version != 0 {
		h.Version = version
		g.send(agentproto.KindHelloAck, 0, h.AppendTo(nil))
	}
	return nil
}

// serve answers pings with their id as the pid, and leaves everything else to other.
func (g *guest) serve(other func(agentproto.Frame)) {
	if g.hello(agentproto.ProtocolVersion) != nil {
		return
	}
	for {
		f, err := g.read()
		if err != nil {
			return
		}
		if f.Kind == agentproto.KindPing {
			g.send(agentproto.KindPong, f.ID, (&agentproto.Pong{PID: f.ID}).AppendTo(nil))
		} else if other != nil {
			other(f)
		}
	}
}

func testContext(t *testing.T) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeoutCause(t.Context(), 30*time.Second, errors.New("test took too long"))
	t.Cleanup(cancel)
	return ctx
}

func newClient(t *testing.T, dial Dialer, opt Options) *Client {
	t.Helper()
	c := New(dial, opt)
	t.Cleanup(func() { c.Close() })
	return c
}

func TestFirstRequestIsPipelined(t *testing.T) {
	gs := newGuests(t)
	c := newClient(t, gs.dial, Options{})
	done := make(chan error, 1)
	go func() {
		_, err := c.Ping(testContext(t))
		done <- err
	}()
	g := <-gs.conns
	if err := g.hello(0); err != nil {
		t.Fatal(err)
	}
	f, err := g.read() // before any answer
	if err != nil || f.Kind != agentproto.KindPing {
		t.Fatalf("second frame: got kind %d, %v, want ping", f.Kind, err)
	}
	if g.padding != 0 {
		t.Errorf("padding of a first connection: got %d bytes, want none", g.padding)
	}
	h := agentproto.Hello{Version: agentproto.ProtocolVersion}
	// An acknowledgement of another session is not ours, and neither is what follows it.
	stale := agentproto.AppendMessage(nil, agentproto.KindHelloAck, h.Token.Session(), 0, h.AppendTo(nil))
	stale = agentproto.AppendMessage(stale, agentproto.KindPong, g.session, f.ID, (&agentproto.Pong{PID: 666}).AppendTo(nil))
	if _, err := g.Write(stale); err != nil {
		t.Fatal(err)
	}
	select {
	case err := <-done:
		t.Fatalf("Ping ended before the session was there: %v", err)
	default:
	}
	c.Close()
	if err := <-done; !errors.Is(err, ErrConnection) || !errors.Is(err, ErrClosed) {
		t.Errorf("Ping of a closed client: got %v, want %v and %v", err, ErrConnection, ErrClosed)
	}
}

func TestResyncPadsTheFirstConnection(t *testing.T) {
	for _, tc := range []struct {
		name   string
		resync bool
		want   []int // padding of the first and of the second connection
	}{
		{"fresh machine", false, []int{0, agentproto.Padding}},
		{"taken over", true, []int{agentproto.Padding, agentproto.Padding}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			gs := newGuests(t)
			c := newClient(t, gs.dial, Options{Resync: tc.resync})
			var got []int
			for range 2 {
				var wg sync.WaitGroup
				wg.Go(func() {
					g := <-gs.conns
					g.serve(func(agentproto.Frame) { g.Close() })
					got = append(got, g.padding)
				})
				if _, err := c.Ping(testContext(t)); err != nil {
					t.Fatalf("Ping: %v", err)
				}
				if err := c.Quiesce(testContext(t)); !errors.Is(err, ErrConnection) {
					t.Errorf("Quiesce when the connection breaks: got %v, want %v", err, ErrConnection)
				}
				wg.Wait()
			}
			if diff := cmp.Diff(got, tc.want); diff != "" {
				t.Errorf("padding (-got +want):\n%s", diff)
			}
		})
	}
}

func TestCallsAreMultiplexed(t *testing.T) {
	gs := newGuests(t)
	c := newClient(t, gs.dial, Options{})
	const n = 20
	var mu sync.Mutex
	var held []agentproto.Frame
	var requests []agentproto.ExecRequest
	all := make(chan *guest, 1)
	go func() {
		g := <-gs.conns
		g.serve(func(f agentproto.Frame) {
			mu.Lock()
			defer mu.Unlock()
			var req agentproto.ExecRequest
			if err := req.Decode(f.Payload); err != nil {
				t.Errorf("request: %v", err)
			}
			held = append(held, f)
			requests = append(requests, req)
			if len(held) == n {
				all <- g
			}
		})
	}()
	ctx := testContext(t)
	done := make(chan error, n)
	for i := range n {
		go func() {
			want := strings.Repeat("x", i)
			res, err := c.Exec(ctx, agentproto.ExecRequest{Args: []string{want}})
			if err == nil && string(res.Stdout) != want {
				err = errors.New("got " + string(res.Stdout) + ", want " + want)
			}
			done <- err
		}()
	}
	if _, err := c.Ping(ctx); err != nil {
		t.Errorf("Ping while commands run: %v", err)
	}
	g := <-all
	mu.Lock()
	for i := n - 1; i >= 0; i-- { // backwards
		res := agentproto.ExecResult{Stdout: []byte(requests[i].Args[0])}
		g.send(agentproto.KindExecResult, held[i].ID, res.AppendTo(nil))
	}
	mu.Unlock()
	for range n {
		if err := <-done; err != nil {
			t.Error(err)
		}
	}
}

func TestErrorsOfTheAgent(t *testing.T) {
	gs := newGuests(t)
	c := newClient(t, gs.dial, Options{})
	go func() {
		g := <-gs.conns
		g.serve(func(f agentproto.Frame) {
			switch f.Kind {
			case agentproto.KindEval:
				g.send(agentproto.KindError, f.ID, (&agentproto.Error{Code: agentproto.CodeNoInterpreter, Message: "no python3"}).AppendTo(nil))
			case agentproto.KindExec:
				g.send(agentproto.KindPong, f.ID, nil)
			case agentproto.KindIdentity:
				g.send(agentproto.KindIdentityAck, f.ID, []byte{1})
			case agentproto.KindQuiesce:
				g.send(agentproto.KindError, f.ID, []byte{1, 2})
			}
		})
	}()
	ctx := testContext(t)
	_, err := c.Eval(ctx, agentproto.EvalRequest{Code: "1"})
	var e *agentproto.Error
	if !errors.As(err, &e) || e.Code != agentproto.CodeNoInterpreter || errors.Is(err, ErrConnection) {
		t.Errorf("Eval: got %v, want the agent's error and no broken connection", err)
	}
	for name, call := range map[string]func() error{
		"answer of another kind": func() error { _, err := c.Exec(ctx, agentproto.ExecRequest{}); return err },
		"answer cut short":       func() error { _, err := c.Identify(ctx, agentproto.Identity{}); return err },
		"error cut short":        func() error { return c.Quiesce(ctx) },
	} {
		if err := call(); !errors.Is(err, agentproto.ErrMalformed) {
			t.Errorf("%s: got %v, want %v", name, err, agentproto.ErrMalformed)
		}
	}
	if _, err := c.Ping(ctx); err != nil {
		t.Errorf("Ping after errors: %v", err)
	}
}

func TestContextEndsACallAndTellsTheGuest(t *testing.T) {
	gs := newGuests(t)
	c := newClient(t, gs.dial, Options{})
	frames := make(chan agentproto.Frame, 10)
	go func() {
		g := <-gs.conns
		g.serve(func(f agentproto.Frame) { frames <- f })
	}()
	stop := errors.New("enough")
	for _, kind := range []agentproto.Kind{agentproto.KindExec, agentproto.KindEval} {
		ctx, cancel := context.WithCancelCause(testContext(t))
		done := make(chan error, 1)
		go func() {
			var err error
			if kind == agentproto.KindExec {
				_, err = c.Exec(ctx, agentproto.ExecRequest{Args: []string{"sleep"}})
			} else {
				_, err = c.Eval(ctx, agentproto.EvalRequest{Code: "sleep"})
			}
			done <- err
		}()
		req := <-frames
		cancel(stop)
		if err := <-done; !errors.Is(err, stop) || errors.Is(err, ErrConnection) {
			t.Errorf("call: got %v, want %v and no broken connection", err, stop)
		}
		if f := <-frames; f.Kind != agentproto.KindCancel || f.ID != req.ID {
			t.Errorf("after the end: got kind %d, id %d, want cancel of %d", f.Kind, f.ID, req.ID)
		}
	}
	if _, err := c.Ping(testContext(t)); err != nil {
		t.Errorf("Ping after cancels: %v", err)
	}
	ctx, cancel := context.WithCancelCause(t.Context())
	cancel(stop)
	if _, err := c.Ping(ctx); !errors.Is(err, stop) {
		t.Errorf("Ping with a context that has ended: got %v, want %v", err, stop)
	}
}

// A guest that does not read: the caller gets its time out, and the connection, on which a frame is half written, is not used again.
func TestContextEndsAWrite(t *testing.T) {
	gs := newGuests(t)
	c := newClient(t, gs.dial, Options{})
	ctx, cancel := context.WithTimeout(testContext(t), 50*time.Millisecond)
	defer cancel()
	if _, err := c.Ping(ctx); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("Ping: got %v, want %v", err, context.DeadlineExceeded)
	}
	<-gs.conns
	go func() { (<-gs.conns).serve(nil) }()
	if _, err := c.Ping(testContext(t)); err != nil {
		t.Errorf("Ping on a new connection: %v", err)
	}
}

func TestBrokenConnectionFailsAllCallsAndIsReplaced(t *testing.T) {
	gs := newGuests(t)
	c := newClient(t, gs.dial, Options{})
	arrived := make(chan struct{}, 10)
	go func() {
		g := <-gs.conns
		go func() {
			for range 3 {
				<-arrived
			}
			g.Close()
		}()
		g.serve(func(agentproto.Frame) { arrived <- struct{}{} })
		(<-gs.conns).serve(nil)
	}()
	ctx := testContext(t)
	done := make(chan error, 3)
	for range 3 {
		go func() {
			_, err := c.Exec(ctx, agentproto.ExecRequest{Args: []string{"x"}})
			done <- err
		}()
	}
	for range 3 {
		if err := <-done; !errors.Is(err, ErrConnection) {
			t.Errorf("Exec: got %v, want %v", err, ErrConnection)
		}
	}
	if _, err := c.Ping(ctx); err != nil {
		t.Errorf("Ping on a new connection: %v", err)
	}
}

func TestDialErrors(t *testing.T) {
	refused := errors.New("refused")
	fail := true
	gs := newGuests(t)
	c := newClient(t, func(ctx context.Context) (net.Conn, error) {
		if fail {
			return nil, refused
		}
		return gs.dial(ctx)
	}, Options{})
	if _, err := c.Ping(testContext(t)); !errors.Is(err, refused) || !errors.Is(err, ErrConnection) {
		t.Errorf("Ping: got %v, want %v and %v", err, refused, ErrConnection)
	}
	fail = false
	go func() { (<-gs.conns).serve(nil) }()
	if _, err := c.Ping(testContext(t)); err != nil {
		t.Errorf("Ping when the dialer works again: %v", err)
	}
}

func TestWaitingForADialEndsWithTheContext(t *testing.T) {
	dialing := make(chan struct{})
	c := newClient(t, func(ctx context.Context) (net.Conn, error) {
		close(dialing)
		<-ctx.Done()
		return nil, context.Cause(ctx)
	}, Options{})
	first := make(chan error, 1)
	go func() {
		_, err := c.Ping(testContext(t))
		first <- err
	}()
	<-dialing
	ctx, cancel := context.WithTimeout(testContext(t), 20*time.Millisecond)
	defer cancel()
	if _, err := c.Ping(ctx); !errors.Is(err, context.DeadlineExceeded) || !errors.Is(err, ErrConnection) {
		t.Errorf("second Ping: got %v, want %v and %v", err, context.DeadlineExceeded, ErrConnection)
	}
	c.Close() // must not wait for the dial's own end
	if err := <-first; !errors.Is(err, ErrClosed) {
		t.Errorf("first Ping: got %v, want %v", err, ErrClosed)
	}
	if _, err := c.Ping(testContext(t)); !errors.Is(err, ErrClosed) {
		t.Errorf("Ping of a closed client: got %v, want %v", err, ErrClosed)
	}
}

func TestOtherProtocolVersionIsRefused(t *testing.T) {
	gs := newGuests(t)
	c := newClient(t, gs.dial, Options{})
	go func() {
		g := <-gs.conns
		if g.hello(agentproto.ProtocolVersion+1) == nil {
			_, _ = g.read()
		}
	}()
	_, err := c.Ping(testContext(t))
	if !errors.Is(err, ErrConnection) || !strings.Contains(err.Error(), "rebuild the image") {
		t.Errorf("Ping: got %v, want both versions and what to do", err)
	}
}

func TestOlderAgentIsServed(t *testing.T) {
	gs := newGuests(t)
	c := newClient(t, gs.dial, Options{})
	go func() {
		g := <-gs.conns
		if g.hello(agentproto.OldestVersion) != nil {
			return
		}
		if f, err := g.read(); err == nil {
			pong := agentproto.Pong{Version: "old"}
			_, _ = g.Write(agentproto.AppendMessage(nil, agentproto.KindPong, f.Session, f.ID, pong.AppendTo(nil)))
		}
	}()
	if pong, err := c.Ping(testContext(t)); err != nil || pong.Version != "old" {
		t.Errorf("Ping: got %+v, %v", pong, err)
	}
}

// A guest is not trusted: whatever it sends, the host's memory is bounded and its calls end.
func TestHostileGuest(t *testing.T) {
	tests := []struct {
		name string
		do   func(g *guest, id uint32)
		want error // nil: the call ends well
	}{
		{"garbage", func(g *guest, id uint32) { _, _ = g.Write(make([]byte, 100)) }, ErrConnection},
		{"message without end for nobody", func(g *guest, id uint32) {
			chunk := agentproto.AppendHeader(nil, agentproto.KindExecResult, true, g.session, id+1000, agentproto.MaxPayload)
			chunk = agentproto.AppendTrailer(append(chunk, make([]byte, agentproto.MaxPayload)...))
			for range 3 * agentproto.MaxMessage / agentproto.MaxPayload {
				if _, err := g.Write(chunk); err != nil {
					return
				}
			}
			g.send(agentproto.KindExecResult, id, (&agentproto.ExecResult{}).AppendTo(nil))
		}, nil},
		{"answers nobody asked for, twice", func(g *guest, id uint32) {
			for _, i := range []uint32{id + 1, 0, id, id} {
				g.send(agentproto.KindExecResult, i, (&agentproto.ExecResult{}).AppendTo(nil))
			}
		}, nil},
		{"answer that is too long", func(g *guest, id uint32) {
			chunk := agentproto.AppendHeader(nil, agentproto.KindExecResult, true, g.session, id, agentproto.MaxPayload)
			chunk = agentproto.AppendTrailer(append(chunk, make([]byte, agentproto.MaxPayload)...))
			for range agentproto.MaxMessage/agentproto.MaxPayload + 1 {
				if _, err := g.Write(chunk); err != nil {
					return
				}
			}
			g.send(agentproto.KindExecResult, id, nil)
		}, ErrTooLong},
	}
	for _, tc := range tests {
		t.Run(tc.name, func(t *testing.T) {
			gs := newGuests(t)
			c := newClient(t, gs.dial, Options{})
			go func() {
				g := <-gs.conns
				g.serve(func(f agentproto.Frame) { tc.do(g, f.ID) })
			}()
			_, err := c.Exec(testContext(t), agentproto.ExecRequest{Args: []string{"x"}})
			if !errors.Is(err, tc.want) {
				t.Errorf("Exec: got %v, want %v", err, tc.want)
			}
		})
	}
}

func TestRequestThatIsTooLong(t *testing.T) {
	c := newClient(t, newGuests(t).dial, Options{})
	_, err := c.Exec(testContext(t), agentproto.ExecRequest{Stdin: make([]byte, agentproto.MaxMessage)})
	var e *agentproto.Error
	if !errors.As(err, &e) || e.Code != agentproto.CodeBadRequest {
		t.Errorf("Exec: got %v, want code %q", err, agentproto.CodeBadRequest)
	}
}

func TestLongRequestLetsOthersThrough(t *testing.T) {
	gs := newGuests(t)
	c := newClient(t, gs.dial, Options{})
	var g *guest
	ready := make(chan struct{})
	var kinds []agentproto.Kind
	go func() {
		g = <-gs.conns
		close(ready)
		g.serve(func(f agentproto.Frame) {
			kinds = append(kinds, f.Kind)
			if !f.More {
				g.send(agentproto.KindExecResult, f.ID, (&agentproto.ExecResult{ExitCode: int32(len(kinds))}).AppendTo(nil))
			}
		})
	}()
	ctx := testContext(t)
	done := make(chan agentproto.ExecResult, 1)
	go func() {
		res, err := c.Exec(ctx, agentproto.ExecRequest{Stdin: make([]byte, 20*agentproto.MaxPayload)})
		if err != nil {
			t.Errorf("Exec: %v", err)
		}
		done <- res
	}()
	<-ready
	for {
		if _, err := c.Ping(ctx); err != nil {
			t.Fatalf("Ping: %v", err)
		}
		select {
		case res := <-done:
			if res.ExitCode != 21 {
				t.Errorf("frames of the request: got %d, want 21", res.ExitCode)
			}
			return
		default:
		}
	}
}

func TestCloseLeavesNothing(t *testing.T) {
	before := runtime.NumGoroutine()
	for range 20 {
		gs := newGuests(t)
		var wg sync.WaitGroup
		wg.Go(func() { (<-gs.conns).serve(nil) })
		c := New(gs.dial, Options{})
		if _, err := c.Ping(testContext(t)); err != nil {
			t.Fatalf("Ping: %v", err)
		}
		for range 2 {
			if err := c.Close(); err != nil {
				t.Errorf("Close: %v", err)
			}
		}
		wg.Wait()
	}
	if err := New(newGuests(t).dial, Options{}).Close(); err != nil {
		t.Errorf("Close of a client that never connected: %v", err)
	}
	for i := 0; runtime.NumGoroutine() > before && i < 1000; i++ {
		runtime.Gosched() // goroutines of contexts that have ended are on their way out
	}
	if after := runtime.NumGoroutine(); after > before {
		t.Errorf("goroutines: got %d, want at most the %d of before", after, before)
	}
}
