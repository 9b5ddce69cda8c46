package image

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"unicode"
	"unicode/utf8"
)

// Bounds of what a description from elsewhere may say.
const (
	maxText     = 256     // bytes of a version, a package, a mirror
	maxPackages = 10_000  // that it was built from
	maxBytes    = 1 << 40 // of one file
	maxMeta     = 1 << 20 // bytes of the description itself
)

var (
	sumRE = regexp.MustCompile(`^[0-9a-f]{64}$`)
	ownRE = regexp.MustCompile(`^[0-9a-f]{16}$`) // ids as newID makes them
)

// rootfsTypes are the kinds of root file system that an image can have: the agent is told which on the kernel's command line.
var rootfsTypes = []string{"erofs", "squashfs", "ext4"}

// Describe returns an image as it was published, by its id alone, with the bytes of its image.json. The name is the one it was built
// under, whether that has moved to a newer image since or not: two stores that have the image describe it with the same words.
func (s *Store) Describe(id string) (Image, []byte, error) {
	if !s.has(id) {
		return Image{}, nil, fmt.Errorf("%w: %q", ErrNotFound, id)
	}
	img, err := s.load(id, "")
	if err != nil {
		return Image{}, nil, err
	}
	meta, err := os.ReadFile(filepath.Join(s.dir, id, metaFile))
	if err != nil {
		return Image{}, nil, fmt.Errorf("%w: %s: %w", ErrCorrupt, id, err)
	}
	return img, meta, nil
}

// has reports whether there is an image with that id. Other than Get it knows no names: they are chosen by people, and by other machines.
func (s *Store) has(id string) bool {
	if !idRE.MatchString(id) || id == "names" {
		return false
	}
	_, err := os.Lstat(filepath.Join(s.dir, id, metaFile))
	return err == nil
}

// RemoveID deletes the image with that id, and its name. It is no error when there is none.
func (s *Store) RemoveID(id string) error {
	if !s.has(id) {
		return nil
	}
	return s.remove(id)
}

// ParseDescription reads an image.json that comes from elsewhere, and trusts nothing of it: what it says may go onto a kernel's command
// line, a terminal, and into paths.
func ParseDescription(meta []byte) (Image, error) {
	var img Image
	if len(meta) > maxMeta {
		return Image{}, fmt.Errorf("%w: its description has %d bytes, the limit is %d", ErrInvalid, len(meta), maxMeta)
	}
	dec := json.NewDecoder(bytes.NewReader(meta))
	dec.DisallowUnknownFields()
	if err := dec.Decode(&img); err != nil {
		return Image{}, fmt.Errorf("%w: its description can't be read: %w", ErrInvalid, err)
	}
	if _, err := dec.Token(); err != io.EOF {
		return Image{}, fmt.Errorf("%w: there is data behind its description", ErrInvalid)
	}
	if err := img.check(); err != nil {
		return Image{}, fmt.Errorf("%w: %w", ErrInvalid, err)
	}
	return img, nil
}

func (i Image) check() error {
	switch {
	case i.FormatVersion != formatVersion:
		return fmt.Errorf("its description has format %d, want %d", i.FormatVersion, formatVersion)
	case !idRE.MatchString(i.ID) || i.ID == "names":
		return fmt.Errorf("id %.80q can't be used", i.ID)
	case !nameRE.MatchString(i.Name):
		return fmt.Errorf("name %.80q can't be used", i.Name)
	case !slices.Contains(rootfsTypes, i.RootfsType):
		return fmt.Errorf("root file system of type %.80q: want one of %s", i.RootfsType, strings.Join(rootfsTypes, ", "))
	case i.CreatedAt.Year() < 1 || i.CreatedAt.Year() > 9999:
		return errors.New("it is of no time")
	case len(i.Packages) > maxPackages:
		return fmt.Errorf("it has %d packages, the limit is %d", len(i.Packages), maxPackages)
	}
	for _, text := range append([]string{i.KernelVersion, i.Suite, i.Mirror, i.AgentSHA256, i.SpecSHA256}, i.Packages...) {
		if len(text) > maxText || !utf8.ValidString(text) || strings.ContainsFunc(text, func(r rune) bool { return !unicode.IsPrint(r) }) {
			return fmt.Errorf("%.80q is not plain text of at most %d bytes", text, maxText)
		}
	}
	for name, b := range map[string]Blob{kernelFile: i.Kernel, initramfsFile: i.Initramfs, "rootfs." + i.RootfsType: i.Rootfs} {
		if b.Name != name || b.Bytes < 0 || b.Bytes > maxBytes || !sumRE.MatchString(b.SHA256) {
			return fmt.Errorf("file %.80q of %d bytes and digest %.80q: want a %s", b.Name, b.Bytes, b.SHA256, name)
		}
	}
	return nil
}

