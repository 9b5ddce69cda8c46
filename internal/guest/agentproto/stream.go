package agentproto

import (
	"encoding/binary"
	"fmt"
)

// A stream is what the host and the agent say to each other over vsock. Its connections break when the machine is frozen, in the machine
// that goes on as well; the stream goes on over the next one. Each connection begins with a StreamHeader from the host, which the agent
// answers with one of its own. From then on each side sends the stream's bytes, beginning with the first that the other has not received.

// StreamHeaderSize is the length of a StreamHeader in bytes.
const StreamHeaderSize = 28

// StreamKeep is how many of the newest bytes that it has sent each side keeps to send them again: more than what can be on its way, in
// the buffers of the guest, the monitor and the host.
const StreamKeep = 1 << 20

const streamMagic = "FKS1"

// StreamID tells streams apart. The zero value is none.
type StreamID [16]byte

// StreamHeader is the first thing that each side sends on a connection.
type StreamHeader struct {
	ID       StreamID // of the host's choice; the agent answers with the same, or with zero when it can't go on with that stream
	Received uint64   // bytes of the stream that the sender has received; 0 in a new stream
}

// AppendTo appends the header's bytes to dst.
func (h StreamHeader) AppendTo(dst []byte) []byte {
	dst = append(append(dst, streamMagic...), h.ID[:]...)
	return binary.LittleEndian.AppendUint64(dst, h.Received)
}

// Decode reads a header.
func (h *StreamHeader) Decode(b []byte) error {
	if len(b) != StreamHeaderSize || string(b[:4]) != streamMagic {
		return fmt.Errorf("%w: header of a stream", ErrMalformed)
	}
	copy(h.ID[:], b[4:])
	h.Received = binary.LittleEndian.Uint64(b[20:])
	return nil
}

// Sent keeps the newest bytes that one side of a stream has sent.
type Sent struct {
	Total uint64 // bytes sent since the stream began
	kept  []byte
}

// Add takes note of bytes that are sent. With all, none that is kept is given up: there is no connection, and nothing arrives.
func (s *Sent) Add(b []byte, all bool) {
	s.Total += uint64(len(b))
	if !all && len(s.kept)+len(b) > 2*StreamKeep {
		s.kept = append(s.kept[:0], s.kept[max(0, len(s.kept)-StreamKeep):]...)
	}
	s.kept = append(s.kept, b...)
}

// Kept is how many bytes are kept.
func (s *Sent) Kept() int { return len(s.kept) }

// Since returns the bytes that follow the first n of the stream. They are valid until the next Add.
func (s *Sent) Since(n uint64) ([]byte, error) {
	if n > s.Total || s.Total-n > uint64(len(s.kept)) {
		return nil, fmt.Errorf("%w: stream goes on at byte %d, of %d to %d that are kept", ErrMalformed, n, s.Total-uint64(len(s.kept)), s.Total)
	}
	return s.kept[uint64(len(s.kept))-(s.Total-n):], nil
}
