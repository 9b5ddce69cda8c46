package agentproto

// maxPending bounds the memory of messages that have begun and not ended.
const maxPending = 2 * MaxMessage

// Assembler joins frames into messages. Frames of different ids may alternate. The zero value is ready.
type Assembler struct {
	parts map[uint32]*part
	total int
}

type part struct {
	data []byte
	lost bool // too long: the rest is swallowed, the end is reported
}

// Add takes a frame. It returns the message when f is its last frame; ok is then true, and fits is false when the message was longer than
// the limits and msg is not usable. A message of one frame is f's own payload, not a copy.
func (a *Assembler) Add(f Frame) (msg []byte, fits, ok bool) {
	p := a.parts[f.ID]
	if p == nil && !f.More {
		return f.Payload, true, true
	}
	if p == nil {
		if a.parts == nil {
			a.parts = make(map[uint32]*part)
		}
		p = &part{}
		a.parts[f.ID] = p
	}
	if len(p.data)+len(f.Payload) > MaxMessage || a.total+len(f.Payload) > maxPending || len(a.parts) > MaxCommands*4 {
		p.lost = true
		a.total -= len(p.data)
		p.data = nil
	}
	if !p.lost {
		p.data = append(p.data, f.Payload...)
		a.total += len(f.Payload)
	}
	if f.More {
		return nil, true, false
	}
	delete(a.parts, f.ID)
	a.total -= len(p.data)
	return p.data, !p.lost, true
}

// Drop forgets a message that has begun and will not end.
func (a *Assembler) Drop(id uint32) {
	if p := a.parts[id]; p != nil {
		a.total -= len(p.data)
		delete(a.parts, id)
	}
}

// Reset forgets messages that have begun.
func (a *Assembler) Reset() {
	if len(a.parts) > 0 {
		clear(a.parts)
	}
	a.total = 0
}
