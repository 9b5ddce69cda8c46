package image

import (
	"cmp"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
)

// Store keeps the images below one directory.
type Store struct {
	dir      string
	cacheDir string
	agent    []byte
	run      runner
	building chan struct{} // holds a token while a build runs: they would only slow each other down
}

// Open returns the store in dir (made if missing) and removes what builds that were interrupted left there and in cacheDir.
// agent is the guest agent's executable; it is needed by Build alone.
func Open(dir, cacheDir string, agent []byte) (*Store, error) {
	s := &Store{agent: agent, run: osRunner{}, building: make(chan struct{}, 1)}
	for _, d := range []struct {
		to   *string
		path string
	}{{&s.dir, dir}, {&s.cacheDir, cacheDir}} {
		abs, err := filepath.Abs(d.path)
		if err != nil {
			return nil, fmt.Errorf("image directory %s: %w", d.path, err)
		}
		if err := os.MkdirAll(abs, 0o755); err != nil {
			return nil, fmt.Errorf("create image directory: %w", err)
		}
		if *d.to, err = filepath.EvalSymlinks(abs); err != nil { // mounts are listed by their real paths: see removeTree
			return nil, fmt.Errorf("image directory %s: %w", d.path, err)
		}
	}
	if err := os.MkdirAll(s.namesDir(), 0o755); err != nil {
		return nil, fmt.Errorf("create image directory: %w", err)
	}
	return s, errors.Join(removeStale(s.dir), removeStale(s.cacheDir))
}

func (s *Store) namesDir() string { return filepath.Join(s.dir, "names") }

// Get returns the image with that name, or else with that id.
func (s *Store) Get(nameOrID string) (Image, error) {
	if nameRE.MatchString(nameOrID) {
		id, err := s.named(nameOrID)
		if err == nil {
			return s.load(id, nameOrID)
		}
		if !errors.Is(err, ErrNotFound) {
			return Image{}, err
		}
	}
	if !idRE.MatchString(nameOrID) {
		return Image{}, fmt.Errorf("%w: %q", ErrNotFound, nameOrID)
	}
	if _, err := os.Lstat(filepath.Join(s.dir, nameOrID, metaFile)); err != nil {
		return Image{}, fmt.Errorf("%w: %q", ErrNotFound, nameOrID)
	}
	img, err := s.load(nameOrID, "")
	if err != nil {
		return Image{}, err
	}
	if current, err := s.named(img.Name); err != nil || current != img.ID {
		img.Name = ""
	}
	return img, nil
}

// named returns the id that a name points to.
func (s *Store) named(name string) (string, error) {
	target, err := os.Readlink(filepath.Join(s.namesDir(), name))
	if errors.Is(err, fs.ErrNotExist) {
		return "", fmt.Errorf("%w: %q", ErrNotFound, name)
	}
	if err != nil {
		return "", fmt.Errorf("read image name %q: %w", name, err)
	}
	return filepath.Base(target), nil
}

// load reads an image. A name, when given, replaces the one it was built under.
func (s *Store) load(id, name string) (Image, error) {
	dir := filepath.Join(s.dir, id)
	raw, err := os.ReadFile(filepath.Join(dir, metaFile))
	if err != nil {
		return Image{}, fmt.Errorf("%w: %s: %w", ErrCorrupt, id, err)
	}
	var img Image
	if err := json.Unmarshal(raw, &img); err != nil {
		return Image{}, fmt.Errorf("%w: %s: %s: %w", ErrCorrupt, id, metaFile, err)
	}
	if img.FormatVersion != formatVersion || img.ID != id {
		return Image{}, fmt.Errorf("%w: %s: %s has format %d and id %q, want format %d: build the image again",
			ErrCorrupt, id, metaFile, img.FormatVersion, img.ID, formatVersion)
	}
	for _, b := range img.blobs() {
		b.Path = filepath.Join(dir, filepath.Base(b.Name))
		info, err := os.Stat(b.Path)
		if err != nil {
			return Image{}, fmt.Errorf("%w: %s: %w", ErrCorrupt, id, err)
		}
		if info.Size() != b.Bytes {
			return Image{}, fmt.Errorf("%w: %s: %s has %d bytes, want %d: build the image again", ErrCorrupt, id, b.Name, info.Size(), b.Bytes)
		}
	}
	if name != "" {
		img.Name = name
	}
	return img, nil
}

