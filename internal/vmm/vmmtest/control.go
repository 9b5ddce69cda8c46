package vmmtest

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"

	"golang.org/x/sys/unix"

	"github.com/forkd/forkd/internal/vmm"
)

// The control protocol between a Fake and its machines: one connection carries one request, a line of JSON that may come with one
// descriptor, and one reply.

// op is what a machine is asked to do.
type op string

const (
	opHello  op = "hello"
	opLoad   op = "load" // with the device state's descriptor
	opPause  op = "pause"
	opResume op = "resume"
	opSave   op = "save" // with the descriptor to write to
	opFile   op = "file" // with a descriptor to keep
	opQuit   op = "quit" // the guest shuts down
)

// controlLimit is the longest request or reply in bytes.
const controlLimit = 64 << 10

type request struct {
	Op    op
	Guest map[Step]Action `json:",omitempty"` // opLoad: failures that the guest plays
}

type reply struct {
	Error string `json:",omitempty"`
	FD    int    `json:",omitempty"` // opFile
}

// call sends one request to the machine in dir and returns its reply. It ends with ctx.
func call(ctx context.Context, dir string, req request, f *os.File) (reply, error) {
	conn, err := dial(ctx, dir, controlSocket)
	if err != nil {
		return reply{}, err
	}
	defer conn.Close()
	stop := context.AfterFunc(ctx, func() { conn.Close() })
	defer stop()
	r, err := exchange(conn, req, f)
	if ctx.Err() != nil {
		return reply{}, context.Cause(ctx)
	}
	if err != nil {
		if errors.Is(err, unix.ECONNRESET) {
			err = fmt.Errorf("%w: %w", err, vmm.ErrGone) // it died with our question unread
		}
		return reply{}, fmt.Errorf("ask the fake machine to %s: %w", req.Op, err)
	}
	if r.Error != "" {
		return r, fmt.Errorf("fake machine: %s: %s", req.Op, r.Error)
	}
	return r, nil
}

func exchange(conn *net.UnixConn, req request, f *os.File) (reply, error) {
	line, err := json.Marshal(req)
	if err != nil {
		return reply{}, err
	}
	var rights []byte
	if f != nil {
		rights = unix.UnixRights(int(f.Fd()))
	}
	if _, _, err := conn.WriteMsgUnix(append(line, '\n'), rights, nil); err != nil {
		return reply{}, err
	}
	var r reply
	line, err = bufio.NewReader(io.LimitReader(conn, controlLimit)).ReadBytes('\n')
	if err != nil {
		return reply{}, err
	}
	return r, json.Unmarshal(line, &r)
}

// receive reads a request and the descriptor that came with it, if one did.
func receive(conn *net.UnixConn) (request, *os.File, error) {
	buf, oob := make([]byte, controlLimit), make([]byte, unix.CmsgSpace(4))
	n, oobn, _, _, err := conn.ReadMsgUnix(buf, oob)
	if err != nil {
		return request{}, nil, err
	}
	f, err := right(oob[:oobn])
	if err != nil {
		return request{}, nil, err
	}
	var req request
	if err := json.Unmarshal(buf[:n], &req); err != nil {
		return request{}, f, err
	}
	return req, f, nil
}

// right returns the descriptor in a control message, or nil.
func right(oob []byte) (*os.File, error) {
	if len(oob) == 0 {
		return nil, nil
	}
	messages, err := unix.ParseSocketControlMessage(oob)
	if err != nil {
		return nil, err
	}
	if len(messages) != 1 {
		return nil, errors.New("more than one control message")
	}
	fds, err := unix.ParseUnixRights(&messages[0])
	if err != nil {
		return nil, err
	}
	if len(fds) != 1 {
		return nil, fmt.Errorf("%d descriptors, want 1", len(fds))
	}
	unix.CloseOnExec(fds[0])
	return os.NewFile(uintptr(fds[0]), "received"), nil
}