// Import is an image that is being taken in from elsewhere, under the id it has there.
type Import struct {
	store *Store
	img   Image
	meta  []byte
	st    *staging
}

// Import begins to take an image in. meta is its image.json, as Describe returned it there. Abort must be called in the end.
func (s *Store) Import(meta []byte) (*Import, error) {
	img, err := ParseDescription(meta)
	if err != nil {
		return nil, err
	}
	if s.has(img.ID) {
		return nil, fmt.Errorf("image %s: %w", img.ID, fs.ErrExist)
	}
	st, err := newStaging(s.dir)
	if err != nil {
		return nil, err
	}
	if err := os.Mkdir(st.path(img.ID), 0o755); err != nil {
		return nil, errors.Join(fmt.Errorf("stage image: %w", err), st.remove())
	}
	return &Import{store: s, img: img, meta: bytes.Clone(meta), st: st}, nil
}

// Image is what is being taken in.
func (i *Import) Image() Image { return i.img }

// Write stores the file of a blob of the image. It reads r to its end. That the bytes are those of the blob's digest is r's to say, by
// an error; Prepare checks the size alone.
func (i *Import) Write(ctx context.Context, blob Blob, r io.Reader) error {
	f, err := os.OpenFile(i.path(blob), os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o644)
	if err != nil {
		return fmt.Errorf("create file: %w", err)
	}
	_, err = io.CopyBuffer(struct{ io.Writer }{f}, &contextReader{ctx, r}, make([]byte, 1<<20))
	if err == nil {
		err = f.Sync()
	}
	if err := errors.Join(err, f.Close()); err != nil {
		return fmt.Errorf("store %s of image %s: %w", blob.Name, i.img.ID, err)
	}
	return nil
}

func (i *Import) path(blob Blob) string {
	return filepath.Join(i.st.path(i.img.ID), filepath.Base(blob.Name))
}

// contextReader ends with its context.
type contextReader struct {
	ctx context.Context
	r   io.Reader
}

func (c *contextReader) Read(b []byte) (int, error) {
	if c.ctx.Err() != nil {
		return 0, context.Cause(c.ctx)
	}
	return c.r.Read(b)
}

// Prepare makes all durable. Preconditions: every blob was written.
func (i *Import) Prepare(context.Context) error {
	for _, b := range i.img.blobs() {
		info, err := os.Stat(i.path(*b))
		if err != nil {
			return fmt.Errorf("image %s: %w", i.img.ID, err)
		}
		if info.Size() != b.Bytes {
			return fmt.Errorf("%w: %s of image %s has %d bytes, want %d", ErrCorrupt, b.Name, i.img.ID, info.Size(), b.Bytes)
		}
	}
	dir := i.st.path(i.img.ID)
	if err := writeFile(filepath.Join(dir, metaFile), i.meta, 0o644); err != nil {
		return err
	}
	return syncDir(dir)
}

// Commit gives the image its id and, if nobody has it, its name. Preconditions: Prepare has returned nil.
func (i *Import) Commit() error {
	s := i.store
	if err := os.Rename(i.st.path(i.img.ID), filepath.Join(s.dir, i.img.ID)); err != nil {
		return fmt.Errorf("publish image %s: %w", i.img.ID, err)
	}
	if err := errors.Join(i.takeName(), syncDir(s.dir), syncDir(s.namesDir())); err != nil {
		return errors.Join(err, s.remove(i.img.ID)) // nobody relies on it yet
	}
	return nil
}

// takeName takes the image's name unless it belongs to another. A name that looks like an id is left alone: names go before ids, so
// that an image from elsewhere could stand in for one that is here.
func (i *Import) takeName() error {
	if ownRE.MatchString(i.img.Name) || i.store.has(i.img.Name) {
		return nil
	}
	err := os.Symlink(filepath.Join("..", i.img.ID), filepath.Join(i.store.namesDir(), i.img.Name))
	if err != nil && !errors.Is(err, fs.ErrExist) {
		return fmt.Errorf("publish image name: %w", err)
	}
	return nil
}

// Abort removes what was written; after Commit it removes nothing that was published. It is safe to call twice.
func (i *Import) Abort() error {
	if i.st == nil {
		return nil
	}
	err := i.st.remove()
	i.st = nil
	return err
}
