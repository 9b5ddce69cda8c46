package server

import (
	"crypto/ed25519"
	"crypto/x509"
	"encoding/base64"
	"errors"
	"fmt"
	"io"
	"mime"
	"net/http"
	"os"
	"strings"
	"time"

	"github.com/forkd/forkd/api"
	"github.com/forkd/forkd/internal/sandbox"
	"github.com/forkd/forkd/internal/transfer"
)

const (
	octets = "application/octet-stream"

	// A client that neither sends nor takes anything for so long holds open what others may want to delete.
	packPatience = time.Minute

	maxSignature = 4 << 10
	maxSigners   = 100
)

func (s *Server) packContents(w http.ResponseWriter, r *http.Request) error {
	tag, err := pathTag(r)
	if err != nil {
		return err
	}
	head, err := s.Packs.Head(r.Context(), tag)
	if err != nil {
		return err
	}
	w.Header().Set("Content-Type", "application/json")
	_, _ = w.Write(head.Contents)
	return nil
}

func (s *Server) pack(w http.ResponseWriter, r *http.Request) error {
	tag, err := pathTag(r)
	if err != nil {
		return err
	}
	signature, err := packSignature(r)
	if err != nil {
		return err
	}
	if err := s.mayPack(r, tag); err != nil {
		return err
	}
	if r.Method == http.MethodHead { // only asks whether there is something
		_, err := s.Packs.Head(r.Context(), tag)
		return err
	}
	out := &packWriter{w: w, control: http.NewResponseController(w), name: tag}
	defer out.end()
	err = s.Packs.Pack(r.Context(), tag, out, signature)
	if err != nil && out.begun {
		abort(r, err)
	}
	return err
}

// mayPack refuses to give out a snapshot with secrets in its memory, unless that was asked for.
func (s *Server) mayPack(r *http.Request, tag string) error {
	include, err := flag(r, "include_secrets")
	if err != nil || include {
		return err
	}
	snap, err := s.Service.Snapshot(r.Context(), tag)
	if err == nil && snap.Secrets {
		return &sandbox.Error{Code: sandbox.CodeHoldsSecrets, Message: "snapshot " + tag + " has secrets in its memory: a pack of it would have them",
			Hint: "ask for it with --include-secrets (include_secrets=true), if whoever gets the pack may have them"}
	}
	return err
}

// packSignature reads the signature that the pack is to get; nil for none.
func packSignature(r *http.Request) ([]byte, error) {
	header := r.Header.Get("Forkd-Signature")
	if header == "" {
		return nil, nil
	}
	signature, err := base64.StdEncoding.DecodeString(header)
	if err != nil || len(signature) > maxSignature {
		return nil, invalid("`forkd pack --sign` makes one", "the header Forkd-Signature is not base64 of at most %d bytes", maxSignature)
	}
	return signature, nil
}

// packWriter begins the answer with the first byte of a pack, so that until then it can be an error.
type packWriter struct {
	w       http.ResponseWriter
	control *http.ResponseController
	name    string
	begun   bool
}

// Write implements io.Writer.
func (p *packWriter) Write(b []byte) (int, error) {
	if !p.begun {
		p.begun = true
		p.w.Header().Set("Content-Type", octets)
		p.w.Header().Set("Content-Disposition", mime.FormatMediaType("attachment", map[string]string{"filename": p.name + ".forkd"}))
		p.w.Header().Set("Cache-Control", "no-store")
	}
	_ = p.control.SetWriteDeadline(time.Now().Add(packPatience)) // not supported by a recorder in a test
	return p.w.Write(b)
}

// end takes the deadline back: the connection may go on.
func (p *packWriter) end() { _ = p.control.SetWriteDeadline(time.Time{}) }

func (s *Server) unpack(w http.ResponseWriter, r *http.Request) error {
	req, err := unpackRequest(r)
	if err != nil {
		return err
	}
	control := http.NewResponseController(w)
	body := &packReader{r: r.Body, control: control}
	defer body.end()
	out := newStream(w, r, false)
	if out.on {
		_ = control.EnableFullDuplex() // else the first event would end the body
	}
	res, err := s.Packs.Unpack(r.Context(), body, req, out.step)
	if err != nil {
		if body.err != nil {
			err = body.fault()
		}
		body.drain(r)
		return out.fail(r, err)
	}
	info := unpackResult(res)
	out.finish(api.ProgressEvent{Unpacked: &info}, info)
	return nil
}

