package pack

import (
	"archive/tar"
	"context"
	"crypto/ed25519"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"sync"

	"github.com/klauspost/compress/zstd"

	"github.com/forkd/forkd/internal/snapshot"
)

// maxWindow is how far back a stream refers: what a decoder must keep in memory.
const maxWindow = 8 << 20

// UnpackOptions are what to accept.
type UnpackOptions struct {
	RequireSignature []ed25519.PublicKey // by any one of them; none: unsigned packs are welcome
	MaxBytes         int64               // of all members; 0: what the disk holds
	Progress         func(Progress)      // called often, never by two goroutines at a time; nil: nowhere
	Hook             func(Step) error    // called before each step of publishing, for tests; nil: nothing

	// Admit is called when everything has its place and can still be taken back: an error does that. Once it has returned nil, and so
	// the caller relies on the snapshot, it stays, also when the process dies before Unpack returns. It must not unpack. Nil: nothing.
	Admit func(context.Context, snapshot.Manifest) error
}

// Result is what an unpacked file held.
type Result struct {
	Manifest  snapshot.Manifest // of the snapshot that was packed, as the store has it now
	Published []string          // ids of the snapshots that are new, root first
	Present   []string          // ids of those that were here already, with the same content
	Image     string            // id
	NewImage  bool              // the image was not here
	SignedBy  ed25519.PublicKey // nil: not signed
}

// Unpack reads a pack, verifies all of it, and publishes what it holds and the stores don't. Nothing is written outside staging before
// everything is verified, and no name comes from the archive that is not an id. When ctx ends, so does Unpack at its next read of r.
func Unpack(ctx context.Context, r io.Reader, store *snapshot.Store, images Images, opt UnpackOptions) (Result, error) {
	in := &input{ctx: ctx, r: r}
	u := &unpacker{ctx: ctx, store: store, images: images, opt: opt, report: newReporter(opt.Progress)}
	defer u.abort()
	if err := u.run(in); err != nil {
		if cause := in.failure(); cause != nil { // whatever that looked like to those who parse
			err = cause
		}
		return Result{}, fmt.Errorf("unpack: %w", err)
	}
	return u.result, nil
}

// unpacker is one run of Unpack.
type unpacker struct {
	ctx    context.Context
	store  *snapshot.Store
	images Images
	opt    UnpackOptions
	report *reporter

	archive  *archive
	contents Contents
	image    ImageStaging        // nil: the image is here already
	staged   []*snapshot.Staging // of the snapshots that are not here, root first
	result   Result
}

func (u *unpacker) run(in io.Reader) error {
	dec, err := zstd.NewReader(in, zstd.WithDecoderMaxWindow(maxWindow), zstd.WithDecoderConcurrency(2))
	if err != nil {
		return err
	}
	defer dec.Close()
	return u.unpack(dec)
}

// unpack reads the archive.
func (u *unpacker) unpack(in io.Reader) error {
	u.archive = &archive{in: in, tar: tar.NewReader(in), seen: map[string]bool{}}
	if err := u.readHead(); err != nil {
		return err
	}
	if err := u.admit(); err != nil {
		return err
	}
	members := u.contents.members()
	for i, part := range parts() {
		if err := u.readPart(members[i], part); err != nil {
			return err
		}
	}
	members = members[len(parts()):]
	for i, s := range u.contents.Snapshots {
		if err := u.readSnapshot(members[3*i:3*i+3], s); err != nil {
			return err
		}
	}
	if err := u.archive.end(); err != nil {
		return err
	}
	return u.publish()
}

// readHead reads the contents, and the signature if there is one.
func (u *unpacker) readHead() error {
	head, err := u.archive.small(contentsName, maxContentsBytes)
	if err != nil {
		return err
	}
	sig, err := u.archive.optional(signatureName, maxSignatureBytes)
	if err != nil {
		return err
	}
	if sig != nil {
		if u.result.SignedBy, err = verify(sig, head); err != nil {
			return err
		}
	}
	if err := trust(u.result.SignedBy, u.opt.RequireSignature); err != nil {
		return err
	}
	u.contents, err = decodeContents(head)
	u.result.Image = u.contents.Image.ID
	return err
}

