package snapshot

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sys/unix"
)

// Names in the store's directory and in that of a snapshot.
const (
	stagingPrefix = ".staging-"
	trashPrefix   = ".trash-"
	manifestFile  = "manifest.json"
	indexFile     = "memory.index"
	memoryFile    = "memory"
	deviceFile    = "device-state"
)

// Step is a point at which the store changes something on disk. A hook may stop it there.
type Step string

// The steps, in the order in which they are taken.
const (
	StepStage       Step = "snapshot.stage"        // before the staging directory is made
	StepMemory      Step = "snapshot.memory"       // before the memory file is made
	StepChunk       Step = "snapshot.chunk"        // before each chunk is written
	StepIndex       Step = "snapshot.index"        // before the index is written
	StepDevice      Step = "snapshot.device"       // before the device state is written
	StepManifest    Step = "snapshot.manifest"     // before the manifest is written
	StepSyncFiles   Step = "snapshot.sync-files"   // before the files are synced
	StepSyncStaging Step = "snapshot.sync-staging" // before the staging directory is synced
	StepRename      Step = "snapshot.rename"       // before the snapshot gets its name
	StepSyncStore   Step = "snapshot.sync-store"   // before that name is made durable
	StepTrash       Step = "snapshot.trash"        // before a removed snapshot loses its name
	StepTrashSync   Step = "snapshot.trash-sync"   // before that is made durable
	StepTrashDelete Step = "snapshot.trash-delete" // before its files are deleted
)

// Store keeps snapshots in a directory. It is safe for concurrent use.
type Store struct {
	dir      string
	hook     func(Step) error
	compress bool
}

// Option changes how a store works.
type Option func(*Store)

// WithHook has hook called before each step; the step fails with what it returns. It is for tests of crashes and failures.
func WithHook(hook func(Step) error) Option { return func(s *Store) { s.hook = hook } }

// WithCompression compresses the memory of new snapshots with zstd. It takes more time to freeze and to load for less disk;
// snapshots of both kinds can be in one store.
func WithCompression() Option { return func(s *Store) { s.compress = true } }

// Open opens the store in dir, which it makes if need be, and removes what crashed writers left behind.
func Open(dir string, options ...Option) (*Store, error) {
	s := &Store{dir: dir, hook: func(Step) error { return nil }}
	for _, o := range options {
		o(s)
	}
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("snapshot store: %w", err)
	}
	if err := syncDir(filepath.Dir(dir)); err != nil {
		return nil, fmt.Errorf("snapshot store: %w", err)
	}
	if err := s.sweep(); err != nil {
		return nil, fmt.Errorf("snapshot store %s: remove leftovers: %w", dir, err)
	}
	return s, nil
}

// sweep removes trash, and staging directories whose writer is gone: a live one holds a lock on its directory.
func (s *Store) sweep() error {
	entries, err := os.ReadDir(s.dir)
	if err != nil {
		return err
	}
	var errs []error
	for _, e := range entries {
		path := filepath.Join(s.dir, e.Name())
		switch {
		case strings.HasPrefix(e.Name(), trashPrefix):
			errs = append(errs, os.RemoveAll(path))
		case strings.HasPrefix(e.Name(), stagingPrefix):
			lock, err := lockDir(path)
			if errors.Is(err, unix.EWOULDBLOCK) || isNotExist(err) {
				continue
			}
			errs = append(errs, err, os.RemoveAll(path))
			if lock != nil {
				lock.Close()
			}
		}
	}
	return errors.Join(errs...)
}

// Dir is where snapshot id is or would be.
func (s *Store) Dir(id string) string { return filepath.Join(s.dir, id) }

// Path is the store's own directory.
func (s *Store) Path() string { return s.dir }

// Fits returns ErrDiskFull when the store's file system has less room than bytes. A store that compresses can't tell beforehand.
func (s *Store) Fits(bytes int64) error {
	var st unix.Statfs_t
	if err := unix.Statfs(s.dir, &st); err != nil {
		return fmt.Errorf("snapshot store %s: %w", s.dir, err)
	}
	if free := int64(st.Bavail) * st.Bsize; !s.compress && bytes > free {
		return fmt.Errorf("%w: %d MiB are needed in %s, %d MiB are free", ErrDiskFull, bytes>>20, s.dir, free>>20)
	}
	return nil
}

// Broken is a directory in the store that should be a snapshot and is none.
type Broken struct {
	ID  string
	Err error
}

// Get reads the manifest of a snapshot. It returns ErrNotFound, or ErrCorrupt when the manifest can't be trusted.
func (s *Store) Get(id string) (Manifest, error) {
	if !ValidID(id) {
		return Manifest{}, fmt.Errorf("snapshot %.80q: %w", id, ErrNotFound)
	}
	file, err := readLimited(filepath.Join(s.dir, id, manifestFile), maxManifestBytes)
	if isNotExist(err) {
		if _, dirErr := os.Stat(s.Dir(id)); isNotExist(dirErr) {
			return Manifest{}, fmt.Errorf("snapshot %s: %w", id, ErrNotFound)
		}
		return Manifest{}, &CorruptError{Snapshot: id, File: manifestFile, Offset: -1, Reason: "missing"}
	}
	if err != nil {
		return Manifest{}, fmt.Errorf("snapshot %s: %w", id, err)
	}
	m, err := Decode(file)
	if errors.Is(err, ErrTooNew) {
		return Manifest{}, fmt.Errorf("snapshot %s: %w", id, err)
	}
	if err != nil {
		return Manifest{}, &CorruptError{Snapshot: id, File: manifestFile, Offset: -1, Reason: "unreadable", Err: err}
	}
	if m.ID != id {
		return Manifest{}, &CorruptError{Snapshot: id, File: manifestFile, Offset: -1, Reason: "of another snapshot", Expected: id, Actual: m.ID}
	}
	return m, nil
}

