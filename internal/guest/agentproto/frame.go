package agentproto

// Kind says what a frame's message is.
type Kind uint8

// Kinds of messages.
const (
	KindHello Kind = 1 + iota
	KindHelloAck
	KindPing
	KindPong
	KindIdentity
	KindIdentityAck
	KindExec
	KindExecResult
	KindEval
	KindEvalResult
	KindCancel // its id is the one of the request to cancel; no answer
	KindQuiesce
	KindQuiesceAck
	KindError  // answers any request
	KindNotice // from the guest; its id is 0
	kindEnd
)

// Sizes of the parts of a frame.
const (
	HeaderSize  = 24
	TrailerSize = 4
	MaxFrame    = HeaderSize + MaxPayload + TrailerSize
	Padding     = MaxFrame // zero bytes that complete and spoil any half-written frame
	HelloSize   = 18       // payload of HELLO and HELLO_ACK
)

const (
	headerMagic  uint32 = 0xf07bd1a6
	trailerMagic uint32 = 0x5ee0d7e3
	flagMore     byte   = 1
)

// Frame is one frame. A frame from a Decoder has a payload that is valid until the decoder is filled again.
type Frame struct {
	Kind    Kind
	More    bool // another frame of the same message follows
	Session uint64
	ID      uint32
	Payload []byte
}

// AppendHeader appends the header of a frame whose payload has n bytes.
// Preconditions: n is at most MaxPayload; n bytes of payload and AppendTrailer follow.
func AppendHeader(dst []byte, kind Kind, more bool, session uint64, id uint32, n int) []byte {
	var flags byte
	if more {
		flags = flagMore
	}
	dst = append32(dst, headerMagic)
	dst = append(dst, byte(kind), flags, 0, 0)
	dst = append64(dst, session)
	dst = append32(dst, id)
	return append32(dst, uint32(n))
}

// AppendTrailer appends the end of a frame.
func AppendTrailer(dst []byte) []byte { return append32(dst, trailerMagic) }

// AppendMessage appends a whole message in as many frames as it needs.
func AppendMessage(dst []byte, kind Kind, session uint64, id uint32, msg []byte) []byte {
	for {
		part := msg
		if len(part) > MaxPayload {
			part = part[:MaxPayload]
		}
		msg = msg[len(part):]
		dst = AppendHeader(dst, kind, len(msg) > 0, session, id, len(part))
		dst = append(dst, part...)
		dst = AppendTrailer(dst)
		if len(msg) == 0 {
			return dst
		}
	}
}

// Decoder cuts a stream of bytes into frames. It starts out of step and gets into step with a frame of the kind it was made for; a bad
// frame puts it out of step again. The zero value is not usable.
type Decoder struct {
	buf    []byte
	r, w   int // buf[r:w] was read and not yet decoded
	sync   Kind
	token  *Token // nil: any
	inStep bool
}

// NewDecoder returns a decoder that gets into step with a Hello of the given kind and, unless token is nil, that token.
func NewDecoder(sync Kind, token *Token) *Decoder {
	return &Decoder{buf: make([]byte, 4<<10), sync: sync, token: token}
}

// InStep says whether the decoder knows where frames begin.
func (d *Decoder) InStep() bool { return d.inStep }

// Reset forgets everything that was read.
func (d *Decoder) Reset() {
	d.r, d.w = 0, 0
	d.inStep = false
}

// Space returns where the next bytes of the stream go; it is never empty. Filled then says how many came. It ends the life of the
// payloads of earlier frames.
func (d *Decoder) Space() []byte {
	if d.r == d.w {
		d.r, d.w = 0, 0
	}
	if d.w < len(d.buf) {
		return d.buf[d.w:]
	}
	if d.r > 0 {
		d.w = copy(d.buf, d.buf[d.r:d.w])
		d.r = 0
		return d.buf[d.w:]
	}
	// One frame fills the buffer: it is the only reason to grow, so that an idle decoder stays small.
	grown := make([]byte, min(4*len(d.buf), MaxFrame))
	d.w = copy(grown, d.buf[:d.w])
	d.buf = grown
	return d.buf[d.w:]
}

// Filled says that n bytes were put into Space.
func (d *Decoder) Filled(n int) { d.w += n }

// Next returns the next whole frame, or false when more bytes are needed.
func (d *Decoder) Next() (Frame, bool) {
	for d.w-d.r >= HeaderSize {
		f, size, ok := d.frame()
		if !ok {
			d.skip()
			continue
		}
		if size == 0 {
			return Frame{}, false
		}
		d.r += size
		d.inStep = true
		return f, true
	}
	return Frame{}, false
}

// frame decodes the frame at the front. A size of 0 means that it is not complete yet; false means that there is no acceptable frame.
func (d *Decoder) frame() (Frame, int, bool) {
	b := d.buf[d.r:d.w]
	kind := Kind(b[4])
	n := le32(b[20:])
	if le32(b) != headerMagic || kind == 0 || kind >= kindEnd || b[5] > flagMore || b[6]|b[7] != 0 || n > MaxPayload {
		return Frame{}, 0, false
	}
	if !d.inStep && (kind != d.sync || n != HelloSize) {
		return Frame{}, 0, false
	}
	size := HeaderSize + int(n) + TrailerSize
	if len(b) < size {
		return Frame{}, 0, true
	}
	if le32(b[HeaderSize+n:]) != trailerMagic {
		return Frame{}, 0, false
	}
	payload := b[HeaderSize : HeaderSize+n : HeaderSize+n]
	if !d.inStep && d.token != nil && Token(payload[:16]) != *d.token {
		return Frame{}, 0, false
	}
	return Frame{Kind: kind, More: b[5] == flagMore, Session: le64(b[8:]), ID: le32(b[16:]), Payload: payload}, size, true
}

// skip goes out of step and on to the next place where a header may begin.
func (d *Decoder) skip() {
	d.inStep = false
	first := byte(headerMagic & 0xff)
	for d.r++; d.r < d.w && d.buf[d.r] != first; {
		d.r++
	}
}
