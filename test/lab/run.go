package lab

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"strings"
	"sync"

	"github.com/forkd/forkd/test/lab/guest"
	"github.com/forkd/forkd/test/lab/wire"
)

// Command is one to run in the lab.
type Command struct {
	Args           []string
	Env            []string // added to the lab's own
	Dir            string   // default: the work directory
	Stdin          io.Reader
	Stdout, Stderr io.Writer // nil: dropped
}

// Run runs a command and returns its exit code: 128 and the signal's number if a signal ended it. When ctx ends the command is killed with
// all it started.
func (l *Lab) Run(ctx context.Context, c Command) (int, error) {
	conn, err := l.dial(ctx)
	if err != nil {
		return -1, fmt.Errorf("reach the lab: %w", err)
	}
	stop := context.AfterFunc(ctx, func() { conn.Close() })
	defer func() {
		stop()
		conn.Close()
	}()
	if err := wire.WriteJSON(conn, wire.Start, wire.Request{Args: c.Args, Env: c.Env, Dir: c.Dir}); err != nil {
		return -1, fmt.Errorf("run %s in the lab: %w", c.Args[0], err)
	}
	in := &input{conn: conn, room: wire.Window}
	in.changed.L = &in.mu
	go in.send(c.Stdin) // ends with the connection, or with the reader; nobody waits for a terminal that is being read
	defer in.close()
	res, err := receive(conn, c, in)
	if ctx.Err() != nil {
		return -1, context.Cause(ctx)
	}
	if err != nil {
		return -1, fmt.Errorf("run %s in the lab: %w", c.Args[0], err)
	}
	if res.Error != "" {
		return res.Code, fmt.Errorf("run %s in the lab: %s", c.Args[0], res.Error)
	}
	return res.Code, nil
}

// receive hands on the output until the command has ended.
func receive(conn net.Conn, c Command, in *input) (res wire.Result, err error) {
	for {
		f, err := wire.Read(conn)
		if errors.Is(err, io.EOF) {
			return res, errors.New("the lab has ended")
		}
		if err != nil {
			return res, err
		}
		switch f.Kind {
		case wire.Stdout:
			err = hand(c.Stdout, f.Payload)
		case wire.Stderr:
			err = hand(c.Stderr, f.Payload)
		case wire.Taken:
			in.taken(wire.Count(f.Payload))
		case wire.Exit:
			return res, json.Unmarshal(f.Payload, &res)
		}
		if err != nil {
			return res, fmt.Errorf("output: %w", err)
		}
	}
}

func hand(w io.Writer, b []byte) error {
	if w == nil {
		return nil
	}
	_, err := w.Write(b)
	return err
}

// input sends a command's input, never more than a window ahead of what the command has read.
type input struct {
	conn net.Conn

	mu      sync.Mutex
	changed sync.Cond
	room    int
	closed  bool
}

func (in *input) send(r io.Reader) {
	if r == nil {
		r = bytes.NewReader(nil)
	}
	buf := make([]byte, wire.MaxPayload)
	for {
		n, err := r.Read(buf)
		if n > 0 && (!in.take(n) || wire.Write(in.conn, wire.Stdin, buf[:n]) != nil) {
			return
		}
		if err != nil {
			_ = wire.Write(in.conn, wire.StdinEnd, nil) // the command may have ended
			return
		}
	}
}

// take waits for room for n bytes.
func (in *input) take(n int) bool {
	in.mu.Lock()
	defer in.mu.Unlock()
	for in.room < n && !in.closed {
		in.changed.Wait()
	}
	in.room -= n
	return !in.closed
}

func (in *input) taken(n int) {
	in.mu.Lock()
	defer in.mu.Unlock()
	in.room += n
	in.changed.Signal()
}

func (in *input) close() {
	in.mu.Lock()
	defer in.mu.Unlock()
	in.closed = true
	in.changed.Signal()
}