// List reads all manifests, ordered by id. Snapshots that can't be read are returned apart, so that one does not hide the rest.
func (s *Store) List() ([]Manifest, []Broken, error) {
	entries, err := os.ReadDir(s.dir)
	if err != nil {
		return nil, nil, fmt.Errorf("list snapshots: %w", err)
	}
	var found []Manifest
	var broken []Broken
	for _, e := range entries {
		if !e.IsDir() || !ValidID(e.Name()) {
			continue // staging, trash, lost+found
		}
		m, err := s.Get(e.Name())
		switch {
		case err == nil:
			found = append(found, m)
		case !errors.Is(err, ErrNotFound): // removed meanwhile
			broken = append(broken, Broken{e.Name(), err})
		}
	}
	return found, broken, nil
}

// Children returns the ids of the snapshots that rest directly on id.
func (s *Store) Children(id string) ([]string, error) {
	all, _, err := s.List()
	if err != nil {
		return nil, err
	}
	var out []string
	for _, m := range all {
		if m.Parent == id {
			out = append(out, m.ID)
		}
	}
	return out, nil
}

// Chain returns what a snapshot rests on and itself, root first. A parent that is missing and a cycle are ErrCorrupt.
func (s *Store) Chain(id string) ([]Manifest, error) {
	m, err := s.Get(id)
	if err != nil {
		return nil, err
	}
	chain := []Manifest{m}
	seen := map[string]bool{id: true}
	for m.Parent != "" {
		child := m
		switch {
		case seen[child.Parent]:
			return nil, &CorruptError{Snapshot: id, Offset: -1, Reason: fmt.Sprintf("its chain is a cycle: %s rests on %s", child.ID, child.Parent)}
		case len(chain) > maxChain:
			return nil, &CorruptError{Snapshot: id, Offset: -1, Reason: fmt.Sprintf("its chain has more than %d layers", maxChain)}
		}
		if m, err = s.Get(child.Parent); errors.Is(err, ErrNotFound) {
			return nil, &CorruptError{Snapshot: id, Offset: -1, Reason: fmt.Sprintf("%s rests on %s, which is missing", child.ID, child.Parent)}
		}
		if err != nil {
			return nil, fmt.Errorf("chain of snapshot %s: %w", id, err)
		}
		if m.Memory.LogicalBytes != child.Memory.LogicalBytes {
			return nil, &CorruptError{Snapshot: id, Offset: -1, Reason: fmt.Sprintf("%s and %s differ in memory size", child.ID, m.ID),
				Expected: fmt.Sprint(m.Memory.LogicalBytes), Actual: fmt.Sprint(child.Memory.LogicalBytes)}
		}
		seen[m.ID] = true
		chain = append(chain, m)
	}
	slices.Reverse(chain)
	return chain, nil
}

// Sizes returns the guest memory a snapshot stands for and the bytes its files take on disk.
func (s *Store) Sizes(id string) (logical, physical int64, err error) {
	m, err := s.Get(id)
	if err != nil {
		return 0, 0, err
	}
	entries, err := os.ReadDir(s.Dir(id))
	if err != nil {
		return 0, 0, fmt.Errorf("size of snapshot %s: %w", id, err)
	}
	for _, e := range entries {
		var st unix.Stat_t
		if err := unix.Lstat(filepath.Join(s.Dir(id), e.Name()), &st); err != nil {
			return 0, 0, fmt.Errorf("size of snapshot %s: %w", id, err)
		}
		physical += st.Blocks * 512
	}
	return m.Memory.LogicalBytes, physical, nil
}

// Remove takes a snapshot out of the store. It has no name any more once that began; what a crash leaves of its files, the next
// Open removes. That nothing rests on it or uses it is the caller's to know.
func (s *Store) Remove(id string) error {
	if !ValidID(id) {
		return fmt.Errorf("remove snapshot %.80q: %w", id, ErrNotFound)
	}
	if err := s.trash(id); err != nil {
		return fmt.Errorf("remove snapshot %s: %w", id, err)
	}
	return nil
}

func (s *Store) trash(id string) error {
	if err := s.hook(StepTrash); err != nil {
		return err
	}
	trash := filepath.Join(s.dir, uniqueName(trashPrefix))
	if err := os.Rename(s.Dir(id), trash); isNotExist(err) {
		return ErrNotFound
	} else if err != nil {
		return err
	}
	if err := s.hook(StepTrashSync); err != nil {
		return err
	}
	if err := syncDir(s.dir); err != nil {
		return err
	}
	if err := s.hook(StepTrashDelete); err != nil {
		return err
	}
	return os.RemoveAll(trash)
}
