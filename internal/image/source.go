package image

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"
)

// source is where a root file system comes from.
type source struct {
	kind   sourceKind
	fsType string // of the image it becomes: the kernel's name for it
	key    string // changes when the content does; empty: unknown, so that every build is a new one
}

type sourceKind int

// diskBlock is what the size of a disk is a multiple of.
const diskBlock = 4096

const (
	fromPackages sourceKind = iota
	fromDirectory
	fromArchive
	fromImage
)

// inspectRootfs looks at what the specification names, before anything expensive is done.
func (b *build) inspectRootfs() (source, error) {
	if b.spec.Rootfs == "" {
		return source{kind: fromPackages, fsType: "erofs", key: debianKey(b.spec)}, nil
	}
	info, err := os.Stat(b.spec.Rootfs)
	if err != nil {
		return source{}, fmt.Errorf("%w: root file system: %w", ErrInvalid, err)
	}
	if info.IsDir() {
		return source{kind: fromDirectory, fsType: "erofs"}, nil
	}
	src, err := b.inspectFile(b.spec.Rootfs)
	if err != nil {
		return source{}, fmt.Errorf("%w: root file system %s: %w", ErrInvalid, b.spec.Rootfs, err)
	}
	return src, nil
}

// inspectFile tells a file system image or an archive by its magic numbers.
func (b *build) inspectFile(path string) (source, error) {
	f, err := openRegular(path)
	if err != nil {
		return source{}, err
	}
	defer f.Close()
	head := make([]byte, 4096)
	n, err := io.ReadFull(f, head)
	if err != nil && !errors.Is(err, io.ErrUnexpectedEOF) && !errors.Is(err, io.EOF) {
		return source{}, err
	}
	src, err := sniff(head[:n])
	if err != nil {
		return source{}, err
	}
	blob, err := blobOf(path)
	if err != nil {
		return source{}, err
	}
	src.key = blob.SHA256
	if b.spec.Python {
		src.key += "+python"
	}
	return src, nil
}

func sniff(head []byte) (source, error) {
	has := func(at int, magic string) bool {
		return len(head) >= at+len(magic) && string(head[at:at+len(magic)]) == magic
	}
	const extMagicAt, extIncompatAt, extNeedsRecovery = 1024 + 56, 1024 + 96, 4
	switch {
	case has(1024, "\xe2\xe1\xf5\xe0"):
		return source{kind: fromImage, fsType: "erofs"}, nil
	case has(0, "hsqs"):
		return source{kind: fromImage, fsType: "squashfs"}, nil
	case has(extMagicAt, "\x53\xef") && len(head) >= extIncompatAt+4:
		if binary.LittleEndian.Uint32(head[extIncompatAt:])&extNeedsRecovery != 0 {
			return source{}, errors.New("the ext4 image was not unmounted cleanly, and a guest mounts it read-only: run: e2fsck -p FILE")
		}
		return source{kind: fromImage, fsType: "ext4"}, nil
	case has(257, "ustar"), has(0, "\x1f\x8b"), has(0, "\x28\xb5\x2f\xfd"), has(0, "\xfd7zXZ"), has(0, "BZh"):
		return source{kind: fromArchive, fsType: "erofs"}, nil
	}
	return source{}, errors.New("neither an erofs, squashfs or ext4 image nor a tar archive")
}

// makeRootfs makes the image's root file system in st.
func (b *build) makeRootfs(ctx context.Context, st *staging, src source) (rootfs, error) {
	file := st.path("rootfs.img")
	switch src.kind {
	case fromPackages:
		return b.debianRootfs(ctx)
	case fromImage:
		b.report(Progress{Step: "rootfs", Detail: "copying " + b.spec.Rootfs})
		if err := copyFile(file, b.spec.Rootfs, diskBlock); err != nil {
			return rootfs{}, err
		}
		blob, err := blobOf(file)
		return rootfs{Blob: blob, Python: b.spec.Python}, err
	case fromArchive:
		tree := st.path("root")
		if err := b.unpack(ctx, tree); err != nil {
			return rootfs{}, err
		}
		return b.importTree(ctx, tree, file, src.key)
	default:
		return b.importTree(ctx, b.spec.Rootfs, file, newID())
	}
}

func (b *build) unpack(ctx context.Context, tree string) error {
	if os.Geteuid() != 0 {
		return errors.New("unpacking a root file system needs root, for its owners: run forkd as root")
	}
	b.report(Progress{Step: "rootfs", Detail: "unpacking " + b.spec.Rootfs})
	if err := os.Mkdir(tree, 0o755); err != nil {
		return fmt.Errorf("unpack: %w", err)
	}
	archive, err := filepath.Abs(b.spec.Rootfs)
	if err != nil {
		return fmt.Errorf("unpack: %w", err)
	}
	_, err = b.run(ctx, command{name: "tar", timeout: 20 * time.Minute, args: []string{"--extract", "--file=" + archive, "--directory=" + tree,
		"--numeric-owner", "--same-owner", "--preserve-permissions", "--xattrs", "--xattrs-include=*"}})
	if err != nil && ctx.Err() == nil && !diskFull(tree) {
		return fmt.Errorf("%w: archive %s can't be unpacked: %w", ErrInvalid, archive, err)
	}
	return err
}

// diskFull tells whether that is why a program could not write below a directory.
func diskFull(dir string) bool {
	var st unix.Statfs_t
	const enough = 1 << 20
	return unix.Statfs(dir, &st) == nil && (st.Bavail*uint64(st.Bsize) < enough || st.Files > 0 && st.Ffree == 0)
}

func (b *build) importTree(ctx context.Context, tree, file, key string) (rootfs, error) {
	b.report(Progress{Step: "rootfs", Detail: "creating the erofs image"})
	tree, err := filepath.Abs(tree)
	if err != nil {
		return rootfs{}, fmt.Errorf("root file system: %w", err)
	}
	r, err := b.makeErofs(ctx, tree, file, key)
	r.Python = r.Python || b.spec.Python
	return r, err
}

// setTime sets the times of a file or of a link itself.
func setTime(path string, t time.Time) error {
	ts := []unix.Timespec{unix.NsecToTimespec(t.UnixNano()), unix.NsecToTimespec(t.UnixNano())}
	return unix.UtimesNanoAt(unix.AT_FDCWD, path, ts, unix.AT_SYMLINK_NOFOLLOW)
}