// Put copies a file or a directory into the lab, to the path dst. What it is already there with the same sizes and times is not sent again.
func (l *Lab) Put(ctx context.Context, src, dst string) error {
	key, err := fingerprint(src)
	if err != nil {
		return fmt.Errorf("copy to the lab: %w", err)
	}
	if !path.IsAbs(dst) {
		dst = path.Join(guest.WorkDir, dst)
	}
	mark := path.Join(guest.WorkDir, ".put", strings.ReplaceAll(dst, "/", "+"))
	if code, err := l.Run(ctx, Command{Args: []string{"sh", "-c", `[ "$(cat "$0" 2>/dev/null)" = "$1" ] && [ -e "$2" ]`, mark, key, dst}}); err != nil || code == 0 {
		return err
	}
	const unpack = `set -e; rm -rf "$2"; mkdir -p "${2%/*}" "${0%/*}"; cd "${2%/*}"; tar -xf - --no-same-owner --transform="s|^[^/]*|${2##*/}|S"; echo "$1" >"$0"`
	tar := exec.CommandContext(ctx, "tar", "-C", filepath.Dir(src), "-cf", "-", "--sparse", filepath.Base(src))
	out, err := tar.StdoutPipe()
	if err != nil {
		return fmt.Errorf("copy to the lab: %w", err)
	}
	var complaint bytes.Buffer
	tar.Stderr = &complaint
	if err := tar.Start(); err != nil {
		return fmt.Errorf("copy to the lab: %w", err)
	}
	var said bytes.Buffer
	code, err := l.Run(ctx, Command{Args: []string{"sh", "-c", unpack, mark, key, dst}, Stdin: full{out}, Stderr: &said})
	if err == nil && code != 0 {
		err = fmt.Errorf("exit code %d: %s", code, said.String())
	}
	if err != nil {
		_ = tar.Process.Kill()
	}
	// 1: something changed meanwhile, a link to a file perhaps (tar(1), "RETURN VALUE").
	if werr := tar.Wait(); err == nil && werr != nil && tar.ProcessState.ExitCode() != 1 {
		err = fmt.Errorf("tar: %w: %s", werr, complaint.String())
	}
	if err != nil {
		return fmt.Errorf("copy %s to the lab: %w", src, err)
	}
	return nil
}

// full reads as much as there is room for: a frame costs more than its bytes.
type full struct{ r io.Reader }

func (f full) Read(p []byte) (int, error) {
	n, err := io.ReadFull(f.r, p)
	if errors.Is(err, io.ErrUnexpectedEOF) {
		err = io.EOF
	}
	return n, err
}

// fingerprint tells whether a file or a tree has changed, by names, sizes and times.
func fingerprint(root string) (string, error) {
	var all strings.Builder
	err := filepath.Walk(root, func(name string, info os.FileInfo, err error) error {
		if err == nil {
			fmt.Fprintf(&all, "%s %d %d %v\n", name, info.Size(), info.ModTime().UnixNano(), info.Mode())
		}
		return err
	})
	return digest(all.String()), err
}

// Get copies a file or a directory out of the lab, into the directory dir.
func (l *Lab) Get(ctx context.Context, src, dir string) error {
	if !path.IsAbs(src) {
		src = path.Join(guest.WorkDir, src)
	}
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return fmt.Errorf("copy from the lab: %w", err)
	}
	tar := exec.CommandContext(ctx, "tar", "-C", dir, "-xf", "-", "--no-same-owner")
	in, err := tar.StdinPipe()
	if err != nil {
		return fmt.Errorf("copy from the lab: %w", err)
	}
	var complaint, said bytes.Buffer
	tar.Stderr = &complaint
	if err := tar.Start(); err != nil {
		return fmt.Errorf("copy from the lab: %w", err)
	}
	code, err := l.Run(ctx, Command{Args: []string{"tar", "-C", path.Dir(src), "-cf", "-", path.Base(src)}, Stdout: in, Stderr: &said})
	in.Close()
	if err == nil && code != 0 {
		err = fmt.Errorf("exit code %d: %s", code, said.String())
	}
	if werr := tar.Wait(); err == nil && werr != nil {
		err = fmt.Errorf("tar: %w: %s", werr, complaint.String())
	}
	if err != nil {
		return fmt.Errorf("copy %s from the lab: %w", src, err)
	}
	return nil
}
