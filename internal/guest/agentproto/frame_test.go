package agentproto

import (
	"bytes"
	"testing"

	"github.com/google/go-cmp/cmp"
)

var (
	ourToken   = Token{1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16}
	otherToken = Token{0: 99}
)

func helloFrame(kind Kind, token Token) []byte {
	h := Hello{Token: token, Version: ProtocolVersion}
	return AppendMessage(nil, kind, token.Session(), 0, h.AppendTo(nil))
}

func pingFrame(id uint32) []byte { return AppendMessage(nil, KindPing, ourToken.Session(), id, nil) }

func join(parts ...[]byte) []byte { return bytes.Join(parts, nil) }

// feed gives stream to d in pieces of at most n bytes and returns copies of the frames.
func feed(d *Decoder, stream []byte, n int) []Frame {
	var frames []Frame
	for len(stream) > 0 {
		k := copy(d.Space(), stream[:min(n, len(stream))])
		d.Filled(k)
		stream = stream[k:]
		for f, ok := d.Next(); ok; f, ok = d.Next() {
			f.Payload = bytes.Clone(f.Payload)
			frames = append(frames, f)
		}
	}
	return frames
}

func TestDecoder(t *testing.T) {
	hello := helloFrame(KindHello, ourToken)
	helloBytes := (&Hello{Token: ourToken, Version: ProtocolVersion}).AppendTo(nil)
	helloWant := Frame{Kind: KindHello, Session: ourToken.Session(), Payload: helloBytes}
	ping := func(id uint32) Frame {
		return Frame{Kind: KindPing, Session: ourToken.Session(), ID: id, Payload: []byte{}}
	}
	long := bytes.Repeat([]byte("x"), MaxPayload+1)
	half := AppendMessage(nil, KindExec, 7, 1, long)[:40000]
	spoiled := pingFrame(5)
	spoiled[len(spoiled)-1] ^= 1
	tests := []struct {
		name   string
		stream []byte
		want   []Frame
	}{
		{"nothing before hello", join(pingFrame(1), hello, pingFrame(2)), []Frame{helloWant, ping(2)}},
		{"garbage before hello", join([]byte("garbage \xa6\xa6\xd1"), hello, pingFrame(2)), []Frame{helloWant, ping(2)}},
		{"half a frame, padding, hello", join(hello, half, make([]byte, Padding), hello, pingFrame(3)), []Frame{helloWant, helloWant, ping(3)}},
		{"half a header, padding, hello", join(hello, half[:10], make([]byte, Padding), hello, pingFrame(3)), []Frame{helloWant, helloWant, ping(3)}},
		{"all but the trailer, padding, hello", join(hello, pingFrame(1)[:HeaderSize], make([]byte, Padding), hello), []Frame{helloWant, helloWant}},
		{"padding first", join(make([]byte, Padding), hello, pingFrame(3)), []Frame{helloWant, ping(3)}},
		{"spoiled trailer loses the rest until hello", join(hello, pingFrame(1), spoiled, pingFrame(2), hello, pingFrame(3)), []Frame{helloWant, ping(1), helloWant, ping(3)}},
		{"hello again in step", join(hello, hello, pingFrame(1)), []Frame{helloWant, helloWant, ping(1)}},
		{"hello ack is not hello", join(helloFrame(KindHelloAck, ourToken), hello), []Frame{helloWant}},
		{"two frames of a long message", join(hello, AppendMessage(nil, KindExec, 7, 9, long)), []Frame{
			helloWant, {Kind: KindExec, More: true, Session: 7, ID: 9, Payload: long[:MaxPayload]}, {Kind: KindExec, Session: 7, ID: 9, Payload: long[MaxPayload:]},
		}},
		{"too long a payload is no frame", join(hello, AppendHeader(nil, KindPing, false, 1, 1, MaxPayload+1), hello), []Frame{helloWant, helloWant}},
		{"unknown kind is no frame", join(hello, AppendTrailer(AppendHeader(nil, kindEnd, false, 1, 1, 0)), hello), []Frame{helloWant, helloWant}},
	}
	for _, tc := range tests {
		for _, n := range []int{1, 3, 1000, 1 << 20} {
			if n == 1 && len(tc.stream) > 200000 {
				continue
			}
			t.Run(tc.name, func(t *testing.T) {
				got := feed(NewDecoder(KindHello, nil), tc.stream, n)
				if diff := cmp.Diff(got, tc.want); diff != "" {
					t.Errorf("frames in pieces of %d bytes (-got +want):\n%s", n, diff)
				}
			})
		}
	}
}