// List returns all images that can be read, the newest first. The error names those that can't be; the others are returned with it.
func (s *Store) List() ([]Image, error) {
	entries, err := os.ReadDir(s.dir)
	if err != nil {
		return nil, fmt.Errorf("list images: %w", err)
	}
	var images []Image
	var errs []error
	for _, e := range entries {
		if !e.IsDir() || e.Name() == "names" || !idRE.MatchString(e.Name()) {
			continue
		}
		img, err := s.Get(e.Name())
		if err != nil {
			errs = append(errs, err)
			continue
		}
		images = append(images, img)
	}
	slices.SortFunc(images, func(a, b Image) int {
		return cmp.Or(b.CreatedAt.Compare(a.CreatedAt), cmp.Compare(a.ID, b.ID))
	})
	return images, errors.Join(errs...)
}

// Remove deletes an image and its name. inUse is asked first, with the id, and its error is returned as it is; it may be nil.
func (s *Store) Remove(nameOrID string, inUse func(id string) error) error {
	id, err := s.resolve(nameOrID)
	if err != nil {
		return err
	}
	if inUse != nil {
		if err := inUse(id); err != nil {
			return err
		}
	}
	return s.remove(id)
}

// remove deletes the image with that id, and its name.
func (s *Store) remove(id string) error {
	names, err := os.ReadDir(s.namesDir())
	if err != nil {
		return fmt.Errorf("list image names: %w", err)
	}
	for _, e := range names {
		if target, err := s.named(e.Name()); err == nil && target == id {
			if err := os.Remove(filepath.Join(s.namesDir(), e.Name())); err != nil {
				return fmt.Errorf("remove image name: %w", err)
			}
		}
	}
	st, err := newStaging(s.dir)
	if err != nil {
		return err
	}
	if err := os.Rename(filepath.Join(s.dir, id), st.path("removed")); err != nil {
		return errors.Join(fmt.Errorf("remove image %s: %w", id, err), st.remove())
	}
	return errors.Join(syncDir(s.dir), st.remove())
}

// resolve is Get for images that may be damaged: those can be removed too.
func (s *Store) resolve(nameOrID string) (string, error) {
	img, err := s.Get(nameOrID)
	if err == nil {
		return img.ID, nil
	}
	if !errors.Is(err, ErrCorrupt) {
		return "", err
	}
	if id, err := s.named(nameOrID); err == nil {
		return id, nil
	}
	return nameOrID, nil
}

// publish moves a complete, staged image into place and then its name to it.
func (s *Store) publish(st *staging, img Image) error {
	raw, err := json.MarshalIndent(img, "", "  ")
	if err != nil {
		return fmt.Errorf("encode %s: %w", metaFile, err)
	}
	dir := st.path(img.ID)
	if err := writeFile(filepath.Join(dir, metaFile), append(raw, '\n'), 0o644); err != nil {
		return err
	}
	link := st.path("name")
	if err := os.Symlink(filepath.Join("..", img.ID), link); err != nil {
		return fmt.Errorf("create image name: %w", err)
	}
	if err := syncDir(dir); err != nil {
		return err
	}
	final := filepath.Join(s.dir, img.ID)
	if err := os.Rename(dir, final); err != nil {
		return fmt.Errorf("publish image: %w", err)
	}
	if err := os.Rename(link, filepath.Join(s.namesDir(), img.Name)); err != nil {
		// Nobody has seen the image yet: take it back, so that a failed build leaves nothing behind.
		return errors.Join(fmt.Errorf("publish image name: %w", err), os.Rename(final, dir))
	}
	return errors.Join(syncDir(s.dir), syncDir(s.namesDir()))
}

func newID() string {
	var b [8]byte
	rand.Read(b[:]) // never fails
	return hex.EncodeToString(b[:])
}

func digest(b []byte) string {
	sum := sha256.Sum256(b)
	return hex.EncodeToString(sum[:])
}
