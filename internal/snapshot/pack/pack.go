package pack

import (
	"archive/tar"
	"context"
	"crypto/ed25519"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"hash"
	"io"
	"io/fs"
	"time"

	"github.com/klauspost/compress/zstd"

	"github.com/forkd/forkd/internal/snapshot"
)

// Options are how to pack.
type Options struct {
	Sign      ed25519.PrivateKey // nil: no signature
	Signature []byte             // instead of Sign: made elsewhere by Sign over what Head returns; nil: none
	Progress  func(Progress)     // called often, from the goroutine that packs; nil: nowhere
}

// Progress says how far packing or unpacking is, in bytes of members.
type Progress struct {
	Member string `json:"member"`
	Done   int64  `json:"done_bytes"`
	Total  int64  `json:"total_bytes"`
}

// Pack writes snapshot id, all it rests on, and its image to w, and returns what it wrote. It streams: nothing is kept on disk. When it
// fails, what was written is not a valid pack.
//
// Preconditions: the snapshots and the image are not removed meanwhile.
func Pack(ctx context.Context, w io.Writer, store *snapshot.Store, images Images, id string, opt Options) (Contents, error) {
	p := &packer{ctx: ctx, store: store, images: images, report: newReporter(opt.Progress)}
	defer p.close()
	c, err := p.contents(id)
	if err != nil {
		return Contents{}, fmt.Errorf("pack snapshot %s: %w", id, err)
	}
	head, err := c.encode()
	if err != nil {
		return Contents{}, fmt.Errorf("pack snapshot %s: %w", id, err)
	}
	sig, err := opt.signature(head)
	if err != nil {
		return Contents{}, fmt.Errorf("pack snapshot %s: %w", id, err)
	}
	if err := p.write(w, c, head, sig); err != nil {
		return Contents{}, fmt.Errorf("pack snapshot %s: %w", id, err)
	}
	return c, nil
}

// Head returns the first member of the pack that Pack would write: all of the pack, by its digests. A signature is made over it by Sign,
// which may be on another machine: the private key need not be where the snapshot is.
func Head(ctx context.Context, store *snapshot.Store, images Images, id string) ([]byte, error) {
	p := &packer{ctx: ctx, store: store, images: images, report: newReporter(nil)}
	defer p.close()
	c, err := p.contents(id)
	if err != nil {
		return nil, fmt.Errorf("contents of a pack of snapshot %s: %w", id, err)
	}
	return c.encode()
}

// signature is the member of a signed pack with that head; nil for one that is not signed.
func (o Options) signature(head []byte) ([]byte, error) {
	if o.Sign != nil {
		return Sign(o.Sign, head)
	}
	if o.Signature == nil {
		return nil, nil
	}
	if len(o.Signature) > maxSignatureBytes {
		return nil, fmt.Errorf("%w: it has %d bytes, the limit is %d", ErrSignature, len(o.Signature), maxSignatureBytes)
	}
	_, err := verify(o.Signature, head)
	return o.Signature, err
}

type packer struct {
	ctx     context.Context
	store   *snapshot.Store
	images  Images
	readers []*snapshot.Reader // of the chain, root first
	tar     *tar.Writer
	report  *reporter
}

// contents opens all that is to be packed.
func (p *packer) contents(id string) (Contents, error) {
	chain, err := p.store.Chain(id)
	if err != nil {
		return Contents{}, err
	}
	c := Contents{FormatVersion: FormatVersion, ID: id}
	for _, m := range chain {
		r, err := p.store.Read(m.ID)
		if err != nil {
			return Contents{}, err
		}
		p.readers = append(p.readers, r)
		c.Snapshots = append(c.Snapshots, Snapshot{Manifest: r.Manifest, IndexBytes: int64(len(r.Index))})
	}
	ref := chain[len(chain)-1].Image
	if c.Image, err = p.images.Export(p.ctx, ref.ID); errors.Is(err, fs.ErrNotExist) {
		return Contents{}, fmt.Errorf("its image %s (%s) is missing: %w", ref.Name, ref.ID, err)
	}
	return c, err
}

func (p *packer) close() {
	for _, r := range p.readers {
		r.Close()
	}
}