func TestDecoderWaitsForItsToken(t *testing.T) {
	stale := AppendMessage(nil, KindPong, otherToken.Session(), 1, []byte("stale"))
	stream := join(stale, helloFrame(KindHelloAck, otherToken), stale[:len(stale)-3], helloFrame(KindHelloAck, ourToken), pingFrame(1))
	d := NewDecoder(KindHelloAck, &ourToken)
	var kinds []Kind
	for _, f := range feed(d, stream, 7) {
		if f.Session != ourToken.Session() {
			t.Errorf("frame of session %d came through, want only %d", f.Session, ourToken.Session())
		}
		kinds = append(kinds, f.Kind)
	}
	if diff := cmp.Diff(kinds, []Kind{KindHelloAck, KindPing}); diff != "" {
		t.Errorf("kinds (-got +want):\n%s", diff)
	}
}

func TestDecoderStaysSmall(t *testing.T) {
	d := NewDecoder(KindHello, nil)
	feed(d, join(helloFrame(KindHello, ourToken), bytes.Repeat(pingFrame(1), 10000)), 1<<20)
	if got, want := len(d.buf), 4<<10; got != want {
		t.Errorf("buffer after small frames: got %d bytes, want %d", got, want)
	}
	feed(d, AppendMessage(nil, KindExec, 1, 1, make([]byte, 10*MaxPayload)), 1<<20)
	if got, want := len(d.buf), MaxFrame; got > want {
		t.Errorf("buffer after big frames: got %d bytes, want at most %d", got, want)
	}
}

func TestReset(t *testing.T) {
	d := NewDecoder(KindHello, nil)
	feed(d, join(helloFrame(KindHello, ourToken), pingFrame(1)[:20]), 100)
	d.Reset()
	if d.InStep() {
		t.Error("in step after Reset")
	}
	if got := len(feed(d, join(pingFrame(1), helloFrame(KindHello, ourToken)), 100)); got != 1 {
		t.Errorf("frames after Reset: got %d, want 1", got)
	}
}

func FuzzDecoder(f *testing.F) {
	hello := helloFrame(KindHello, otherToken)
	f.Add([]byte{}, uint16(1))
	f.Add(join(hello, pingFrame(1)), uint16(5))
	f.Add(join(hello, AppendMessage(nil, KindExec, 1, 2, make([]byte, 70000))[:66000]), uint16(4096))
	f.Add(AppendHeader(nil, KindEval, true, 1, 2, MaxPayload), uint16(3))
	f.Fuzz(func(t *testing.T, garbage []byte, n uint16) {
		d := NewDecoder(KindHello, nil)
		// Whatever an earlier host has left: padding and hello bring the reader into step.
		frames := feed(d, join(garbage, make([]byte, Padding), helloFrame(KindHello, ourToken), pingFrame(77)), int(n)+1)
		for _, fr := range frames {
			if len(fr.Payload) > MaxPayload {
				t.Fatalf("payload of %d bytes", len(fr.Payload))
			}
		}
		if len(frames) < 2 {
			t.Fatalf("got %d frames, want hello and ping at the end", len(frames))
		}
		last := frames[len(frames)-2:]
		if last[0].Kind != KindHello || last[0].Session != ourToken.Session() || last[1].ID != 77 {
			t.Errorf("last frames: got %+v, want our hello and ping 77", last)
		}
	})
}

func BenchmarkDecodePing(b *testing.B) {
	d := NewDecoder(KindHello, nil)
	feed(d, helloFrame(KindHello, ourToken), 100)
	frame := pingFrame(1)
	b.ReportAllocs()
	for b.Loop() {
		d.Filled(copy(d.Space(), frame))
		if _, ok := d.Next(); !ok {
			b.Fatal("no frame")
		}
	}
}
