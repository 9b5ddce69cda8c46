package image

import (
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"hash/crc32"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"time"
)

// rootfs is a root file system image on disk that is not part of an image yet.
type rootfs struct {
	Blob
	Python bool `json:"python"`
	cached bool // others use the file: it may be linked, not moved
}

// recipeVersion changes when the same packages make another root file system, so that cached ones are not used any more.
const recipeVersion = 1

// debianKey identifies a root file system made of Debian packages in the cache.
func debianKey(s BuildSpec) string {
	raw, err := json.Marshal([]any{recipeVersion, s.Suite, s.Mirror, s.Packages})
	if err != nil {
		panic(err) // strings and a number
	}
	return digest(raw)
}

// debianRootfs returns the root file system for the packages of the specification, which it makes if the cache has none.
func (b *build) debianRootfs(ctx context.Context) (_ rootfs, err error) {
	key := debianKey(b.spec)
	dir := filepath.Join(b.store.cacheDir, "roots", key)
	if !b.spec.Force {
		if r, err := cachedRootfs(dir); err == nil {
			b.report(Progress{Step: "rootfs", Detail: "using the cached root file system", Done: r.Bytes, Total: r.Bytes})
			return r, nil
		}
	}
	st, err := newStaging(b.store.cacheDir)
	if err != nil {
		return rootfs{}, err
	}
	defer func() { err = errors.Join(err, st.remove()) }()

	tree, made := st.path("root"), st.path("made")
	if err := b.bootstrap(ctx, st, tree); err != nil {
		return rootfs{}, err
	}
	b.report(Progress{Step: "rootfs", Detail: "creating the erofs image"})
	if err := os.Mkdir(made, 0o755); err != nil {
		return rootfs{}, fmt.Errorf("stage root file system: %w", err)
	}
	r, err := b.makeErofs(ctx, tree, filepath.Join(made, "rootfs.erofs"), key)
	if err != nil {
		return rootfs{}, err
	}
	return keepRootfs(st, r, made, dir)
}

// cachedRootfs reads an entry of the cache and checks that it is what was put there.
func cachedRootfs(dir string) (rootfs, error) {
	raw, err := os.ReadFile(filepath.Join(dir, "rootfs.json"))
	if err != nil {
		return rootfs{}, err
	}
	var r rootfs
	if err := json.Unmarshal(raw, &r); err != nil {
		return rootfs{}, err
	}
	now, err := blobOf(filepath.Join(dir, filepath.Base(r.Name)))
	if err != nil {
		return rootfs{}, err
	}
	if now.SHA256 != r.SHA256 {
		return rootfs{}, fmt.Errorf("cached root file system %s is damaged", now.Path)
	}
	r.Blob, r.cached = now, true
	return r, nil
}

// keepRootfs moves a root file system from made, in st, to dir in the cache.
func keepRootfs(st *staging, r rootfs, made, dir string) (rootfs, error) {
	raw, err := json.Marshal(r)
	if err != nil {
		return rootfs{}, fmt.Errorf("encode root file system: %w", err)
	}
	if err := writeFile(filepath.Join(made, "rootfs.json"), raw, 0o644); err != nil {
		return rootfs{}, err
	}
	if err := os.MkdirAll(filepath.Dir(dir), 0o755); err != nil {
		return rootfs{}, fmt.Errorf("create root cache: %w", err)
	}
	if err := os.Rename(dir, st.path("replaced")); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return rootfs{}, fmt.Errorf("replace cached root file system: %w", err)
	}
	switch err := os.Rename(made, dir); {
	case errors.Is(err, fs.ErrExist): // another process was faster
		return cachedRootfs(dir)
	case err != nil:
		return rootfs{}, fmt.Errorf("keep root file system in the cache: %w", err)
	}
	r.Path, r.cached = filepath.Join(dir, r.Name), true
	return r, syncDir(filepath.Dir(dir))
}

// bootstrapSteps are the messages by which mmdebstrap's progress is known, in order, and what they mean.
var bootstrapSteps = []struct{ message, detail string }{
	{"running --setup-hook", "reading package lists"},
	{"downloading packages", "downloading packages"},
	{"extracting archives", "extracting archives"},
	{"installing essential packages", "installing essential packages"},
	{"installing remaining packages", "installing remaining packages"},
	{"cleaning package lists", "cleaning up"},
}

// checkPackages is run by mmdebstrap before anything else. By itself it would find out that a package does not exist only after it
// has downloaded and installed the essential ones.
const checkPackages = `--setup-hook=export APT_CONFIG="$MMDEBSTRAP_APT_CONFIG"; ` +
	`apt-get update -q >&2 && apt-get install --simulate -q $FORKD_PACKAGES >/dev/null`

// unknownPackage is how apt says that there is no such package.
var unknownPackage = regexp.MustCompile(`^E: (?:Unable to locate package|Package|Couldn't find any package by (?:glob|regex)) '?([a-z0-9][a-z0-9+.:-]*)'?(?:$| has no installation candidate)`)

