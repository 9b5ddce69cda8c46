package pack

import (
	"bytes"
	"crypto/ed25519"
	"crypto/rand"
	"crypto/x509"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
)

// signatureContext keeps a signature of a pack from being taken for one of something else.
const signatureContext = "forkd pack v1\n"

const maxSignatureBytes = 4 << 10

// signature is the member that follows the contents of a signed pack.
type signature struct {
	Key       []byte `json:"key"` // public
	Signature []byte `json:"signature"`
}

// Sign makes the signature of the pack with that head, in the form of the pack's second member. What it signs can be taken for nothing but
// a pack.
func Sign(key ed25519.PrivateKey, head []byte) ([]byte, error) {
	if len(key) != ed25519.PrivateKeySize {
		return nil, fmt.Errorf("sign pack: key has %d bytes, want %d", len(key), ed25519.PrivateKeySize)
	}
	sig := signature{Key: key.Public().(ed25519.PublicKey), Signature: ed25519.Sign(key, append([]byte(signatureContext), head...))}
	out, err := json.Marshal(sig)
	if err != nil {
		return nil, fmt.Errorf("sign pack: %w", err)
	}
	return append(out, '\n'), nil
}

// verify checks a signature and returns whose it is.
func verify(file, contents []byte) (ed25519.PublicKey, error) {
	var sig signature
	dec := json.NewDecoder(bytes.NewReader(file))
	dec.DisallowUnknownFields()
	if err := dec.Decode(&sig); err != nil {
		return nil, fmt.Errorf("%w: it can't be read: %w", ErrSignature, err)
	}
	if len(sig.Key) != ed25519.PublicKeySize || !ed25519.Verify(sig.Key, append([]byte(signatureContext), contents...), sig.Signature) {
		return nil, fmt.Errorf("%w: the contents were changed, or it was made for others", ErrSignature)
	}
	return sig.Key, nil
}

// trust checks a signer against the keys that are required; nil for none.
func trust(signer ed25519.PublicKey, required []ed25519.PublicKey) error {
	if len(required) == 0 {
		return nil
	}
	if signer == nil {
		return fmt.Errorf("%w, but a signature is required: ask its maker to pack it with a key", ErrUnsigned)
	}
	for _, key := range required {
		if key.Equal(signer) {
			return nil
		}
	}
	return fmt.Errorf("%w: %x, which is none of the %d required", ErrUntrusted, []byte(signer), len(required))
}

// Types of PEM blocks, as openssl writes them.
const (
	privateBlock = "PRIVATE KEY"
	publicBlock  = "PUBLIC KEY"
)

// GenerateKey makes a key pair, both PEM.
func GenerateKey() (private, public []byte, err error) {
	pub, priv, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		return nil, nil, fmt.Errorf("make a key: %w", err)
	}
	privateDER, err := x509.MarshalPKCS8PrivateKey(priv)
	if err != nil {
		return nil, nil, fmt.Errorf("make a key: %w", err)
	}
	publicDER, err := x509.MarshalPKIXPublicKey(pub)
	if err != nil {
		return nil, nil, fmt.Errorf("make a key: %w", err)
	}
	private = pem.EncodeToMemory(&pem.Block{Type: privateBlock, Bytes: privateDER})
	public = pem.EncodeToMemory(&pem.Block{Type: publicBlock, Bytes: publicDER})
	return private, public, nil
}

// ParsePrivateKey reads an ed25519 key from PEM (PKCS #8), as GenerateKey and openssl genpkey -algorithm ed25519 write it.
func ParsePrivateKey(file []byte) (ed25519.PrivateKey, error) {
	block, _ := pem.Decode(file)
	if block == nil || block.Type != privateBlock {
		return nil, errors.New("private key: not a PEM block of type " + privateBlock)
	}
	key, err := x509.ParsePKCS8PrivateKey(block.Bytes)
	if err != nil {
		return nil, fmt.Errorf("private key: %w", err)
	}
	private, ok := key.(ed25519.PrivateKey)
	if !ok {
		return nil, fmt.Errorf("private key: it is a %T, want an ed25519 key", key)
	}
	return private, nil
}

// ParsePublicKey reads an ed25519 key from PEM, as GenerateKey and openssl pkey -pubout write it.
func ParsePublicKey(file []byte) (ed25519.PublicKey, error) {
	block, _ := pem.Decode(file)
	if block == nil || block.Type != publicBlock {
		return nil, errors.New("public key: not a PEM block of type " + publicBlock)
	}
	key, err := x509.ParsePKIXPublicKey(block.Bytes)
	if err != nil {
		return nil, fmt.Errorf("public key: %w", err)
	}
	public, ok := key.(ed25519.PublicKey)
	if !ok {
		return nil, fmt.Errorf("public key: it is a %T, want an ed25519 key", key)
	}
	return public, nil
}