func unpackRequest(r *http.Request) (transfer.UnpackRequest, error) {
	var none transfer.UnpackRequest
	if r.URL.Query().Has("tag") {
		noteQuery(r, "tag")
	}
	if media, _, _ := mime.ParseMediaType(r.Header.Get("Content-Type")); media == "application/json" || strings.HasPrefix(media, "multipart/") {
		return none, invalid("send the file itself, as curl -T does", "the body is %q, not a pack", shorten(media))
	}
	req := transfer.UnpackRequest{Tag: r.URL.Query().Get("tag")}
	if r.URL.Query().Has("tag") {
		if err := checkTag(req.Tag); err != nil {
			return none, err
		}
	}
	headers := r.Header.Values("Forkd-Require-Signer")
	if len(headers) > maxSigners {
		return none, invalid("", "%d keys are given: at most %d are taken", len(headers), maxSigners)
	}
	for _, header := range headers {
		key, err := publicKey(header)
		if err != nil {
			return none, err
		}
		req.Signers = append(req.Signers, key)
	}
	return req, nil
}

// publicKey reads an Ed25519 key as it stands in a PEM file.
func publicKey(header string) (ed25519.PublicKey, error) {
	var key any
	der, err := base64.StdEncoding.DecodeString(strings.TrimSpace(header))
	if err == nil {
		key, err = x509.ParsePKIXPublicKey(der)
	}
	if public, ok := key.(ed25519.PublicKey); ok && err == nil {
		return public, nil
	}
	return nil, invalid("it is what stands between the lines of the public file that `forkd pack-key` makes", "the header Forkd-Require-Signer is no Ed25519 public key: %q", shorten(header))
}

func unpackResult(u transfer.Unpacked) api.UnpackResult {
	out := api.UnpackResult{Snapshot: snapshotInfo(u.Snapshot), NewSnapshots: orEmpty(u.New), PresentSnapshots: orEmpty(u.Present), ImageID: u.ImageID, NewImage: u.NewImage}
	if u.SignedBy != nil {
		der, err := x509.MarshalPKIXPublicKey(u.SignedBy)
		if err != nil {
			panic(fmt.Errorf("encode a public key: %w", err)) // a key that verified something
		}
		out.SignedBy = orNull(base64.StdEncoding.EncodeToString(der))
	}
	return out
}

// packReader reads a body for as long as something comes, and remembers why nothing more did.
type packReader struct {
	r       io.Reader
	control *http.ResponseController
	err     error // but io.EOF
}

// Read implements io.Reader. It is not called by two goroutines at a time, nor once Unpack has returned.
func (p *packReader) Read(b []byte) (int, error) {
	_ = p.control.SetReadDeadline(time.Now().Add(packPatience)) // not supported by a recorder in a test
	n, err := p.r.Read(b)
	if err != nil && err != io.EOF {
		p.err = err
	}
	return n, err
}

// fault says what became of a client whose body ended before its end.
func (p *packReader) fault() error {
	if errors.Is(p.err, os.ErrDeadlineExceeded) {
		return &sandbox.Error{Code: sandbox.CodeTimeout, Message: fmt.Sprintf("nothing of the pack came for %v", packPatience), Hint: "send it again"}
	}
	return fmt.Errorf("%w: %w", errClientGone, p.err)
}

// drain takes some more of what nobody wants, so that a client that reads no answer before it has sent everything gets to see it. One that
// asks before it sends reads what is answered.
func (p *packReader) drain(r *http.Request) {
	if p.err != nil || r.Header.Get("Expect") != "" {
		return
	}
	_ = p.control.SetReadDeadline(time.Now().Add(drainTimeout))
	_, _ = io.CopyN(io.Discard, p.r, drainLimit)
}

// end takes the deadline back: the connection may go on.
func (p *packReader) end() { _ = p.control.SetReadDeadline(time.Time{}) }
