package image

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"
)

// build is one run of Store.Build.
type build struct {
	store  *Store
	spec   BuildSpec
	report func(Progress)
}

func (b *build) run(ctx context.Context, c command) ([]byte, error) {
	if err := ctx.Err(); err != nil {
		return nil, context.Cause(ctx)
	}
	return b.store.run.run(ctx, c)
}

// Build makes an image, publishes it and moves the name to it. If the name's image was made from the very same things it is returned
// as it is, unless spec.Force. A build that fails or whose ctx ends leaves nothing behind but what the cache may keep: complete
// kernels and root file systems. report, which may be nil, is never called twice at a time. One build runs at a time, others wait.
func (s *Store) Build(ctx context.Context, spec BuildSpec, report func(Progress)) (Image, error) {
	spec, err := spec.normalise()
	if err != nil {
		return Image{}, err
	}
	if len(s.agent) == 0 {
		return Image{}, errors.New("build image: this forkd has no guest agent: run `make build` and use bin/forkd")
	}
	if report == nil {
		report = func(Progress) {}
	}
	select {
	case s.building <- struct{}{}:
	default:
		report(Progress{Step: "wait", Detail: "waiting for another build to end"})
		select {
		case s.building <- struct{}{}:
		case <-ctx.Done():
			return Image{}, fmt.Errorf("build image %q: %w", spec.Name, context.Cause(ctx))
		}
	}
	defer func() { <-s.building }()

	st, err := newStaging(s.dir)
	if err != nil {
		return Image{}, err
	}
	b := &build{store: s, spec: spec, report: report}
	img, err := b.make(ctx, st)
	if err := errors.Join(err, st.remove()); err != nil {
		return Image{}, fmt.Errorf("build image %q: %w", spec.Name, err)
	}
	return s.Get(img.ID)
}

// make builds in st and publishes.
func (b *build) make(ctx context.Context, st *staging) (Image, error) {
	src, err := b.inspectRootfs()
	if err != nil {
		return Image{}, err
	}
	k, err := b.resolveKernel(ctx)
	if err != nil {
		return Image{}, err
	}
	b.report(Progress{Step: "initramfs", Detail: "packing the agent and modules of kernel " + k.version})
	initramfs, err := b.packInitramfs(ctx, k, src.fsType)
	if err != nil {
		return Image{}, err
	}
	img := Image{FormatVersion: formatVersion, ID: newID(), Name: b.spec.Name, KernelVersion: k.version,
		RootfsType: src.fsType, Packages: b.spec.Packages, Suite: b.spec.Suite, Mirror: b.spec.Mirror, AgentSHA256: digest(b.store.agent)}
	kernelBlob, err := blobOf(k.path)
	if err != nil {
		return Image{}, err
	}
	img.SpecSHA256, err = specDigest(kernelBlob.SHA256, digest(initramfs), src.key)
	if err != nil {
		return Image{}, err
	}
	if old, err := b.store.Get(b.spec.Name); err == nil && old.Name == b.spec.Name && src.key != "" && old.SpecSHA256 == img.SpecSHA256 && !b.spec.Force {
		b.report(Progress{Step: "publish", Detail: "nothing changed: image " + old.ID})
		return old, nil
	}

	root, err := b.makeRootfs(ctx, st, src)
	if err != nil {
		return Image{}, err
	}
	b.report(Progress{Step: "publish", Detail: "publishing image " + img.ID})
	if err := b.assemble(st, &img, kernelBlob, initramfs, root); err != nil {
		return Image{}, err
	}
	if ctx.Err() != nil {
		return Image{}, context.Cause(ctx)
	}
	return img, b.store.publish(st, img)
}

// specDigest covers everything an image is made from; what the agent and modules are is in the initramfs.
func specDigest(kernel, initramfs, rootfs string) (string, error) {
	raw, err := json.Marshal([]any{formatVersion, kernel, initramfs, rootfs})
	if err != nil {
		return "", fmt.Errorf("encode specification: %w", err)
	}
	return digest(raw), nil
}

// assemble puts the files of an image into its staged directory.
func (b *build) assemble(st *staging, img *Image, kernel Blob, initramfs []byte, root rootfs) error {
	dir := st.path(img.ID)
	if err := os.Mkdir(dir, 0o755); err != nil {
		return fmt.Errorf("stage image: %w", err)
	}
	place := linkFile // the cache never writes to a kernel again
	if b.spec.Kernel != "" {
		place = func(dst, src string) error { return copyFile(dst, src, 1) }
	}
	if err := place(filepath.Join(dir, kernelFile), kernel.Path); err != nil {
		return err
	}
	img.Kernel = Blob{Name: kernelFile, Bytes: kernel.Bytes, SHA256: kernel.SHA256}
	if err := writeFile(filepath.Join(dir, initramfsFile), initramfs, 0o644); err != nil {
		return err
	}
	img.Initramfs = Blob{Name: initramfsFile, Bytes: int64(len(initramfs)), SHA256: digest(initramfs)}

	name := "rootfs." + img.RootfsType
	place = func(dst, src string) error { return os.Rename(src, dst) }
	if root.cached {
		place = linkFile
	}
	if err := place(filepath.Join(dir, name), root.Path); err != nil {
		return fmt.Errorf("stage root file system: %w", err)
	}
	img.Rootfs = Blob{Name: name, Bytes: root.Bytes, SHA256: root.SHA256}
	img.Python = root.Python
	img.CreatedAt = time.Now().UTC().Truncate(time.Second)
	return nil
}
