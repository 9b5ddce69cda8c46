package agentproto

import (
	"bytes"
	"testing"
)

func TestAssemblerJoinsFramesThatAlternate(t *testing.T) {
	var a Assembler
	steps := []struct {
		frame Frame
		want  string // "" while the message is not complete
	}{
		{Frame{ID: 1, More: true, Payload: []byte("a")}, ""},
		{Frame{ID: 2, More: true, Payload: []byte("x")}, ""},
		{Frame{ID: 3, Payload: []byte("whole")}, "whole"},
		{Frame{ID: 1, More: true, Payload: []byte("b")}, ""},
		{Frame{ID: 2, Payload: []byte("y")}, "xy"},
		{Frame{ID: 1, Payload: []byte("c")}, "abc"},
		{Frame{ID: 1, Payload: []byte("again")}, "again"},
	}
	for i, s := range steps {
		msg, fits, done := a.Add(s.frame)
		if done != (s.want != "") || !fits || string(msg) != s.want {
			t.Errorf("step %d: got %q, fits %v, done %v, want %q", i, msg, fits, done, s.want)
		}
	}
	if a.total != 0 || len(a.parts) != 0 {
		t.Errorf("left over: %d bytes, %d parts, want none", a.total, len(a.parts))
	}
}

func TestAssemblerBoundsMessages(t *testing.T) {
	var a Assembler
	chunk := make([]byte, MaxPayload)
	for range MaxMessage/MaxPayload + 10 {
		if _, _, done := a.Add(Frame{ID: 1, More: true, Payload: chunk}); done {
			t.Fatal("done before the last frame")
		}
	}
	if a.total > MaxMessage {
		t.Errorf("memory of a message that is too long: got %d bytes, want at most %d", a.total, MaxMessage)
	}
	if _, fits, done := a.Add(Frame{ID: 1, Payload: chunk}); fits || !done {
		t.Errorf("end of a message that is too long: got fits %v, done %v, want false, true", fits, done)
	}
	if msg, fits, done := a.Add(Frame{ID: 1, Payload: []byte("ok")}); !fits || !done || !bytes.Equal(msg, []byte("ok")) {
		t.Errorf("next message of the id: got %q, %v, %v", msg, fits, done)
	}
}

func TestAssemblerBoundsItsMemory(t *testing.T) {
	var a Assembler
	chunk := make([]byte, MaxPayload)
	for id := range uint32(100) {
		for range MaxMessage / MaxPayload / 4 {
			a.Add(Frame{ID: id, More: true, Payload: chunk})
		}
	}
	if a.total > maxPending {
		t.Errorf("pending: got %d bytes, want at most %d", a.total, maxPending)
	}
}

func TestAssemblerDropAndReset(t *testing.T) {
	var a Assembler
	a.Add(Frame{ID: 1, More: true, Payload: []byte("a")})
	a.Add(Frame{ID: 2, More: true, Payload: []byte("b")})
	a.Drop(1)
	a.Drop(99)
	if msg, _, _ := a.Add(Frame{ID: 1, Payload: []byte("new")}); string(msg) != "new" {
		t.Errorf("message after Drop: got %q, want %q", msg, "new")
	}
	a.Reset()
	if msg, _, _ := a.Add(Frame{ID: 2, Payload: []byte("new")}); string(msg) != "new" {
		t.Errorf("message after Reset: got %q, want %q", msg, "new")
	}
}
