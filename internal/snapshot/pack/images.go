package pack

import (
	"context"
	"encoding/json"
	"io"

	"github.com/forkd/forkd/internal/snapshot"
)

// Images is the image store as packing needs it.
type Images interface {
	// Export describes image id. Its error wraps fs.ErrNotExist when there is no such image.
	Export(ctx context.Context, id string) (Image, error)
	// Open opens a part of image id for reading.
	Open(ctx context.Context, id string, part Part) (io.ReadCloser, error)
	// Stage begins to take an image in, under its id.
	Stage(ctx context.Context, img Image) (ImageStaging, error)
	// Remove takes an image out that was published in vain. An unknown id is no error.
	Remove(ctx context.Context, id string) error
}

// Image is what a pack says of an image.
type Image struct {
	ID        string          `json:"id"`
	Name      string          `json:"name"`
	Kernel    snapshot.Blob   `json:"kernel"`
	Initramfs snapshot.Blob   `json:"initramfs"`
	Rootfs    snapshot.Blob   `json:"rootfs"`
	Meta      json.RawMessage `json:"meta"` // the image store's own JSON, opaque here
}

// Part is a file of an image.
type Part string

// The parts of an image, in their order in a pack.
const (
	Kernel    Part = "kernel"
	Initramfs Part = "initramfs"
	Rootfs    Part = "rootfs"
)

func parts() []Part { return []Part{Kernel, Initramfs, Rootfs} }

func (i Image) blob(p Part) snapshot.Blob {
	return map[Part]snapshot.Blob{Kernel: i.Kernel, Initramfs: i.Initramfs, Rootfs: i.Rootfs}[p]
}

// same reports whether two images have the same files.
func (i Image) same(o Image) bool {
	return i.Kernel == o.Kernel && i.Initramfs == o.Initramfs && i.Rootfs == o.Rootfs
}

// ImageStaging is an image being taken in.
type ImageStaging interface {
	// Write stores a part. r ends after the part's bytes, and fails if they do not match their digest.
	Write(ctx context.Context, part Part, r io.Reader) error
	// Prepare makes all parts durable.
	Prepare(ctx context.Context) error
	// Commit gives the image its id and, if it is free, its name.
	Commit() error
	// Abort removes what was written; after Commit it does nothing.
	Abort() error
}
