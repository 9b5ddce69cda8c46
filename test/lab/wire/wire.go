// Package wire is what the lab's two ends say to each other: frames that carry a command's start, its input and output, and its end.
//
// A connection carries one command after the other, so there are no ids: a command's frames lie between its Start and its Exit, and what
// comes for a command that has ended is dropped. It knows neither sockets nor processes.
package wire

import (
	"encoding/binary"
	"encoding/json"
	"fmt"
	"io"
)

// Kind of a frame.
type Kind byte

// Frames to the guest, then frames from it.
const (
	Start    Kind = 'r' // a Request; begins a command
	Stdin    Kind = 'i' // bytes for it
	Fetch    Kind = 'f' // where on the mailbox disk bytes for it are; takes the place of a large Stdin on the way to the guest
	StdinEnd Kind = 'e' // there is no more input
	Kill     Kind = 'k' // end the command and all it started

	Stdout Kind = 'o'
	Stderr Kind = 'x'
	Taken  Kind = 't' // four bytes, big endian: so much of the input was consumed
	Exit   Kind = 'q' // a Result; ends a command
)

const (
	// MaxPayload is the longest payload in bytes.
	MaxPayload = 256 << 10
	// Window is how many bytes of input may be under way. A Kill never waits behind more.
	Window = 4 << 20
	// MailFrom is the size in bytes from which input goes by the mailbox disk: a virtio port takes 4 KiB at a time, each with an
	// interrupt, which makes 3 MB/s where everything is emulated.
	MailFrom = 8 << 10
	// MailAlign is what places on the mailbox disk are multiples of.
	MailAlign = 4 << 10
	// MailRegion is a port's part of the mailbox disk, used in turn: twice what can be under way.
	MailRegion = 2 * Window
)

// Request is a command to run.
type Request struct {
	Args []string `json:"args"`
	Env  []string `json:"env,omitempty"` // added to the guest's own
	Dir  string   `json:"dir,omitempty"` // where it runs; empty: the lab's work directory
}

// Result is how a command ended.
type Result struct {
	Code  int    `json:"code"`            // as a shell has it: 128 and the signal's number for one that was killed
	Error string `json:"error,omitempty"` // why it could not be started
}

// Frame is a unit of the conversation.
type Frame struct {
	Kind    Kind
	Payload []byte
}

// Write writes a frame in one piece. Preconditions: the payload is not longer than MaxPayload.
func Write(w io.Writer, kind Kind, payload []byte) error {
	buf := make([]byte, 5, 5+len(payload))
	buf[0] = byte(kind)
	binary.BigEndian.PutUint32(buf[1:], uint32(len(payload)))
	_, err := w.Write(append(buf, payload...))
	return err
}

// WriteJSON writes a frame with a value in JSON.
func WriteJSON(w io.Writer, kind Kind, v any) error {
	b, err := json.Marshal(v)
	if err == nil && len(b) > MaxPayload {
		err = fmt.Errorf("%d bytes do not fit into a frame: give fewer or shorter arguments", len(b))
	}
	if err != nil {
		return fmt.Errorf("encode frame %q: %w", kind, err)
	}
	return Write(w, kind, b)
}

// Read reads a frame. The error is io.EOF when the other side closed the connection between two frames.
func Read(r io.Reader) (Frame, error) {
	var head [5]byte
	if _, err := io.ReadFull(r, head[:]); err != nil {
		return Frame{}, err
	}
	n := binary.BigEndian.Uint32(head[1:])
	if n > MaxPayload {
		return Frame{}, fmt.Errorf("frame %q of %d bytes: the limit is %d", head[0], n, MaxPayload)
	}
	f := Frame{Kind: Kind(head[0]), Payload: make([]byte, n)}
	if _, err := io.ReadFull(r, f.Payload); err != nil {
		return Frame{}, fmt.Errorf("frame %q is cut off: %w", head[0], io.ErrUnexpectedEOF)
	}
	return f, nil
}

// Place is a place on the mailbox disk, in bytes.
type Place struct {
	Offset int64 `json:"o"`
	Length int   `json:"n"`
}

// Count is the number in a Taken frame.
func Count(payload []byte) int {
	if len(payload) != 4 {
		return 0
	}
	return int(binary.BigEndian.Uint32(payload))
}

// CountPayload is the payload of a Taken frame.
func CountPayload(n int) []byte { return binary.BigEndian.AppendUint32(nil, uint32(n)) }
