package lab

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/forkd/forkd/test/lab/wire"
)

// fakeLab is an owner whose port leads to a fake guest, and a client of it. The guest ends a command when its input ends or when it is
// killed, and its output is the command's arguments and the input.
func fakeLab(t *testing.T) (*Lab, *owner) {
	t.Helper()
	ours, theirs := net.Pipe()
	t.Cleanup(func() { ours.Close(); theirs.Close() })
	l := &Lab{socket: fmt.Sprintf("@forkd-lab-test-%d-%d", os.Getpid(), time.Now().UnixNano())}
	ln, err := net.Listen("unix", l.socket)
	if err != nil {
		t.Fatal(err)
	}
	w := &owner{log: io.Discard, ln: ln.(*net.UnixListener), ports: make(chan *port, 1)}
	w.ctx, w.cancel = context.WithCancelCause(t.Context())
	w.ports <- &port{conn: ours, in: bufio.NewReader(ours)}
	w.accepting.Go(w.accept)
	go fakeGuest(theirs)
	t.Cleanup(func() {
		w.cancel(nil)
		w.accepting.Wait()
		ours.Close()
		w.sessions.Wait()
	})
	return l, w
}

func fakeGuest(conn net.Conn) {
	in := bufio.NewReader(conn)
	for {
		f, err := wire.Read(in)
		if err != nil {
			return
		}
		if f.Kind != wire.Start {
			continue
		}
		var req wire.Request
		_ = json.Unmarshal(f.Payload, &req)
		_ = wire.Write(conn, wire.Stdout, []byte(strings.Join(req.Args, " ")))
		code := -1
		for code < 0 {
			f, err := wire.Read(in)
			if err != nil {
				return
			}
			switch f.Kind {
			case wire.Stdin:
				_ = wire.Write(conn, wire.Stdout, f.Payload)
				_ = wire.Write(conn, wire.Taken, wire.CountPayload(len(f.Payload)))
			case wire.StdinEnd:
				code = 3
			case wire.Kill:
				code = 137
			}
		}
		_ = wire.WriteJSON(conn, wire.Exit, wire.Result{Code: code})
	}
}

func TestRelay(t *testing.T) {
	l, w := fakeLab(t)
	input := bytes.Repeat([]byte("x"), 3*wire.Window)
	for range 2 { // the port is used again
		var out bytes.Buffer
		code, err := l.Run(t.Context(), Command{Args: []string{"a", "b"}, Stdin: bytes.NewReader(input), Stdout: &out})
		if err != nil || code != 3 {
			t.Fatalf("Run: got %d, %v, want 3", code, err)
		}
		if got := out.String(); got != "a b"+string(input) {
			t.Errorf("output: got %d bytes, want the arguments and the input, %d bytes", len(got), 3+len(input))
		}
	}
	if w.ctx.Err() != nil {
		t.Errorf("the lab ended: %v", context.Cause(w.ctx))
	}
}

func TestRelayToClientThatLeaves(t *testing.T) {
	l, w := fakeLab(t)
	ctx, cancel := context.WithCancel(t.Context())
	never, end := io.Pipe()
	defer end.Close()
	left := make(chan error)
	go func() {
		_, err := l.Run(ctx, Command{Args: []string{"long"}, Stdin: never, Stdout: writer(func() { cancel() })})
		left <- err
	}()
	if err := <-left; err != context.Canceled {
		t.Errorf("Run that is given up: got %v, want context.Canceled", err)
	}
	// The command was killed: its port is free for the next one.
	if code, err := l.Run(t.Context(), Command{Args: []string{"next"}}); err != nil || code != 3 {
		t.Errorf("the next Run: got %d, %v, want 3", code, err)
	}
	if w.ctx.Err() != nil {
		t.Errorf("the lab ended: %v", context.Cause(w.ctx))
	}
}

// writer is told of what is written.
type writer func()

func (w writer) Write(p []byte) (int, error) {
	w()
	return len(p), nil
}

func TestLabEnds(t *testing.T) {
	l, w := fakeLab(t)
	never, end := io.Pipe()
	defer end.Close()
	_, err := l.Run(t.Context(), Command{Args: []string{"long"}, Stdin: never, Stdout: writer(func() { w.cancel(nil) })})
	if err == nil || !strings.Contains(err.Error(), "the lab has ended") {
		t.Errorf("Run in a lab that ends: got %v, want an error that says so", err)
	}
}

func TestTailKeepsTheNewest(t *testing.T) {
	w := tail{limit: 10}
	for i := range 100 {
		fmt.Fprintf(&w, "%d,", i)
	}
	if got, want := w.String(), ",97,98,99,"; got != want {
		t.Errorf("got %q, want %q", got, want)
	}
}

func TestCPIOFile(t *testing.T) {
	var b bytes.Buffer
	cpioFile(&b, "lab", 0o100755, []byte("12345"))
	cpioFile(&b, "TRAILER!!!", 0, nil)
	if b.Len()%4 != 0 || !bytes.Contains(b.Bytes(), []byte("lab\x00\x00\x0012345\x00\x00\x00070701")) {
		t.Errorf("archive: %q", b.String())
	}
}
