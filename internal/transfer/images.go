package transfer

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"slices"

	"github.com/forkd/forkd/internal/image"
	"github.com/forkd/forkd/internal/snapshot"
	"github.com/forkd/forkd/internal/snapshot/pack"
)

// imageParts is the image store in the words of packs.
type imageParts struct {
	store *image.Store
	holds *holds   // nil: nothing is held
	held  []string // by one goroutine only: a pack asks in turn
}

// release gives back what was held.
func (p *imageParts) release() {
	for _, id := range p.held {
		p.holds.give(id)
	}
	p.held = nil
}

// hold keeps the image from being removed, whether it is here or about to be.
func (p *imageParts) hold(id string) {
	if p.holds != nil && !slices.Contains(p.held, id) {
		p.holds.take(id)
		p.held = append(p.held, id)
	}
}

// Export implements pack.Images.
func (p *imageParts) Export(_ context.Context, id string) (pack.Image, error) {
	p.hold(id)
	img, meta, err := p.store.Describe(id)
	if errors.Is(err, image.ErrNotFound) {
		return pack.Image{}, fmt.Errorf("%w: %w", fs.ErrNotExist, err)
	}
	if err != nil {
		return pack.Image{}, err
	}
	out := describe(img)
	out.Meta = meta
	return out, nil
}

// describe is what a pack says of an image, but for its own words.
func describe(img image.Image) pack.Image {
	blob := func(b image.Blob) snapshot.Blob { return snapshot.Blob{Bytes: b.Bytes, SHA256: b.SHA256} }
	return pack.Image{ID: img.ID, Name: img.Name, Kernel: blob(img.Kernel), Initramfs: blob(img.Initramfs), Rootfs: blob(img.Rootfs)}
}

// blobOf is the file of an image that a part is.
func blobOf(img image.Image, part pack.Part) image.Blob {
	return map[pack.Part]image.Blob{pack.Kernel: img.Kernel, pack.Initramfs: img.Initramfs, pack.Rootfs: img.Rootfs}[part]
}

// Open implements pack.Images.
func (p *imageParts) Open(_ context.Context, id string, part pack.Part) (io.ReadCloser, error) {
	img, _, err := p.store.Describe(id)
	if err != nil {
		return nil, err
	}
	return os.Open(blobOf(img, part).Path)
}

// Stage implements pack.Images. What the image says of itself must be what the pack says of it.
func (p *imageParts) Stage(_ context.Context, img pack.Image) (pack.ImageStaging, error) {
	in, err := p.store.Import(img.Meta)
	if err != nil {
		return nil, err
	}
	own := describe(in.Image())
	if own.ID != img.ID || own.Name != img.Name || own.Kernel != img.Kernel || own.Initramfs != img.Initramfs || own.Rootfs != img.Rootfs {
		err := fmt.Errorf("%w: it says of its image %s what the image's own description does not", pack.ErrInvalid, img.ID)
		return nil, errors.Join(err, in.Abort())
	}
	return &imageStaging{in}, nil
}

// Remove implements pack.Images.
func (p *imageParts) Remove(_ context.Context, id string) error { return p.store.RemoveID(id) }

// imageStaging is an image that is being taken in.
type imageStaging struct{ *image.Import }

// Write implements pack.ImageStaging.
func (s *imageStaging) Write(ctx context.Context, part pack.Part, r io.Reader) error {
	return s.Import.Write(ctx, blobOf(s.Image(), part), r)
}
