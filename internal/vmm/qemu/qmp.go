package qemu

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
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

	mu sync.Mutex // one command at a time
}

func newMonitor(conn *net.UnixConn, onEvent func(string, json.RawMessage)) *monitor {
	q := &monitor{conn: conn, onEvent: onEvent, replies: make(chan qmpMessage, 1), closed: make(chan struct{})}
	go q.read()
	return q
}

func (q *monitor) read() {
	defer close(q.closed)
	dec := json.NewDecoder(q.conn)
	for {
		var m qmpMessage
		if err := dec.Decode(&m); err != nil {
			return
		}
		switch {
		case m.Event != "":
			q.onEvent(m.Event, m.Data)
		case m.Return != nil || m.Error != nil:
			select {
			case q.replies <- m:
			default: // an answer nobody waits for any more: its caller gave up and the connection is being closed
			}
		}
	}
}

// negotiate leaves QMP's capabilities mode. The command may be written before the greeting arrives.
func (q *monitor) negotiate(ctx context.Context) error {
	return q.do(ctx, "qmp_capabilities", nil, nil)
}

// do runs one command. A call that ends early (ctx) closes the connection: a late answer would be taken for the next one's.
func (q *monitor) do(ctx context.Context, command string, args any, result any, files ...*os.File) error {
	q.mu.Lock()
	defer q.mu.Unlock()
	if err := ctx.Err(); err != nil {
		return fmt.Errorf("%s: %w", command, err)
	}
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
		q.conn.Close()
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
