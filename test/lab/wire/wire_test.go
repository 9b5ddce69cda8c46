package wire

import (
	"bytes"
	"errors"
	"io"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestFrames(t *testing.T) {
	var buf bytes.Buffer
	if err := WriteJSON(&buf, Start, Request{Args: []string{"true"}}); err != nil {
		t.Fatal(err)
	}
	long := bytes.Repeat([]byte("x"), MaxPayload)
	for _, payload := range [][]byte{nil, []byte("a"), long, CountPayload(70000)} {
		if err := Write(&buf, Stdout, payload); err != nil {
			t.Fatal(err)
		}
	}
	var kinds []Kind
	var sizes []int
	for {
		f, err := Read(&buf)
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		kinds, sizes = append(kinds, f.Kind), append(sizes, len(f.Payload))
	}
	if diff := cmp.Diff([]Kind{Start, Stdout, Stdout, Stdout, Stdout}, kinds); diff != "" {
		t.Errorf("kinds (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff([]int{17, 0, 1, MaxPayload, 4}, sizes); diff != "" {
		t.Errorf("sizes (-want +got):\n%s", diff)
	}
	if got := Count(CountPayload(70000)); got != 70000 {
		t.Errorf("Count() = %d, want 70000", got)
	}
}

func TestBadFrames(t *testing.T) {
	tests := []struct {
		name, in string
		want     string
	}{
		{"cut header", "o\x00\x00", "unexpected EOF"},
		{"cut payload", "o\x00\x00\x00\x05abc", "cut off"},
		{"too long", "o\x7f\x00\x00\x00", "the limit is"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			_, err := Read(strings.NewReader(tt.in))
			if err == nil || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("Read() = %v, want an error with %q", err, tt.want)
			}
		})
	}
	if err := WriteJSON(io.Discard, Start, Request{Args: []string{strings.Repeat("x", MaxPayload)}}); err == nil {
		t.Error("WriteJSON of a request that is too long: got no error")
	}
}
