// Package image builds and keeps images: an immutable root file system, its kernel, and an initramfs that carries the guest's
// agent, so that any root file system works unmodified.
//
// A Store is a directory with one subdirectory an image and a pointer for each name:
//
//	<dir>/<id>/{vmlinuz, initramfs, rootfs.erofs, image.json}
//	<dir>/names/<name>  → ../<id>
//
// An image is staged under a unique name, synced, and published with rename(2). What is published is never rewritten: a second
// build under the same name makes a new image and moves the name; the old one stays, nameless, for the snapshots that rest on it.
//
// What is worth keeping between builds (kernels, Debian root file systems) is in a cache directory of its own, which may be deleted
// at any time. This package knows nothing about machines or snapshots: who uses an image is told by the caller (Store.Remove).
package image

import (
	"errors"
	"fmt"
	"regexp"
	"time"
)

// Errors that callers tell apart with errors.Is.
var (
	ErrNotFound = errors.New("image not found")
	ErrCorrupt  = errors.New("image is damaged")
	ErrInvalid  = errors.New("invalid image specification") // the caller's fault: a name, a package, a path
)

// formatVersion is the version of image.json.
const formatVersion = 1

// Files of an image.
const (
	kernelFile    = "vmlinuz"
	initramfsFile = "initramfs"
	metaFile      = "image.json"
)

// Image is a published image.
type Image struct {
	FormatVersion int       `json:"format_version"`
	ID            string    `json:"id"`
	Name          string    `json:"name"` // empty once the name has moved to a newer image
	CreatedAt     time.Time `json:"created_at"`
	Kernel        Blob      `json:"kernel"`    // bzImage
	Initramfs     Blob      `json:"initramfs"` // agent and modules
	Rootfs        Blob      `json:"rootfs"`    // read-only file system image
	RootfsType    string    `json:"rootfs_type"`
	KernelVersion string    `json:"kernel_version"` // as `uname -r` prints it in the guest
	Packages      []string  `json:"packages,omitempty"`
	Suite         string    `json:"suite,omitempty"`
	Mirror        string    `json:"mirror,omitempty"`
	Python        bool      `json:"python"` // there is a python3 for eval
	AgentSHA256   string    `json:"agent_sha256"`
	SpecSHA256    string    `json:"spec_sha256"` // covers everything that went in: equal means that a build would change nothing
}

// Blob is a file of an image. Its digest is computed once, when the image is made.
type Blob struct {
	Path   string `json:"-"` // absolute, filled in by the store
	Name   string `json:"name"`
	Bytes  int64  `json:"bytes"`
	SHA256 string `json:"sha256"`
}

// Bytes is the size of all files of the image. Images built from the same packages may share their root file system on disk.
func (i Image) Bytes() int64 { return i.Kernel.Bytes + i.Initramfs.Bytes + i.Rootfs.Bytes }

// Cmdline is what the agent reads from the kernel's command line to find the root file system.
func (i Image) Cmdline() []string {
	return []string{"forkd.root=/dev/vda", "forkd.rootfstype=" + i.RootfsType}
}

func (i *Image) blobs() []*Blob { return []*Blob{&i.Kernel, &i.Initramfs, &i.Rootfs} }

// Progress is a step of a build. Done and Total count what Step handles (steps, bytes) and are 0 when unknown.
type Progress struct {
	Step   string `json:"step"` // "kernel", "initramfs", "rootfs", "publish"
	Detail string `json:"detail"`
	Done   int64  `json:"done,omitempty"`
	Total  int64  `json:"total,omitempty"`
}

var (
	nameRE = regexp.MustCompile(`^[A-Za-z0-9_-]{1,64}$`)
	idRE   = regexp.MustCompile(`^[a-z0-9]{1,64}$`)
)

func checkName(name string) error {
	if !nameRE.MatchString(name) {
		return fmt.Errorf("%w: name %q: use 1 to 64 letters, digits, - and _", ErrInvalid, name)
	}
	return nil
}
