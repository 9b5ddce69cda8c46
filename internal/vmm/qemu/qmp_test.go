package qemu

import (
	"context"
	"encoding/json"
	"errors"
	"net"
	"os"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// pair returns the two ends of a Unix stream.
func pair(t *testing.T) (ours, theirs *net.UnixConn) {
	t.Helper()
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	var conns [2]*net.UnixConn
	for i, fd := range fds {
		f := os.NewFile(uintptr(fd), "pair")
		c, err := net.FileConn(f)
		f.Close()
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { c.Close() })
		conns[i] = c.(*net.UnixConn)
	}
	return conns[0], conns[1]
}

// script answers each command with the next of its lines; a line may hold several messages. At its end it closes the connection.
func script(t *testing.T, conn *net.UnixConn, lines ...string) <-chan []string {
	t.Helper()
	seen := make(chan []string, 1)
	go func() {
		defer conn.Close()
		var got []string
		dec := json.NewDecoder(conn)
		for _, line := range lines {
			var cmd struct {
				Execute string `json:"execute"`
			}
			if dec.Decode(&cmd) != nil {
				break
			}
			got = append(got, cmd.Execute)
			conn.Write([]byte(line))
		}
		seen <- got
	}()
	return seen
}

func TestMonitorAnswers(t *testing.T) {
	ours, theirs := pair(t)
	events := make(chan string, 8)
	q := newMonitor(ours, func(name string, _ json.RawMessage) { events <- name })
	defer q.close()
	seen := script(t, theirs,
		`{"QMP": {}} {"return": {}}`,
		`{"event": "STOP", "data": {}} {"return": {"status": "paused"}}`,
		`{"error": {"class": "GenericError", "desc": "no such device"}}`)
	if err := q.negotiate(t.Context()); err != nil {
		t.Fatal(err)
	}
	var r struct{ Status string }
	if err := q.do(t.Context(), "query-status", nil, &r); err != nil || r.Status != "paused" {
		t.Errorf("query-status: %q, %v, want paused", r.Status, err)
	}
	if got := <-events; got != "STOP" {
		t.Errorf("event %q, want STOP", got)
	}
	err := q.do(t.Context(), "ringbuf-read", nil, nil)
	var refused *qmpError
	if !errors.As(err, &refused) || !strings.Contains(err.Error(), "ringbuf-read: no such device") {
		t.Errorf("refused command: %v, want one that names the command and QEMU's words", err)
	}
	if got := strings.Join(<-seen, " "); got != "qmp_capabilities query-status ringbuf-read" {
		t.Errorf("QEMU saw %q", got)
	}
}

func TestMonitorThatDies(t *testing.T) {
	ours, theirs := pair(t)
	q := newMonitor(ours, func(string, json.RawMessage) {})
	defer q.close()
	script(t, theirs, `{"return": {`) // half an answer, then the end
	if err := q.do(t.Context(), "stop", nil, nil); !errors.Is(err, errMonitorClosed) {
		t.Errorf("got %v, want errMonitorClosed", err)
	}
	if err := q.do(t.Context(), "cont", nil, nil); err == nil {
		t.Error("a command on a dead connection succeeded")
	}
}

func TestMonitorSendsFiles(t *testing.T) {
	ours, theirs := pair(t)
	q := newMonitor(ours, func(string, json.RawMessage) {})
	defer q.close()
	f, err := os.CreateTemp(t.TempDir(), "state")
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	got := make(chan error, 1)
	go func() {
		b, oob := make([]byte, 512), make([]byte, 64)
		_, oobn, _, _, err := theirs.ReadMsgUnix(b, oob)
		if err == nil {
			var msgs []unix.SocketControlMessage
			if msgs, err = unix.ParseSocketControlMessage(oob[:oobn]); err == nil && len(msgs) == 1 {
				var fds []int
				if fds, err = unix.ParseUnixRights(&msgs[0]); err == nil && len(fds) == 1 {
					unix.Close(fds[0])
					theirs.Write([]byte(`{"return": {"fd": 9}}`))
				}
			}
		}
		got <- err
	}()
	var r struct{ FD int }
	if err := q.do(t.Context(), "add-fd", nil, &r, f); err != nil || r.FD != 9 {
		t.Errorf("add-fd: %d, %v, want 9", r.FD, err)
	}
	if err := <-got; err != nil {
		t.Error(err)
	}
}

// A caller that gives up must cost the next one neither the connection nor its own answer.
func TestMonitorSurvivesACallerThatLeaves(t *testing.T) {
	ours, theirs := pair(t)
	q := newMonitor(ours, func(string, json.RawMessage) {})
	defer q.close()
	dec := json.NewDecoder(theirs)
	read := func() {
		t.Helper()
		if err := dec.Decode(&struct{}{}); err != nil {
			t.Fatal(err)
		}
	}
	for range 3 {
		ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
		if err := q.do(ctx, "ringbuf-read", nil, nil); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("got %v, want %v", err, context.DeadlineExceeded)
		}
		cancel()
		read()
	}
	done := make(chan error, 1)
	var r struct{ Status string }
	go func() { done <- q.do(t.Context(), "query-status", nil, &r) }()
	read()
	theirs.Write([]byte(`{"return": {"status": "1"}} {"return": {"status": "2"}} {"return": {"status": "3"}} {"return": {"status": "mine"}}`))
	if err := <-done; err != nil || r.Status != "mine" {
		t.Errorf("got %q, %v, want the answer to the last command", r.Status, err)
	}
}

// A command that QEMU does not answer must not keep others longer than they want to wait.
func TestMonitorTurnsEnd(t *testing.T) {
	ours, theirs := pair(t)
	defer theirs.Close()
	q := newMonitor(ours, func(string, json.RawMessage) {})
	first, end := context.WithCancel(t.Context())
	begun := make(chan struct{})
	go func() {
		close(begun)
		q.do(first, "stop", nil, nil)
	}()
	defer q.close()
	defer end()
	<-begun
	if err := json.NewDecoder(theirs).Decode(&struct{}{}); err != nil { // it has its turn
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	if err := q.do(ctx, "cont", nil, nil); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("got %v, want %v", err, context.DeadlineExceeded)
	}
}

// TestEndlessMessage: a monitor that never ends a message is not listened to without end.
func TestEndlessMessage(t *testing.T) {
	ours, theirs := pair(t)
	q := newMonitor(ours, func(string, json.RawMessage) {})
	defer q.close()
	wrote := make(chan struct{})
	go func() {
		defer close(wrote)
		_, _ = theirs.Write([]byte(`{"return": "`))
		for piece, n := []byte(strings.Repeat("x", 64<<10)), 0; n < 2*maxMessage; n += len(piece) {
			if _, err := theirs.Write(piece); err != nil {
				return
			}
		}
	}()
	select {
	case <-q.closed:
	case <-wrote:
		t.Errorf("more than %d bytes of a message were read", maxMessage)
	}
}
