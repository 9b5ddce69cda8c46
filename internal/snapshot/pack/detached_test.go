package pack

import (
	"bytes"
	"context"
	"crypto/ed25519"
	"errors"
	"io"
	"testing"
)

// TestDetachedSignature holds that a signature made elsewhere gives the very pack that a key here would, and that one of another pack is
// refused before anything is written.
func TestDetachedSignature(t *testing.T) {
	t.Parallel()
	src := newSource(t)
	ctx := context.Background()
	public, private, err := ed25519.GenerateKey(nil)
	if err != nil {
		t.Fatal(err)
	}
	signed := func(id string) []byte {
		t.Helper()
		head, err := Head(ctx, src.store, src.images, id)
		if err != nil {
			t.Fatal(err)
		}
		sig, err := Sign(private, head)
		if err != nil {
			t.Fatal(err)
		}
		return sig
	}
	file := src.pack(t, "tip", Options{Signature: signed("tip")})
	if !bytes.Equal(file, src.pack(t, "tip", Options{Sign: private})) {
		t.Error("a pack that was signed elsewhere is not the one that is signed here")
	}
	res, err := newHost(t).unpack(t, file, UnpackOptions{RequireSignature: []ed25519.PublicKey{public}})
	if err != nil || !public.Equal(res.SignedBy) {
		t.Errorf("Unpack() = signed by %x, %v, want %x", res.SignedBy, err, public)
	}
	for name, sig := range map[string][]byte{"of another pack": signed("mid"), "empty": {}, "nonsense": []byte("{}"), "huge": make([]byte, maxSignatureBytes+1)} {
		out := &counter{}
		if _, err := Pack(ctx, out, src.store, src.images, "tip", Options{Signature: sig}); !errors.Is(err, ErrSignature) || out.n != 0 {
			t.Errorf("Pack() with a signature %s wrote %d bytes, error = %v, want none and %v", name, out.n, err, ErrSignature)
		}
	}
	if _, err := Head(ctx, src.store, src.images, "none"); err == nil {
		t.Error("Head() of nothing succeeded")
	}
}

type counter struct{ n int }

func (c *counter) Write(b []byte) (int, error) {
	c.n += len(b)
	return io.Discard.Write(b)
}
