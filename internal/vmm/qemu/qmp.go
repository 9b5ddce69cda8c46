package qemu

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"sync"

	"golang.org/x/sys/unix"
)

// qmpMessage is anything QEMU says: a greeting, the answer to a command, or an event.
type qmpMessage struct {
	Greeting *json.RawMessage `json:"QMP"`
	Return   json.RawMessage  `json:"return"`
	Error    *qmpError        `json:"error"`
	Event    string           `json:"event"`
	Data     json.RawMessage  `json:"data"`
}

// qmpError is QEMU's refusal of a command.
type qmpError struct {
	Class string `json:"class"`
	Desc  string `json:"desc"`
}

func (e *qmpError) Error() string { return e.Desc }

// errMonitorClosed says that the QMP connection ended, which it does when QEMU does.
var errMonitorClosed = errors.New("QEMU's control connection closed")

// monitor is a QMP connection. Commands are answered in order, one at a time; events go to onEvent from the reading goroutine,
// which must not issue commands.
type monitor struct {
	conn    *net.UnixConn
	onEvent func(name string, data json.RawMessage)
	replies chan qmpMessage
	closed  chan struct{} // closed when the reader has ended

	turn chan struct{} // holds a value while a command is under way: one at a time

	mu        sync.Mutex
	abandoned int // commands whose answers nobody waits for any more; they come first
}

// maxMessage bounds what is read of one message. The longest are of a console: 64 KiB, of which each byte may take six.
const maxMessage = 4 << 20

func newMonitor(conn *net.UnixConn, onEvent func(string, json.RawMessage)) *monitor {
	q := &monitor{conn: conn, onEvent: onEvent, replies: make(chan qmpMessage, 1), closed: make(chan struct{}), turn: make(chan struct{}, 1)}
	go q.read()
	return q
}

func (q *monitor) read() {
	defer close(q.closed)
	bounded := &io.LimitedReader{R: q.conn}
	dec := json.NewDecoder(bounded)
	for {
		var m qmpMessage
		bounded.N = maxMessage // a guest may have taken QEMU over
		if err := dec.Decode(&m); err != nil {
			return
		}
		switch {
		case m.Event != "":
			q.onEvent(m.Event, m.Data)
		case m.Return != nil || m.Error != nil:
			q.deliver(m)
		}
	}
}

// deliver hands an answer to the command that waits for it.
func (q *monitor) deliver(m qmpMessage) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.abandoned > 0 {
		q.abandoned--
		return
	}
	select {
	case q.replies <- m:
	default: // QEMU says more than it was asked
	}
}

// negotiate leaves QMP's capabilities mode. The command may be written before the greeting arrives.
func (q *monitor) negotiate(ctx context.Context) error {
	return q.do(ctx, "qmp_capabilities", nil, nil)
}

// take waits for this command's turn.
func (q *monitor) take(ctx context.Context) (free func(), err error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	select {
	case q.turn <- struct{}{}:
		return func() { <-q.turn }, nil
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

// do runs one command. When ctx ends first QEMU may carry it out still; its answer is dropped when it comes, and the next command waits for that.
func (q *monitor) do(ctx context.Context, command string, args any, result any, files ...*os.File) error {
	free, err := q.take(ctx)
	if err != nil {
		return fmt.Errorf("%s: %w", command, err)
	}
	defer free()
	if err := q.send(command, args, files); err != nil {
		return fmt.Errorf("%s: %w", command, err)
	}
	m, err := q.answer(ctx, command)
	if err != nil || result == nil {
		return err
	}
	if err := json.Unmarshal(m.Return, result); err != nil {
		return fmt.Errorf("%s: answer: %w", command, err)
	}
	return nil
}

// answer waits for what QEMU says to the command that was sent.
func (q *monitor) answer(ctx context.Context, command string) (qmpMessage, error) {
	m, err := q.reply(ctx)
	switch {
	case err != nil:
		return m, fmt.Errorf("%s: %w", command, err)
	case m.Error != nil:
		return m, fmt.Errorf("%s: %w", command, m.Error)
	}
	return m, nil
}

func (q *monitor) reply(ctx context.Context) (qmpMessage, error) {
	select {
	case m := <-q.replies:
		return m, nil
	case <-ctx.Done():
		q.mu.Lock()
		defer q.mu.Unlock()
		select {
		case m := <-q.replies: // just in time
			return m, nil
		default:
		}
		q.abandoned++
		return qmpMessage{}, ctx.Err()
	case <-q.closed:
		select {
		case m := <-q.replies: // it was the last thing QEMU said
			return m, nil
		default:
			return qmpMessage{}, errMonitorClosed
		}
	}
}

// encode writes a command as QEMU reads it.
func encode(command string, args any) ([]byte, error) {
	return json.Marshal(struct {
		Execute   string `json:"execute"`
		Arguments any    `json:"arguments,omitempty"`
	}{command, args})
}

func (q *monitor) send(command string, args any, files []*os.File) error {
	b, err := encode(command, args)
	if err != nil {
		return err
	}
	if len(files) == 0 {
		_, err = q.conn.Write(b)
		return err
	}
	fds := make([]int, len(files))
	for i, f := range files {
		fds[i] = int(f.Fd())
	}
	_, _, err = q.conn.WriteMsgUnix(b, unix.UnixRights(fds...), nil)
	return err
}

// close ends the connection and waits for the reader.
func (q *monitor) close() {
	q.conn.Close()
	<-q.closed
}
