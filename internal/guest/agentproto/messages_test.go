package agentproto

import (
	"bytes"
	"errors"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

type message interface {
	AppendTo(dst []byte) []byte
	Decode(b []byte) error
}

// samples has a full and an empty message of each type, and a function that makes another one of the type.
var samples = []struct {
	name  string
	msg   message
	empty func() message
}{
	{"hello", &Hello{Token: Token{1, 2, 3, 15: 16}, Version: 0x0102}, func() message { return new(Hello) }},
	{"identity", &Identity{
		InstanceID: "sb-1", Hostname: "sb-1", MachineID: "0123456789abcdef0123456789abcdef", UnixNano: -5, Entropy: []byte{0, 1, 255},
		Env: []string{"A=b", "", "C="}, RunHooks: true,
	}, func() message { return new(Identity) }},
	{"identity ack", &IdentityAck{UnixNano: 1 << 62, Hooks: 3, Python: true}, func() message { return new(IdentityAck) }},
	{"pong", &Pong{UnixNano: 1, UptimeNano: 2, PID: 1, Version: "0.1.0", Python: true}, func() message { return new(Pong) }},
	{"exec", &ExecRequest{
		Args: []string{"sh", "-c", "true"}, Env: []string{"X=1"}, Cwd: "/tmp", User: "user", TimeoutMS: 1, MaxOutput: 2, Stdin: []byte("in\x00"),
	}, func() message { return new(ExecRequest) }},
	{"exec result", &ExecResult{Stdout: []byte("o"), Stderr: []byte("e"), ExitCode: -1, Signal: "SIGKILL", TimedOut: true, Truncated: true, OOMKilled: true}, func() message { return new(ExecResult) }},
	{"eval", &EvalRequest{Code: "1+1\n", TimeoutMS: 7, MaxOutput: 8}, func() message { return new(EvalRequest) }},
	{"eval result", &EvalResult{Result: "'ä'", Stdout: []byte("o"), Stderr: []byte("e"), Error: "boom", TimedOut: true, Truncated: true, DiskFull: true}, func() message { return new(EvalResult) }},
	{"notice", &Notice{OOMKills: 3, Victim: "python3", DiskFull: true, DiskFree: 4096, DiskSize: 1 << 40}, func() message { return new(Notice) }},
	{"error", &Error{Code: CodeBusy, Message: "later"}, func() message { return new(Error) }},
}

func TestRoundTrip(t *testing.T) {
	for _, tc := range samples {
		for name, want := range map[string]message{tc.name: tc.msg, tc.name + " empty": tc.empty()} {
			t.Run(name, func(t *testing.T) {
				got := tc.empty()
				if err := got.Decode(want.AppendTo(nil)); err != nil {
					t.Fatalf("Decode: %v", err)
				}
				if diff := cmp.Diff(got, want); diff != "" {
					t.Errorf("message changed (-got +want):\n%s", diff)
				}
			})
		}
	}
}

func TestDecodeOfAPartFails(t *testing.T) {
	for _, tc := range samples {
		t.Run(tc.name, func(t *testing.T) {
			b := tc.msg.AppendTo(nil)
			if strings.HasSuffix(tc.name, " result") {
				b = b[:len(b)-1] // the whole message of an agent of version 1
				if err := tc.empty().Decode(b); err != nil {
					t.Errorf("Decode of an older message: %v", err)
				}
			}
			for n := range b {
				if err := tc.empty().Decode(b[:n]); !errors.Is(err, ErrMalformed) {
					t.Fatalf("Decode of %d of %d bytes: got %v, want %v", n, len(b), err, ErrMalformed)
				}
			}
		})
	}
}

func TestDecodeIgnoresFieldsOfANewerPeer(t *testing.T) {
	for _, tc := range samples {
		t.Run(tc.name, func(t *testing.T) {
			got := tc.empty()
			if err := got.Decode(append(tc.msg.AppendTo(nil), 1, 2, 3)); err != nil {
				t.Fatalf("Decode: %v", err)
			}
			if diff := cmp.Diff(got, tc.msg); diff != "" {
				t.Errorf("message changed (-got +want):\n%s", diff)
			}
		})
	}
}

func TestDecodeKeepsNothingOfItsInput(t *testing.T) {
	for _, tc := range samples {
		t.Run(tc.name, func(t *testing.T) {
			b := tc.msg.AppendTo(nil)
			got := tc.empty()
			if err := got.Decode(b); err != nil {
				t.Fatalf("Decode: %v", err)
			}
			clear(b)
			if diff := cmp.Diff(got, tc.msg); diff != "" {
				t.Errorf("message changed with its buffer (-got +want):\n%s", diff)
			}
		})
	}
}

// A count is believed only as far as the message could hold it.
func TestDecodeBoundsCounts(t *testing.T) {
	lie := []byte{0xff, 0xff, 0xff, 0x7f, 0, 0, 0, 0}
	allocs := testing.AllocsPerRun(10, func() {
		var r ExecRequest
		if err := r.Decode(lie); !errors.Is(err, ErrMalformed) {
			t.Fatalf("Decode: got %v, want %v", err, ErrMalformed)
		}
	})
	if allocs > 1 {
		t.Errorf("Decode of a lie allocated %v times, want at most 1", allocs)
	}
}

func TestErrorNamesCodeAndMessage(t *testing.T) {
	got := (&Error{Code: CodeBadUser, Message: `there is no user "x"`}).Error()
	for _, want := range []string{"bad_user", `there is no user "x"`} {
		if !strings.Contains(got, want) {
			t.Errorf("error text: got %q, want it to contain %q", got, want)
		}
	}
}

func FuzzMessages(f *testing.F) {
	for i, tc := range samples {
		f.Add(uint8(i), tc.msg.AppendTo(nil))
		f.Add(uint8(i), tc.empty().AppendTo(nil))
	}
	f.Fuzz(func(t *testing.T, which uint8, b []byte) {
		tc := samples[int(which)%len(samples)]
		first := tc.empty()
		if first.Decode(b) != nil {
			return
		}
		enc := first.AppendTo(nil)
		if len(enc) > len(b)+8 { // a bool of 2 becomes 1, nothing grows
			t.Fatalf("encoding grew from %d to %d bytes", len(b), len(enc))
		}
		second := tc.empty()
		if err := second.Decode(enc); err != nil {
			t.Fatalf("Decode of what was encoded: %v", err)
		}
		if again := second.AppendTo(nil); !bytes.Equal(again, enc) {
			t.Errorf("encoding is not stable: got %x, want %x", again, enc)
		}
	})
}