func (p *packer) write(w io.Writer, c Contents, head, sig []byte) error {
	enc, err := zstd.NewWriter(w, zstd.WithEncoderLevel(zstd.SpeedDefault), zstd.WithWindowSize(maxWindow))
	if err != nil {
		return err
	}
	p.tar = tar.NewWriter(enc)
	if err := p.writeMembers(c, head, sig); err != nil {
		enc.Reset(nil) // ends the encoder without ending the stream: what is there stays recognisably incomplete
		return err
	}
	if err := p.tar.Close(); err != nil {
		enc.Reset(nil)
		return err
	}
	return enc.Close()
}

func (p *packer) writeMembers(c Contents, head, sig []byte) error {
	if err := p.writeBytes(contentsName, head); err != nil {
		return err
	}
	if sig != nil {
		if err := p.writeBytes(signatureName, sig); err != nil {
			return err
		}
	}
	p.report.total = c.Bytes()
	members := c.members()
	for i, part := range parts() {
		if err := p.writePart(members[i], c.Image, part); err != nil {
			return err
		}
	}
	members = members[len(parts()):]
	for i, r := range p.readers {
		if err := p.writeSnapshot(members[3*i:], r); err != nil {
			return err
		}
	}
	return nil
}

// writeSnapshot writes the three members of one snapshot.
func (p *packer) writeSnapshot(members []member, r *snapshot.Reader) error {
	if err := p.begin(members[0]); err != nil {
		return err
	}
	if _, err := p.body().Write(r.Index); err != nil {
		return err
	}
	if err := p.begin(members[1]); err != nil {
		return err
	}
	if err := r.WriteMemory(p.ctx, p.body()); err != nil {
		return err
	}
	if err := p.begin(members[2]); err != nil {
		return err
	}
	_, err := p.body().Write(r.Device)
	return err
}

// writePart writes a file of the image and checks that it is what its digest says.
func (p *packer) writePart(m member, img Image, part Part) error {
	if err := p.begin(m); err != nil {
		return err
	}
	f, err := p.images.Open(p.ctx, img.ID, part)
	if err != nil {
		return err
	}
	defer f.Close()
	checked := newVerifier(p.ctx, f, img.blob(part))
	if _, err := io.CopyBuffer(p.body(), checked, make([]byte, 1<<20)); err != nil {
		return fmt.Errorf("%s of image %s: %w", part, img.ID, err)
	}
	return nil
}

func (p *packer) writeBytes(name string, data []byte) error {
	if err := p.tar.WriteHeader(header(member{name, int64(len(data))})); err != nil {
		return err
	}
	_, err := p.tar.Write(data)
	return err
}

func (p *packer) begin(m member) error {
	p.report.member = m.name
	return p.tar.WriteHeader(header(m))
}

// body is where the current member's bytes go.
func (p *packer) body() io.Writer { return io.MultiWriter(p.tar, p.report) }

// header is the one header that a member can have: nothing of the host is in it.
func header(m member) *tar.Header {
	return &tar.Header{Typeflag: tar.TypeReg, Name: m.name, Size: m.bytes, Mode: 0o644, ModTime: time.Unix(0, 0)}
}

// reporter counts the bytes of members.
type reporter struct {
	report func(Progress)
	member string
	done   int64
	total  int64
}

func newReporter(report func(Progress)) *reporter {
	if report == nil {
		report = func(Progress) {}
	}
	return &reporter{report: report}
}

func (r *reporter) Write(b []byte) (int, error) {
	r.done += int64(len(b))
	r.report(Progress{Member: r.member, Done: r.done, Total: r.total})
	return len(b), nil
}

// verifier passes a file on, and fails at its end if it is not the one it should be.
type verifier struct {
	ctx  context.Context
	r    io.Reader
	want snapshot.Blob
	hash hash.Hash
	n    int64
}

func newVerifier(ctx context.Context, r io.Reader, want snapshot.Blob) *verifier {
	return &verifier{ctx: ctx, r: io.LimitReader(r, want.Bytes+1), want: want, hash: sha256.New()}
}

func (v *verifier) Read(b []byte) (int, error) {
	if err := v.ctx.Err(); err != nil {
		return 0, context.Cause(v.ctx)
	}
	n, err := v.r.Read(b)
	v.hash.Write(b[:n])
	v.n += int64(n)
	if err == io.EOF {
		if got := hex.EncodeToString(v.hash.Sum(nil)); v.n != v.want.Bytes || got != v.want.SHA256 {
			return n, fmt.Errorf("%w: digest does not match (expected %d bytes, %s, actual %d bytes, %s)",
				snapshot.ErrCorrupt, v.want.Bytes, v.want.SHA256, v.n, got)
		}
	}
	return n, err
}