// bootstrap installs the packages into a new directory and makes it a guest's root.
func (b *build) bootstrap(ctx context.Context, st *staging, tree string) error {
	if os.Geteuid() != 0 {
		return errors.New("building a root file system from packages needs root: run forkd as root")
	}
	step := Progress{Step: "rootfs", Detail: "starting mmdebstrap", Total: int64(len(bootstrapSteps))}
	b.report(step)
	start := time.Now()
	args := []string{"--mode=root", "--variant=apt", "--format=directory",
		"--include=" + strings.Join(b.spec.Packages, ","),
		// A guest's root is read-only and rebuilt from scratch: nothing here has to survive a power cut while it is made.
		"--dpkgopt=force-unsafe-io",
		"--dpkgopt=path-exclude=/usr/share/man/*", "--dpkgopt=path-exclude=/usr/share/info/*",
		"--dpkgopt=path-exclude=/usr/share/locale/*", "--dpkgopt=path-include=/usr/share/locale/locale.alias",
		"--dpkgopt=path-exclude=/usr/share/doc/*", "--dpkgopt=path-include=/usr/share/doc/*/copyright",
		`--aptopt=Acquire::Retries "3"`, `--aptopt=Acquire::Languages "none"`,
		checkPackages, "--skip=update",
		b.spec.Suite, tree}
	if b.spec.Mirror != "" {
		args = append(args, b.spec.Mirror)
	}
	unknown := ""
	_, err := b.run(ctx, command{name: "mmdebstrap", args: args, isolated: true, timeout: 20 * time.Minute,
		// The epoch dates password changes, which would otherwise have today's date.
		env: []string{"TMPDIR=" + st.dir, fmt.Sprintf("SOURCE_DATE_EPOCH=%d", passwordDay*24*60*60),
			"FORKD_PACKAGES=" + strings.Join(b.spec.Packages, " ")},
		line: func(line string) {
			if m := unknownPackage.FindStringSubmatch(line); m != nil && unknown == "" {
				unknown = m[1]
			}
			for i, known := range bootstrapSteps {
				if strings.HasPrefix(line, "I: "+known.message) {
					step.Done, step.Detail = int64(i), known.detail
					b.report(step)
				}
			}
		},
	})
	if err != nil && unknown != "" {
		return fmt.Errorf("%w: package %q: Debian %s has none of that name, or none that can be installed", ErrInvalid, unknown, b.spec.Suite)
	}
	if err != nil {
		return fmt.Errorf("install packages: %w", err)
	}
	b.report(Progress{Step: "rootfs", Detail: "configuring the guest's user and files"})
	return customise(tree, start)
}

// makeErofs makes an image of a directory. Nothing is compressed: a guest reads from the host's page cache, and would unpack emulated.
// Modification times are kept, because Python's bytecode is valid for one only.
func (b *build) makeErofs(ctx context.Context, tree, file, key string) (rootfs, error) {
	args := []string{"--quiet", "--preserve-mtime", "-U", uuidOf(key), file, tree}
	if _, err := b.run(ctx, command{name: "mkfs.erofs", args: args, timeout: 20 * time.Minute}); err != nil {
		return rootfs{}, fmt.Errorf("create root file system image: %w", err)
	}
	if err := fixErofsTime(file); err != nil {
		return rootfs{}, err
	}
	blob, err := blobOf(file)
	if err != nil {
		return rootfs{}, err
	}
	return rootfs{Blob: blob, Python: hasPython(tree)}, nil
}

// uuidOf makes a file system's UUID of what it is made from.
func uuidOf(key string) string {
	h := digest([]byte("rootfs " + key))
	return strings.Join([]string{h[:8], h[8:12], "4" + h[13:16], "8" + h[17:20], h[20:32]}, "-")
}

// hasPython tells whether a tree has the interpreter that eval needs.
func hasPython(tree string) bool {
	for _, dir := range []string{"usr/bin", "usr/local/bin", "bin"} {
		if _, err := os.Lstat(filepath.Join(tree, dir, "python3")); err == nil {
			return true
		}
	}
	return false
}

// Layout of an erofs superblock (the kernel's fs/erofs/erofs_fs.h).
const (
	erofsSuperAt     = 1024
	erofsMagic       = 0xE0F5E1E2
	erofsChecksumAt  = 4
	erofsFeaturesAt  = 8
	erofsBuildTimeAt = 24 // seconds, then nanoseconds
	erofsBlockEnd    = 4096
	erofsHasChecksum = 1
)

// fixErofsTime removes the time at which the image was made from its superblock, so that the same tree makes the same bytes. Files
// that were written while the image was built have that time too; see customise.
func fixErofsTime(file string) error {
	f, err := os.OpenFile(file, os.O_RDWR, 0)
	if err != nil {
		return fmt.Errorf("open root file system image: %w", err)
	}
	err = func() error {
		block := make([]byte, erofsBlockEnd-erofsSuperAt)
		if _, err := f.ReadAt(block, erofsSuperAt); err != nil {
			return fmt.Errorf("read superblock: %w", err)
		}
		if binary.LittleEndian.Uint32(block) != erofsMagic {
			return errors.New("mkfs.erofs made something that is not erofs")
		}
		clear(block[erofsBuildTimeAt : erofsBuildTimeAt+12])
		if binary.LittleEndian.Uint32(block[erofsFeaturesAt:])&erofsHasChecksum != 0 {
			binary.LittleEndian.PutUint32(block[erofsChecksumAt:], 0)
			sum := ^crc32.Checksum(block, crc32.MakeTable(crc32.Castagnoli)) // erofs does not invert the result
			binary.LittleEndian.PutUint32(block[erofsChecksumAt:], sum)
		}
		if _, err := f.WriteAt(block, erofsSuperAt); err != nil {
			return fmt.Errorf("write superblock: %w", err)
		}
		return f.Sync()
	}()
	if err := errors.Join(err, f.Close()); err != nil {
		return fmt.Errorf("root file system image %s: %w", file, err)
	}
	return nil
}
