package firecracker

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

const (
	callLimit     = 10 * time.Second // for any call but those that say how long they may take
	maxAnswer     = 256 << 10        // bytes of an answer, header included
	maxFaultWords = 400              // bytes of Firecracker's own words in an error
)

// call is one request to Firecracker's API.
type call struct {
	step   string // what it is for, for errors: "set the machine's shape"
	method string
	path   string
	body   any           // nil: none
	result any           // the answer's body is decoded into it; nil: it is dropped
	limit  time.Duration // 0: callLimit
}

// refusal is Firecracker's own word that it won't do something. The machine is as it was.
type refusal struct {
	step    string
	status  int
	message string
}

func (r *refusal) Error() string {
	return fmt.Sprintf("%s: Firecracker refused (%d): %s", r.step, r.status, r.message)
}

// errBroken says that the connection to the API broke, or what came over it was no answer. Whether the call was carried out is not known.
var errBroken = errors.New("connection to Firecracker's API broke")

// api is a client of one Firecracker's API. One connection serves its life; calls follow each other.
type api struct {
	dir string

	mu   sync.Mutex // one call at a time
	conn net.Conn   // nil: none, or it broke
	in   *bufio.Reader
	cap  *io.LimitedReader // bounds what in takes from conn for one answer
}

// openIn opens a name in a machine's directory. That is the monitor's, which may have put anything there: a symbolic link is not followed, a pipe
// not waited for, and what it is must be seen afterwards. The daemon can go where the monitor can't.
func openIn(dir, name string, flags int) (*os.File, error) {
	d, err := os.Open(dir)
	if err != nil {
		return nil, err
	}
	defer d.Close()
	fd, err := unix.Openat(int(d.Fd()), name, flags|unix.O_NOFOLLOW|unix.O_NONBLOCK|unix.O_CLOEXEC, 0o600)
	if err != nil {
		return nil, &os.PathError{Op: "open", Path: filepath.Join(dir, name), Err: err}
	}
	return os.NewFile(uintptr(fd), filepath.Join(dir, name)), nil
}

// dialIn connects to a socket in dir, by a path that is short: the kernel takes 107 bytes for a socket's.
func dialIn(ctx context.Context, dir, name string) (net.Conn, error) {
	f, err := openIn(dir, name, unix.O_PATH)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	var st unix.Stat_t
	if err := unix.Fstat(int(f.Fd()), &st); err != nil {
		return nil, err
	}
	if st.Mode&unix.S_IFMT != unix.S_IFSOCK {
		return nil, fmt.Errorf("%s is no socket", f.Name())
	}
	conn, err := (&net.Dialer{}).DialContext(ctx, "unix", fdPath(int(f.Fd())))
	if errors.Is(err, context.DeadlineExceeded) { // the dialer's own word for the end of ctx, a moment before ctx says so
		err = fmt.Errorf("%w: %w", context.DeadlineExceeded, err)
	}
	return conn, err
}

// connect makes the connection. Preconditions: a.mu is held, or a is not shared yet.
func (a *api) connect(ctx context.Context) error {
	conn, err := dialIn(ctx, a.dir, apiSocket)
	if err != nil {
		return err
	}
	a.conn, a.cap = conn, &io.LimitedReader{R: conn}
	a.in = bufio.NewReader(a.cap)
	return nil
}

// close ends the connection. A call that is under way fails.
func (a *api) close() {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.drop()
}

func (a *api) drop() {
	if a.conn != nil {
		a.conn.Close()
		a.conn = nil
	}
}

// do makes a call. When it ends early, or the answer is none, the connection is given up: a late answer would be taken for the next one's.
func (a *api) do(ctx context.Context, c call) error {
	limit := c.limit
	if limit == 0 {
		limit = callLimit
	}
	ctx, cancel := context.WithTimeoutCause(ctx, limit, fmt.Errorf("no answer from Firecracker within %v: %w", limit, context.DeadlineExceeded))
	defer cancel()
	a.mu.Lock()
	defer a.mu.Unlock()
	if err := context.Cause(ctx); err != nil {
		return fmt.Errorf("%s: %w", c.step, err)
	}
	if a.conn == nil {
		if err := a.connect(ctx); err != nil {
			return fmt.Errorf("%s: %w: %w", c.step, errBroken, err)
		}
	}
	conn := a.conn
	stop := context.AfterFunc(ctx, func() { conn.SetDeadline(time.Unix(1, 0)) })
	err := a.roundTrip(c)
	if !stop() && err == nil {
		a.drop() // the answer came at the last moment, the deadline after it
	}
	var refused *refusal
	if err == nil || errors.As(err, &refused) {
		return err
	}
	a.drop()
	if cause := context.Cause(ctx); cause != nil {
		return fmt.Errorf("%s: %w", c.step, cause)
	}
	return fmt.Errorf("%s: %w: %w", c.step, errBroken, err)
}

func (a *api) roundTrip(c call) error {
	request, err := encode(c)
	if err != nil {
		return err
	}
	a.cap.N = maxAnswer
	if _, err := a.conn.Write(request); err != nil {
		return err
	}
	answer, err := http.ReadResponse(a.in, &http.Request{Method: c.method})
	if err != nil {
		return fmt.Errorf("answer: %w", err)
	}
	body, err := io.ReadAll(answer.Body)
	if err != nil {
		return fmt.Errorf("answer: %w", err)
	}
	if answer.StatusCode >= 300 || answer.StatusCode < 200 {
		return &refusal{step: c.step, status: answer.StatusCode, message: fault(body)}
	}
	if c.result == nil {
		return nil
	}
	if err := json.Unmarshal(body, c.result); err != nil {
		return fmt.Errorf("answer: %w", err)
	}
	return nil
}

// encode writes a request as one piece, so that it takes one system call.
func encode(c call) ([]byte, error) {
	var body []byte
	if c.body != nil {
		var err error
		if body, err = json.Marshal(c.body); err != nil {
			return nil, err
		}
	}
	var b bytes.Buffer
	fmt.Fprintf(&b, "%s %s HTTP/1.1\r\nHost: localhost\r\nAccept: application/json\r\n", c.method, c.path)
	if body != nil {
		fmt.Fprintf(&b, "Content-Type: application/json\r\nContent-Length: %d\r\n", len(body))
	}
	b.WriteString("\r\n")
	b.Write(body)
	return b.Bytes(), nil
}

// fault is what Firecracker says is wrong.
func fault(body []byte) string {
	var f struct {
		Message string `json:"fault_message"`
	}
	text := string(bytes.TrimSpace(body))
	if json.Unmarshal(body, &f) == nil && f.Message != "" {
		text = f.Message
	}
	if len(text) > maxFaultWords {
		text = text[:maxFaultWords] + "…"
	}
	if text == "" {
		text = "no reason given"
	}
	return text
}