// admit decides, before anything is written, what is here already and whether there is room for the rest.
func (u *unpacker) admit() error {
	total := u.contents.Bytes()
	if u.opt.MaxBytes > 0 && total > u.opt.MaxBytes {
		return fmt.Errorf("%w: it holds %d bytes, the limit is %d", ErrTooLarge, total, u.opt.MaxBytes)
	}
	u.report.total = total
	var need int64
	img := u.contents.Image
	present, err := u.imagePresent()
	if err != nil {
		return err
	}
	if !present {
		need += img.Kernel.Bytes + img.Initramfs.Bytes + img.Rootfs.Bytes
	}
	for _, s := range u.contents.Snapshots {
		here, err := u.snapshotPresent(s.Manifest)
		if err != nil {
			return err
		}
		if !here {
			need += s.Manifest.Memory.DataBytes + s.Manifest.Device.Bytes + s.IndexBytes
		}
	}
	if err := u.store.Fits(need); err != nil {
		return err
	}
	if !present {
		if u.image, err = u.images.Stage(u.ctx, img); err != nil {
			return err
		}
	}
	return nil
}

// imagePresent reports whether the pack's image is here. One with the same id and other files is an error.
func (u *unpacker) imagePresent() (bool, error) {
	want := u.contents.Image
	have, err := u.images.Export(u.ctx, want.ID)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return false, nil
	case err != nil:
		return false, err
	case !have.same(want):
		return false, fmt.Errorf("image %s: %w, with other files", want.ID, snapshot.ErrExists)
	}
	return true, nil
}

// snapshotPresent reports whether a snapshot of the pack is here. One with the same id and other content is an error.
func (u *unpacker) snapshotPresent(want snapshot.Manifest) (bool, error) {
	have, err := u.store.Get(want.ID)
	if errors.Is(err, snapshot.ErrNotFound) {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	same, err := sameManifest(have.Portable(), want)
	if err == nil && !same {
		err = fmt.Errorf("snapshot %s: %w, with other content", want.ID, snapshot.ErrExists)
	}
	return same, err
}

func (u *unpacker) readPart(m member, part Part) error {
	body, err := u.open(m)
	if err != nil {
		return err
	}
	checked := newVerifier(u.ctx, body, u.contents.Image.blob(part))
	if u.image != nil {
		err = u.image.Write(u.ctx, part, checked)
	}
	if err == nil { // what the store left unread, the end with its check above all
		_, err = io.Copy(io.Discard, checked)
	}
	if err != nil {
		return fmt.Errorf("%s: %w", m.name, err)
	}
	return nil
}

func (u *unpacker) readSnapshot(members []member, s Snapshot) error {
	here, err := u.snapshotPresent(s.Manifest)
	if err != nil {
		return err
	}
	if here {
		u.result.Present = append(u.result.Present, s.Manifest.ID)
		return u.skip(members)
	}
	st, err := u.store.Stage(s.Manifest.ID)
	if err != nil {
		return err
	}
	u.staged = append(u.staged, st)
	body, err := u.open(members[0])
	if err != nil {
		return err
	}
	index, err := io.ReadAll(body)
	if err != nil {
		return err
	}
	if body, err = u.open(members[1]); err != nil {
		return err
	}
	if err := st.ReadMemory(u.ctx, s.Manifest, index, body); err != nil {
		return err
	}
	if body, err = u.open(members[2]); err != nil {
		return err
	}
	return st.ReadDevice(u.ctx, s.Manifest, body)
}

// skip passes over members that are here already. What the archive has of them does not matter: nothing of it is used.
func (u *unpacker) skip(members []member) error {
	for _, m := range members {
		body, err := u.open(m)
		if err != nil {
			return err
		}
		if _, err := io.Copy(io.Discard, body); err != nil {
			return err
		}
	}
	return nil
}

// open returns the body of the next member, which must be m.
func (u *unpacker) open(m member) (io.Reader, error) {
	body, err := u.archive.next(m)
	if err != nil {
		return nil, err
	}
	u.report.member = m.name
	return io.TeeReader(body, u.report), nil
}

func (u *unpacker) abort() {
	if u.image != nil {
		u.image.Abort()
	}
	for _, st := range u.staged {
		st.Abort()
	}
}

// input remembers why reading the pack failed, and stops when nobody waits any more.
type input struct {
	ctx context.Context
	r   io.Reader

	mu  sync.Mutex // the decoder reads ahead
	err error
}

func (i *input) Read(b []byte) (int, error) {
	if i.ctx.Err() != nil {
		return 0, i.fail(context.Cause(i.ctx))
	}
	n, err := i.r.Read(b)
	if err != nil && err != io.EOF {
		err = i.fail(fmt.Errorf("read the pack: %w", err))
	}
	return n, err
}

func (i *input) fail(err error) error {
	i.mu.Lock()
	defer i.mu.Unlock()
	i.err = err
	return err
}

func (i *input) failure() error {
	i.mu.Lock()
	defer i.mu.Unlock()
	return i.err
}
