package client

import (
	"context"
	"crypto/ed25519"
	"crypto/x509"
	"encoding/base64"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"

	"github.com/forkd/forkd/api"
)

// PackOptions are how to pack.
type PackOptions struct {
	// Sign makes the signature of the pack over its contents; nil: it is not signed. The contents are what the daemon says they are, and
	// the pack fails to unpack if they are not. The key stays with the caller.
	Sign func(contents []byte) (signature []byte, err error)
	// IncludeSecrets lets the pack have secrets that are in the snapshot's memory; else one with any is refused.
	IncludeSecrets bool
}

// UnpackOptions are what to accept, and under which name.
type UnpackOptions struct {
	Tag     string              // of the snapshot; "": its id
	Signers []ed25519.PublicKey // it must be signed by one of them; none: it need not be signed
}

// Unpacked is what came of a pack.
type Unpacked = api.UnpackResult

// PackContents returns what a pack of a snapshot begins with: what a signature covers.
func (c *Client) PackContents(ctx context.Context, tag string) ([]byte, error) {
	return c.raw(ctx, snapshotPath(tag)+"/pack/contents")
}

// Pack returns a snapshot, all it rests on and its image as one file, which the caller reads and closes. A file that breaks off ends in an
// error, and not in io.EOF.
func (c *Client) Pack(ctx context.Context, tag string, opt PackOptions) (io.ReadCloser, error) {
	header := http.Header{}
	path := snapshotPath(tag) + "/pack"
	if opt.IncludeSecrets {
		path += "?include_secrets=true"
	}
	if opt.Sign != nil {
		contents, err := c.PackContents(ctx, tag)
		if err != nil {
			return nil, err
		}
		signature, err := opt.Sign(contents)
		if err != nil {
			return nil, fmt.Errorf("sign the pack of %s: %w", tag, err)
		}
		header.Set("Forkd-Signature", base64.StdEncoding.EncodeToString(signature))
	}
	resp, err := c.send(ctx, http.MethodGet, path, nil, header)
	if err != nil {
		return nil, err
	}
	if resp.StatusCode/100 != 2 {
		defer resp.Body.Close()
		return nil, c.answerError(resp)
	}
	return &packBody{ReadCloser: resp.Body, client: c, ctx: ctx}, nil
}

// packBody says in our words that a pack has broken off.
type packBody struct {
	io.ReadCloser
	client *Client
	ctx    context.Context
}

func (b *packBody) Read(p []byte) (int, error) {
	n, err := b.ReadCloser.Read(p)
	if err == nil || errors.Is(err, io.EOF) {
		return n, err
	}
	if b.ctx.Err() != nil {
		return n, context.Cause(b.ctx)
	}
	return n, &Error{Code: CodeBrokenOff, Err: err, Message: fmt.Sprintf("the daemon at %s broke the pack off", b.client.addr),
		Hint: "its log says why"}
}

// Unpack sends a pack to the daemon, which takes in all of it or, on an error, nothing.
//
//	f, err := os.Open("py.forkd")
//	res, err := c.Unpack(ctx, f, client.UnpackOptions{Tag: "py"})
func (c *Client) Unpack(ctx context.Context, r io.Reader, opt UnpackOptions) (Unpacked, error) {
	path := "/v1/snapshots/unpack"
	if opt.Tag != "" {
		path += "?tag=" + url.QueryEscape(opt.Tag)
	}
	header := http.Header{"Content-Type": {"application/octet-stream"}, "Expect": {"100-continue"}}
	for _, key := range opt.Signers {
		der, err := x509.MarshalPKIXPublicKey(key)
		if err != nil {
			return Unpacked{}, fmt.Errorf("public key: %w", err)
		}
		header.Add("Forkd-Require-Signer", base64.StdEncoding.EncodeToString(der))
	}
	resp, err := c.do(ctx, http.MethodPost, path, io.NopCloser(r), header) // r stays the caller's to close
	if err != nil {
		return Unpacked{}, err
	}
	defer resp.Body.Close()
	if resp.StatusCode/100 != 2 {
		return Unpacked{}, c.answerError(resp)
	}
	var res Unpacked
	return res, c.decode(ctx, resp.Body, &res)
}
